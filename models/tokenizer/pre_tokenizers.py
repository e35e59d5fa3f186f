"""How byte-level BPE models cut text into words, by the name in `tokenizer.ggml.pre`.

The names and patterns are facts of the format: those of llama.cpp (src/llama-vocab.cpp, where GGUF's names
are defined) and, for tekken, of Mistral's own tokenizer files. Each pattern in turn splits the pieces that the
one before it left; matches and the text between them are both words. Knows nothing of vocabularies or merges.

Characters have the categories of Unicode 15.1, llama.cpp's, whatever the regex engine underneath knows: else
the ids of a text would change with a library's release. Tekken keeps the engine's, as mistral-common does.
"""

import re
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


# Code points that Unicode 16.0 assigned (UCD DerivedAge.txt); before, they had no category.
NEW_IN_UNICODE_16 = """
    897 1B4E-1B4F 1B7F 1C89-1C8A 2427-2429 31E4-31E5 A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D65 10D69-10D85
    10D8E-10D8F 10EC2-10EC4 10EFC 11380-11389 1138B 1138E 11390-113B5 113B7-113C0 113C2 113C5 113C7-113CA
    113CC-113D5 113D7-113D8 113E1-113E2 116D0-116E3 11BC0-11BE1 11BF0-11BF9 11F5A 13460-143FA 16100-16139
    16D40-16D79 18CFF 1CC00-1CCF9 1CD00-1CEB3 1E5D0-1E5FA 1E5FF 1F8B2-1F8BB 1F8C0-1F8C1 1FA89 1FA8F 1FABE
    1FAC6 1FADC 1FADF 1FAE9 1FBCB-1FBEF"""


def _ranges(spans: str) -> str:
    r"""Hexadecimal code points and spans, `41-5A B5`, as the inside of a character class."""
    return "".join("-".join(rf"\x{{{end}}}" for end in span.split("-")) for span in spans.split())


def _unicode_15(pattern: str) -> str:
    r"""`pattern` with every \p{X} cut to the characters that had that category in Unicode 15.1."""
    later = _ranges(NEW_IN_UNICODE_16)
    return re.sub(r"\\p\{\w+\}", lambda category: f"[{category[0]}&&[^{later}]]", pattern)


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
)  # fmt: skip
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
# CJK and Hangul; the middle range spans other scripts too, and llama.cpp takes no white space for any of them.
_DEEPSEEK_CJK = rf"[{_ranges('800-9FA5 AC00-D7FF')}&&[^\s]]+"
# Letters with case (and a few that had it when DeepSeek LLM was made), from its tokenizer.json.
_DEEPSEEK_LETTERS = """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A
    38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF
    1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D
    1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4
    1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F
    2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F
    A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3
    104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"""
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_ranges(_DEEPSEEK_LETTERS)}]+",
    r"\s?[!-/:-~！-／：-～‘-‟、。]+",
    r"\s+\z",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_PUNCTUATION_AND_TICK = r"[\p{P}\$\+<=>\^~\|`]+"
_THREE_DIGITS = r"[0-9][0-9][0-9]"

_PRE_TOKENIZERS = {
    "default": PreTokenizer((_PUNCTUATION, _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "gpt-2": PreTokenizer((_GPT2,)),
    "starcoder": PreTokenizer((r"\p{N}", _GPT2)),
    "falcon": PreTokenizer((_PUNCTUATION_AND_TICK, _GPT2, _THREE_DIGITS)),
    "llama-bpe": PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
}
# Names of models that split as another one does.
_ALIASES = {
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "gpt-2": ("olmo", "phi-2", "mpt", "jais", "trillion", "gigachat", "a.x-4.0", "mellum", "exaone4"),
    "starcoder": ("smollm", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    "dbrx": ("smaug-bpe", "glm4", "chatglm-bpe"),
    "qwen2": (
        "deepseek-r1-qwen",
        "megrez",
        "stablelm2",
        "hunyuan",
        "solar-open",
        "grok-2",
        "kormo",
        "f2llmv2",
    ),
    "tekken": ("mistral",),
}
_CANONICAL = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that GGUF name. Raises TokenizerError that lists the known ones for another."""
    canonical = _CANONICAL.get(name, name)
    found = _PRE_TOKENIZERS.get(canonical)
    if found is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS.keys() | _CANONICAL.keys()))
        raise TokenizerError(f"pre-tokenizer {name!r} is not supported; supported: {known}")
    if canonical == "tekken":
        return found
    return PreTokenizer(tuple(map(_unicode_15, found.patterns)), found.ignore_merges, found.add_bos)
