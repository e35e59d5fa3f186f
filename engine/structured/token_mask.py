"""Masks of the tokens that the sampler may choose next: their protocol, and the masks that need no grammar.

`min_tokens` bans the tokens that would end a text. A limit of reasoning tokens allows all tokens until it is reached,
and then only those that close the section.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from quengine.structured.constraint_spec import ReasoningBudget

Mask: TypeAlias = npt.NDArray[np.bool_]
"""For each token of the vocabulary, whether it is allowed: [vocab_size]."""


class TokenMask(Protocol):
    """The mask of a text's next token, updated with each chosen token (`constraint.Constraint`)."""

    @property
    def finished(self) -> bool:
        """Whether no token can follow the text so far."""
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
        least: the least number of tokens of the text; a constraint that allows nothing more ends it earlier.
        end_ids: the tokens banned until then.
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


class BudgetConstraint:
    """The state of one answer within its reasoning budget; used in place of a `Constraint`.

    Args:
        budget: the bound, and the tags as text.
        closing: the tokens that close the section.
        token_bytes: a token's text.
        vocab_size: entries of the mask.
        inner: what else constrains the answer, the section included; None: nothing.
    """

    def __init__(
        self,
        budget: ReasoningBudget,
        closing: Sequence[int],
        token_bytes: Callable[[int], bytes],
        vocab_size: int,
        inner: TextMask | None,
    ) -> None:
        self._token_bytes = token_bytes
        self._inner = inner
        self._all = np.ones(vocab_size, np.bool_)
        self._due = list(closing)
        self._begin, self._end = budget.begin.encode(), budget.end.encode()
        self._state: Literal["before", "inside", "closing", "after"] = "before"
        self._text = b""  # since the answer began, or the end of the section so far
        self._left = budget.tokens
        if not budget.begin:
            self._enter()

    @property
    def accepting(self) -> bool:
        """Whether the text so far may be all of it."""
        return self._state != "closing" and (self._inner is None or self._inner.accepting)

    @property
    def finished(self) -> bool:
        """Whether no token can follow the text so far."""
        return self._inner is not None and self._inner.finished

    def allowed(self) -> Mask:
        """The mask [vocab_size] of the next token. Raises EngineError as `Constraint.allowed`."""
        if self._state == "closing":
            mask = np.zeros_like(self._all)
            mask[self._due[0]] = True
            return mask
        return self._all if self._inner is None else self._inner.allowed()

    def advance(self, token: int) -> None:
        """Go on by an allowed token. Raises EngineError as `Constraint.advance`."""
        if self._inner is not None:
            self._inner.advance(token)
        if self._state == "before":
            self._text += self._token_bytes(token)
            begun = self._text.lstrip()
            if begun.startswith(self._begin):
                self._enter()
            elif not self._begin.startswith(begun):
                self._state = "after"
        elif self._state == "inside":
            self._left -= 1
            self._text = (self._text + self._token_bytes(token))[-256:]
            if self._end in self._text:
                self._state = "after"
            elif self._left <= (-3 if _ends_within_character(self._text) else 0):
                self._state = "closing"
        elif self._state == "closing":
            self._due.pop(0)
            if not self._due:
                self._state = "after"

    def _enter(self) -> None:
        self._text = b""
        self._state = "inside" if self._left > 0 else "closing"


def _ends_within_character(text: bytes) -> bool:
    """Whether the last character of UTF-8 lacks bytes: those that follow its first one have the bits 10."""
    for count, byte in enumerate(reversed(text[-4:]), start=1):
        if byte & 0xC0 != 0x80:
            return count < (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1)
    return False
