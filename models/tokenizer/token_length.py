"""The most bytes of a text that one token can stand for, a bound that holds for every text.

With it a text that must have too many tokens is refused before it is tokenized.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quengine.models.tokenizer.bpe import BYTE_TO_CHAR, byte_level_bytes
from quengine.models.tokenizer.vocabulary import TokenType, Vocabulary

_LONGEST_CHARACTER = 4  # bytes: what an unknown token may stand for
# The most that Unicode's canonical composition shortens UTF-8 is 3.5 times: U+1FBE U+0308 U+0301 becomes U+0390.
_COMPOSITION = 4
_IN_UTF8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
_SPELLED_AS_THEY_ARE = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
_ADDING = frozenset({"Prepend", "ByteLevel"})
_CANONICAL = frozenset({"NFC", "NFD"})
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})


@dataclass(frozen=True)
class TokenLength:
    """The bound on tokens.

    longest: most bytes of UTF-8 that a token stands for. dropped: bytes that the vocabulary lacks; they give no token.
    """

    longest: int
    dropped: bytes = b""

    def least_tokens(self, text: str) -> int:
        """The least number of tokens that `text` has."""
        raw = text.encode(errors="ignore")
        size = len(raw.translate(None, self.dropped)) if self.dropped else len(raw)
        return -(-size // self.longest)


def of_gguf(vocabulary: Vocabulary, byte_level: bool) -> TokenLength | None:
    """The token length of a GGUF vocabulary, spelled in bytes if `byte_level`, else in characters; None if special
    tokens absorb the white space beside them, which may have any length."""
    if vocabulary.lstrip_ids or vocabulary.rstrip_ids:
        return None
    return of_byte_level(vocabulary) if byte_level else of_scored(vocabulary)


def of_byte_level(vocabulary: Vocabulary) -> TokenLength:
    """The token length of byte-level BPE."""
    longest = max(1, *map(_bytes_of_byte_level, vocabulary.texts, vocabulary.types))
    missing = (byte for byte, char in enumerate(BYTE_TO_CHAR) if char not in vocabulary.ids)
    return TokenLength(longest, bytes(missing))


def of_scored(vocabulary: Vocabulary) -> TokenLength:
    """The token length of SentencePiece's BPE. A space counts as U+2581, three bytes, as a text may also have that
    character."""
    return TokenLength(max(_LONGEST_CHARACTER, *(len(text.encode()) for text in vocabulary.texts)))


def of_pipeline(vocabulary: Vocabulary, parts: Mapping[str, Any]) -> TokenLength | None:
    """The token length of a tokenizer.json, `parts`; None if one of its steps may drop text, or is not
    known to keep it."""
    normalizers, splits = _steps(parts.get("normalizer")), _steps(parts.get("pre_tokenizer"))
    added = [token for token in parts.get("added_tokens") or () if isinstance(token, Mapping)]
    if (
        not all(map(_keeps_length, normalizers))
        or not all(step.get("type") in _KEEPING and step.get("behavior") != "Removed" for step in splits)
        or any(token.get("lstrip") or token.get("rstrip") for token in added)
    ):
        return None
    byte_level = any(step.get("type") == "ByteLevel" for step in [*normalizers, *splits])
    model = parts.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        return None
    if not byte_level and not _every_character_has_tokens(vocabulary, model):
        return None
    length = of_byte_level(vocabulary) if byte_level else of_scored(vocabulary)
    if not any(step.get("type") in _CANONICAL for step in normalizers):
        return length
    if _IN_UTF8.intersection(length.dropped):
        return None  # a composed character may be dropped though its parts are not
    return TokenLength(_COMPOSITION * length.longest)


def _bytes_of_byte_level(text: str, kind: int) -> int:
    return len(text.encode() if kind in _SPELLED_AS_THEY_ARE else byte_level_bytes(text))


def _every_character_has_tokens(vocabulary: Vocabulary, model: Mapping[str, Any]) -> bool:
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256)):
        return True
    return model.get("unk_token") is not None and not model.get("fuse_unk")


def _keeps_length(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind != "Replace":
        return kind in _ADDING or kind in _CANONICAL
    pattern, content = step.get("pattern"), step.get("content")
    old = pattern.get("String") if isinstance(pattern, Mapping) else None
    return isinstance(old, str) and isinstance(content, str) and len(content.encode()) >= len(old.encode())


def _steps(part: Any) -> list[Mapping[str, Any]]:
    """The single steps of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if not isinstance(part, Mapping):
        return []
    if part.get("type") != "Sequence":
        return [part]
    inner: Iterable[Any] = part.get("normalizers") or part.get("pretokenizers") or ()
    return [step for each in inner for step in _steps(each)]
