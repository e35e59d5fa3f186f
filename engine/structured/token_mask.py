"""Which tokens the sampler may choose next: what a constraint's mask and that of `min_tokens` have in common."""

from collections.abc import Collection
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Mask: TypeAlias = npt.NDArray[np.bool_]
"""For each token of the vocabulary, whether it is allowed: [vocab_size]."""


class TokenMask(Protocol):
    """The mask of one text's next token, which goes on with the tokens that are chosen (`constraint.Constraint`)."""

    @property
    def finished(self) -> bool:
        """Whether nothing can follow what has been generated."""
        ...

    def allowed(self) -> Mask:
        """The mask [vocab_size] of the next token; the caller leaves it as it is. Raises EngineError."""
        ...

    def advance(self, token: int) -> None:
        """Go on by an allowed token. Raises EngineError."""
        ...


class TextMask(TokenMask, Protocol):
    """The mask of a whole text, which also says where that may end."""

    @property
    def accepting(self) -> bool:
        """Whether the text so far may be all of it."""
        ...


class MinTokens:
    """Bans the tokens that would end a text of fewer than `least` tokens.

    Args:
        least: tokens that the text has at least; a constraint that nothing can follow ends it before.
        end_ids: what is banned until then.
        vocab_size: entries of the mask.
        inner: what else masks the tokens.
    """

    def __init__(
        self, least: int, end_ids: Collection[int], vocab_size: int, inner: TokenMask | None
    ) -> None:
        self._left = least
        self._inner = inner
        self._all = np.ones(vocab_size, np.bool_)
        self._going_on = self._all.copy()
        self._going_on[[token for token in end_ids if token < vocab_size]] = False

    @property
    def finished(self) -> bool:
        return self._inner is not None and self._inner.finished

    def allowed(self) -> Mask:
        mask = self._going_on if self._left > 0 else self._all
        return mask if self._inner is None else self._inner.allowed() & mask

    def advance(self, token: int) -> None:
        self._left -= 1
        if self._inner is not None:
            self._inner.advance(token)
