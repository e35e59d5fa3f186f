"""The events of one HTTP request on their way from the engine to its answer. All of it is called in the event loop.

While the coroutine of a streamed answer waits for the next event, `writer` writes a piece at once, without a turn of
the coroutine for each token. A piece that it does not take (the client reads slowly) and all other events wait for the
coroutine.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from quengine.serve.processes.shared_engine import Event, GenerationRequest, Piece, Work

Writer = Callable[[int, Piece], bool]
"""Writes a piece of the completion at this position; False where the client cannot take it now."""


class Handle:
    """The events of one HTTP request's completions, in order, each with the position of its completion.

    The first `queued` of the requests are in the worker's queue; the others wait in `unqueued`, and the worker queues
    one of them whenever one of this handle's has ended. That deque is guarded by the worker's lock.
    """

    def __init__(self, requests: Sequence[Work], queued: int | None = None) -> None:
        self.requests = tuple(requests)
        self.unqueued = deque(self.requests[len(self.requests) if queued is None else queued :])
        self.cancelled = False
        self.writer: Writer | None = None
        first = requests[0]
        self._scored = isinstance(first, GenerationRequest) and first.params.logprobs is not None
        self._choice = {request.id: choice for choice, request in enumerate(requests)}
        self._events: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()
        self._waits = False
        self._error: Exception | None = None

    async def events(self) -> list[tuple[int, Event]]:
        """Waits for the next events, at least one, as (position among the requests, event). Pieces of one completion
        are joined, unless its tokens are scored. Raises the error that `writer` raised."""
        self._waits = True
        await self._arrived.wait()
        self._waits = False
        self._arrived.clear()
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        return events if self._scored else joined(events)

    def put(self, events: Sequence[Event]) -> None:
        """Takes the events of one step."""
        if self.cancelled:
            return
        placed = [(self._choice[event.request_id], event) for event in events]
        for choice, event in placed if self._scored else joined(placed):
            if not (isinstance(event, Piece) and self._written(choice, event)):
                self._events.append((choice, event))
                self._arrived.set()

    def _written(self, choice: int, piece: Piece) -> bool:
        if self.writer is None or not self._waits or self._arrived.is_set():
            return False
        try:
            return self.writer(choice, piece)
        except Exception as error:  # of this answer alone
            self._error = error
            self._arrived.set()
            return True


def joined(events: Iterable[tuple[int, Event]]) -> list[tuple[int, Event]]:
    """The events, with the pieces of each completion joined, before the others."""
    events = list(events)
    if len(events) == 1:
        return events
    pieces: dict[int, list[Piece]] = {}
    ends: list[tuple[int, Event]] = []
    for choice, event in events:
        if isinstance(event, Piece):
            pieces.setdefault(choice, []).append(event)
        else:
            ends.append((choice, event))
    whole: list[tuple[int, Event]] = [
        (choice, group[0] if len(group) == 1 else _join(group)) for choice, group in pieces.items()
    ]
    return whole + ends


def _join(group: list[Piece]) -> Piece:
    return Piece(
        group[0].request_id,
        tuple(token for piece in group for token in piece.tokens),
        "".join(piece.text for piece in group),
        tuple(entry for piece in group for entry in piece.logprobs),
        tuple(entry for piece in group for entry in piece.prompt_logprobs),
        tuple(entry for piece in group for entry in piece.progress),
    )
