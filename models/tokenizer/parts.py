"""The parts of a tokenizer, which the readers of both kinds of files make, and the encoder of whole texts.

Added tokens are matched by their text, never merged, and cut out of a text first. The order is llama.cpp's
(`tokenizer_st_partition`): all occurrences of the longest token, then those of the next longest in what is left.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quengine.models.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from quengine.models.tokenizer.token_length import TokenLength

_STRIPPED = " \t\n\v\f\r"  # the characters of C's isspace, which llama.cpp uses


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
        ids: list[int] = []
        after_special = True
        for piece in partition(text, self._vocabulary, user_defined=True, control=special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._pieces.encode(piece, after_special)
            after_special = isinstance(piece, int)
        return ids


def partition(text: str, vocabulary: Vocabulary, user_defined: bool, control: bool) -> list[str | int]:
    """`text` in pieces, in order: ids in place of tokens' texts, and the non-empty strings between. `user_defined`,
    `control`: which tokens of `vocabulary` are matched."""
    wanted = [(vocabulary.user_defined_tokens, user_defined), (vocabulary.control_tokens, control)]
    present = [pair for tokens, asked in wanted if asked for pair in tokens.items() if pair[0] in text]
    present.sort(key=lambda item: -len(item[0].encode()))
    pieces: list[str | int] = [text] if text else []
    for piece, token_id in present:
        pieces = [part for old in pieces for part in _cut(old, piece, token_id, vocabulary)]
    return pieces


def _cut(old: str | int, piece: str, token_id: int, vocabulary: Vocabulary) -> list[str | int]:
    if isinstance(old, int) or piece not in old:
        return [old]
    parts: list[str | int] = []
    between = old.split(piece)
    for n, rest in enumerate(between):
        if n:
            parts.append(token_id)
            rest = rest.lstrip(_STRIPPED) if token_id in vocabulary.rstrip_ids else rest
        if n < len(between) - 1 and token_id in vocabulary.lstrip_ids:
            rest = rest.rstrip(_STRIPPED)
        if rest:
            parts.append(rest)
    return parts


class TextEncoder(Protocol):
    """Cuts a text into ids; control tokens are matched by their text where `special` asks."""

    def encode(self, text: str, special: bool) -> list[int]: ...


@dataclass(frozen=True)
class TokenizerParts:
    """One tokenizer's.

    Attributes:
        vocabulary: the tokens.
        make_encoder: builds the merging engine, which takes time.
        length: returns the bound on how much of a text one token can stand for, or None where there is no bound.
        space_prefix: the encoder puts a space before a text.
    """

    vocabulary: Vocabulary
    make_encoder: Callable[[], TextEncoder]
    length: Callable[[], "TokenLength | None"]
    space_prefix: bool = False
