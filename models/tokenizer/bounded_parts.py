"""Whether a tokenizer.json has only parts whose time and memory are linear in the length of a text.

A part that is not known to be bounded counts as unbounded. Such a file still works, in a process with limits.
"""

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from quengine.models.tokenizer.charsmap import charsmap_problem
from quengine.models.tokenizer.scored_bpe import SPACE

MAX_COMPONENTS = 16
MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
MAX_ADDED_TOKENS = 1 << 16
MAX_TEXT = 1000
MAX_PIECE = 256
_SPACE_RUNS = " {2,}"
MAX_POST_PROCESSOR = 4096

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The patterns of tokenizer.json in the model families that the decoder runs. Two consecutive parts of a pattern can
# divide a text between them in at most as many ways as it has characters.
KNOWN_PATTERNS = frozenset(
    (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        _CONTRACTION + _WORD + r"|\p{N}{1,3}" + _SIGNS + _SPACES,  # Llama 3
        _CONTRACTION + _WORD + r"|\p{N}" + _SIGNS + _SPACES,  # Qwen 2 to 3
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES,  # Mistral's tekken
        r"\p{N}{1,3}",
        r"\p{N}+",
        r"\p{N}",
        r"[0-9][0-9][0-9]",
        r"\d",
        " ",
    )
)
_NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt", "BertNormalizer", "ByteLevel")
)
_PRE_TOKENIZERS = frozenset(
    (
        *("ByteLevel", "Digits", "Metaspace", "Whitespace", "WhitespaceSplit"),
        *("Punctuation", "BertPreTokenizer", "CharDelimiterSplit"),
    )
)


def is_bounded(parts: Mapping[str, Any]) -> bool:
    """Whether the library may run the tokenizer.json `parts` without limits. `parts` may hold anything."""
    try:
        return _is_bounded(parts)
    except RecursionError:
        return False


def _is_bounded(parts: Mapping[str, Any]) -> bool:
    normalizers = list(_components(parts.get("normalizer"), "normalizers"))
    pre_tokenizers = list(_components(parts.get("pre_tokenizer"), "pretokenizers"))
    return (
        _model_is_bounded(parts.get("model"))
        and _added_are_bounded(parts.get("added_tokens"))
        and all(map(_normalizer_is_bounded, normalizers))
        and all(map(_pre_tokenizer_is_bounded, pre_tokenizers))
        and all(_is_short(part) for part in (normalizers, pre_tokenizers))
        and not _has_pattern(parts.get("decoder"))
        and len(json.dumps(parts.get("post_processor"))) <= MAX_POST_PROCESSOR
    )


def _components(part: Any, inner: str) -> Iterator[Any]:
    """The components of `part` if it is a sequence, else `part` alone; at most MAX_COMPONENTS + 1 of them."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        given = part.get(inner)
        yield from given[: MAX_COMPONENTS + 1] if isinstance(given, list) else [given]
    elif part is not None:
        yield part


def _is_short(components: list[Any]) -> bool:
    """Whether there are few components, and at most one ByteLevel, as each may double a text's bytes."""
    kinds = Counter(component["type"] for component in components)
    return len(components) <= MAX_COMPONENTS and kinds["ByteLevel"] <= 1


def _normalizer_is_bounded(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "Prepend":
        return _is_text(part.get("prepend"), 16)
    if kind == "Precompiled":
        return _is_sound_map(part.get("precompiled_charsmap"))
    if kind == "Replace":
        pattern, content = part.get("pattern"), part.get("content")
        if pattern == {"Regex": _SPACE_RUNS}:
            return content in ("", " ", SPACE)
        text = pattern.get("String") if isinstance(pattern, dict) and len(pattern) == 1 else None
        if not isinstance(text, str) or not isinstance(content, str):
            return False
        return 0 < len(text) <= MAX_TEXT and len(content) <= len(text)
    return isinstance(kind, str) and kind in _NORMALIZERS


def _pre_tokenizer_is_bounded(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "Split":
        return isinstance(kind, str) and kind in _PRE_TOKENIZERS
    pattern = part.get("pattern")
    if not isinstance(pattern, dict) or len(pattern) != 1:
        return False
    ((way, text),) = pattern.items()
    return _is_text(text) and (text in KNOWN_PATTERNS if way == "Regex" else way == "String" and bool(text))


def _is_sound_map(text: Any) -> bool:
    if not isinstance(text, str):
        return False
    try:
        raw = b64decode(text, validate=True)
    except ValueError:
        return False
    return charsmap_problem(raw) is None


def _model_is_bounded(model: Any) -> bool:
    if isinstance(model, dict) and model.get("type") == "Unigram":
        return _unigram_is_bounded(model.get("vocab"))
    if not isinstance(model, dict) or model.get("type") != "BPE":
        return False
    vocab, merges = model.get("vocab"), model.get("merges")
    affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    return (
        isinstance(vocab, dict)
        and len(vocab) <= MAX_TOKENS
        and isinstance(merges, list)
        and len(merges) <= MAX_MERGES
        and all(affix is None or _is_text(affix, 16) for affix in affixes)
    )


def _unigram_is_bounded(vocab: Any) -> bool:
    """Whether a Unigram model is bounded by few, short pieces: at each place of a text it tries all that match."""
    return (
        isinstance(vocab, list)
        and len(vocab) <= MAX_TOKENS
        and all(
            isinstance(entry, list) and len(entry) == 2 and bool(entry[0]) and _is_text(entry[0], MAX_PIECE)
            for entry in vocab
        )
    )


def _added_are_bounded(added: Any) -> bool:
    return added is None or (
        isinstance(added, list)
        and len(added) <= MAX_ADDED_TOKENS
        and all(isinstance(token, dict) and _is_text(token.get("content")) for token in added)
    )


def _has_pattern(part: Any) -> bool:
    """Whether there is a regular expression in `part`: it is compiled even where it is never used."""
    return "Regex" in json.dumps(part)


def _is_text(value: Any, limit: int = MAX_TEXT) -> bool:
    return isinstance(value, str) and len(value) <= limit
