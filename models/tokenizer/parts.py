"""What a tokenizer is made of, which readers of both kinds of files give."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quengine.models.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from quengine.models.tokenizer.token_length import TokenLength


class TextEncoder(Protocol):
    """Cuts a text into ids; control tokens are matched by their text where `special` asks."""

    def encode(self, text: str, special: bool) -> list[int]: ...


@dataclass(frozen=True)
class TokenizerParts:
    """One tokenizer's.

    Attributes:
        vocabulary: the tokens.
        make_encoder: builds the merging engine, which takes time.
        length: finds how much of a text one token can stand for; None where that has no bound.
        space_prefix: the encoder puts a space before a text.
    """

    vocabulary: Vocabulary
    make_encoder: Callable[[], TextEncoder]
    length: Callable[[], "TokenLength | None"]
    space_prefix: bool = False
