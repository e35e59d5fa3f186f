"""Prompts that do not fit the context, made shorter: the oldest turns go first, then the text of the longest message.

No shortening is silent: each gives a note in the log and the header X-Quengine-Notes, and counts in /metrics.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from starlette.responses import Response

from quengine.serve import access_log
from quengine.serve.schemas.errors import CONTEXT_EXCEEDED, ApiError

logger = logging.getLogger("quengine.serve")

Message = Mapping[str, Any]
G = TypeVar("G")
T = TypeVar("T")

NOTES = "X-Quengine-Notes"
"""The header of what a request has and the answer does without."""
_MOST_TRIES = 8
_MOST_NOTES = 20
_SPARE = 0.95  # of a text's estimated length: tokens are not spread evenly over it
_LEAST_KEPT = 16  # characters


async def fitted(
    given: G, compute: Callable[[G], Awaitable[T]], shorter: Callable[[G, float], G | None], reserved: int = 0
) -> tuple[T, G]:
    """The result of `compute(given)`, and `given`, both after `shorter` has cut it if its prompt did not fit.

    shorter: cuts `given` to a share of its text; returns None if nothing more can go. reserved: tokens of the context
        that a shortened prompt must leave free. Raises ApiError.
    """
    for _ in range(_MOST_TRIES - 1):
        try:
            return await compute(given), given
        except ApiError as error:
            share = _kept_share(error, reserved)
            if share is None or (less := shorter(given, share)) is None:
                raise
            given = less
    return await compute(given), given


def _kept_share(error: ApiError, reserved: int) -> float | None:
    """The share of a prompt that fits, less `reserved` tokens; None if the error is not about its length."""
    if error.code != CONTEXT_EXCEEDED:
        return None
    share: float = (error.details["n_ctx"] - reserved) / error.details["n_prompt_tokens"]
    return share


def without_oldest(messages: Sequence[Message], keep: float) -> list[Message] | None:
    """The messages without their oldest turns, at least one, so that at most the share `keep` of their text is left.

    A turn begins with a user's message; messages before the first turn stay, and so does the last turn, however long.
    None if there is only one turn.
    """
    turns = [n for n, message in enumerate(messages) if message["role"] == "user"]
    if len(turns) < 2:
        return None
    first = turns[0]
    before = list(accumulate((_length(message) for message in messages[first:]), initial=0))
    behind = next((n for n in turns[1:] if before[-1] - before[n - first] <= keep * before[-1]), turns[-1])
    return [*messages[:first], *messages[behind:]]


def with_longest_cut(messages: Sequence[Message], keep: float) -> list[Message] | None:
    """The messages with the longest text cut at its beginning, so that the share `keep` of all text is left.

    A system message is cut only if no other is long enough. None if nothing is left to cut.
    """
    total = sum(map(_length, messages))
    surplus = total - int(keep * _SPARE * total)
    for others in (True, False):
        places = [n for n, message in enumerate(messages) if (message["role"] != "system") is others]
        place = max(places, key=lambda n: _length(messages[n]), default=None)
        if place is None or _length(messages[place]) <= _LEAST_KEPT:
            continue
        left = max(_LEAST_KEPT, _length(messages[place]) - surplus)
        cut = {**messages[place], "content": messages[place]["content"][-left:]}
        return [*messages[:place], cut, *messages[place + 1 :]]
    return None


def _length(message: Message) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else 0


def tell(path: str, notes: Sequence[str], answer: Response) -> None:
    """Writes the notes of a request to its answer's header and to the log."""
    if notes:
        answer.headers[NOTES] = _header(notes)
        logger.info("%s: %s", path, answer.headers[NOTES])


def shortened(notes: list[str], note: str) -> None:
    """Note that a prompt was made shorter, and count it."""
    notes.append(note)
    access_log.current().shortened += 1


def _header(notes: Sequence[str]) -> str:
    """The notes as a header: ASCII, in one line."""
    more = [f"{len(notes) - _MOST_NOTES} more"] if len(notes) > _MOST_NOTES else []
    text = "; ".join([*notes[:_MOST_NOTES], *more])
    return "".join(char if " " <= char <= "~" else "?" for char in text)
