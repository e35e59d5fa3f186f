"""Cuts added tokens, which are matched by their text and never merged, out of a text.

The order is llama.cpp's (`tokenizer_st_partition`): all places of the longest token first, then those of the
next in what is left. Knows nothing of how the rest becomes tokens.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from quengine.models.tokenizer.vocabulary import Vocabulary


class PieceEncoder(Protocol):
    """Merges a piece of text without added tokens into ids.

    `after_special` says that the piece is at the beginning or follows an added token.
    """

    def encode(self, text: str, after_special: bool) -> list[int]: ...


class AddedTokenEncoder:
    """Encodes whole texts: user-defined tokens are always matched, control tokens where `special` asks."""

    def __init__(self, vocabulary: Vocabulary, pieces: PieceEncoder) -> None:
        self._vocabulary = vocabulary
        self._pieces = pieces

    def encode(self, text: str, special: bool) -> list[int]:
        added = [self._vocabulary.user_defined_tokens]
        if special:
            added.append(self._vocabulary.control_tokens)
        ids: list[int] = []
        after_special = True
        for piece in partition(text, added):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._pieces.encode(piece, after_special)
            after_special = isinstance(piece, int)
        return ids


def partition(text: str, tokens: Iterable[Mapping[str, int]]) -> list[str | int]:
    """Pieces of `text` in order: ids where a token's text stood, strings between. No string is empty.

    `tokens` are mappings from text to id.
    """
    present = [(piece, token_id) for group in tokens for piece, token_id in group.items() if piece in text]
    present.sort(key=lambda item: -len(item[0].encode()))
    pieces: list[str | int] = [text] if text else []
    for piece, token_id in present:
        pieces = [part for old in pieces for part in _cut(old, piece, token_id)]
    return pieces


def _cut(old: str | int, piece: str, token_id: int) -> list[str | int]:
    if isinstance(old, int) or piece not in old:
        return [old]
    parts: list[str | int] = []
    for n, rest in enumerate(old.split(piece)):
        if n:
            parts.append(token_id)
        if rest:
            parts.append(rest)
    return parts
