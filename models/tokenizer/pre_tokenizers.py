"""How byte-level BPE models cut text into words, by the name in `tokenizer.ggml.pre`.

The names and patterns are facts of the format: those of llama.cpp (src/llama-vocab.cpp, where GGUF's names
are defined) and of the models' own tokenizer.json. Each pattern in turn splits the pieces that the one before
it left; matches and the text between them are both words. Knows nothing of vocabularies or merges.
"""

from dataclasses import dataclass

from quengine.models.tokenizer.errors import TokenizerError


@dataclass(frozen=True)
class PreTokenizer:
    """`ignore_merges`: a word that is a token is taken whole, whatever the merges would give.

    `add_bos`: whether a prompt begins with BOS where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGIT = r"\p{N}"

_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _SINGLE_DIGITS,
}
_ALIASES: dict[str, str] = {}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that GGUF name. Raises TokenizerError that lists the known ones for another."""
    found = _PRE_TOKENIZERS.get(_ALIASES.get(name, name))
    if found is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS.keys() | _ALIASES.keys()))
        raise TokenizerError(f"pre-tokenizer {name!r} is not supported; supported: {known}")
    return found
