"""Turns the events of a request into the events of its answer, whose form each API defines."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response

from quengine.serve import access_log
from quengine.serve.connections import Connection
from quengine.serve.http import EVENTS, EventStream, to_json
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.server_handle import Handle
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece
from quengine.serve.routes.answer_events import Answer, End, Part
from quengine.serve.schemas.errors import ApiError

T = TypeVar("T")


class AnswerForm(ABC):
    """How an API writes the answer to a request, whole or as a stream. Methods return the bytes of whole events.

    Attributes:
        answers: the request's completions, which are not computed yet.
        streams: the answer is a stream.
        notes: lines about what the answer leaves out of the request.
    """

    media_type = EVENTS

    def __init__(
        self, host: ModelHost, answers: Sequence[Answer], streams: bool, notes: Sequence[str] = ()
    ) -> None:
        self.host = host
        self.answers = answers
        self.requests = [answer.request for answer in answers]
        self.streams = streams
        self.notes = notes

    @abstractmethod
    def whole(self, outputs: Sequence[tuple[Part, End]]) -> Any:
        """The answer without a stream. outputs: each completion as one part, and its end."""

    def begin(self) -> bytes:
        return b""

    @abstractmethod
    def part(self, part: Part) -> bytes: ...

    @abstractmethod
    def finished(self, end: End) -> bytes: ...

    def end(self, ends: Sequence[Finished]) -> bytes:
        """The events after all completions, which ended with `ends`, in their order."""
        del ends
        return b""

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return data(error.body)


def data(value: Any) -> bytes:
    """One event of JSON."""
    return b"data: " + to_json(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One event of JSON with a name."""
    return b"event: " + name.encode() + b"\n" + data(value)


DONE = b"data: [DONE]\n\n"
COMMENT = b":\n\n"
COMMENT_SECONDS = 15.0
"""Until a stream begins whose first token is not there yet, and between two comments: clients and proxies give up a
connection on which nothing comes."""


async def whole_answers(form: AnswerForm) -> list[tuple[Part, End]]:
    """Each completion as one part, and its end. Raises ApiError."""
    outputs = await answered(form.host, form.requests, form.host.outputs)
    return [
        (answer.part(piece), answer.end(end))
        for answer, (piece, end) in zip(form.answers, outputs, strict=True)
    ]


async def answered(
    host: ModelHost, requests: Sequence[GenerationRequest], gathered: Callable[[Handle], Awaitable[T]]
) -> T:
    """The result of `gathered` for the events of the requests, which are cancelled if it fails. Raises ApiError."""
    handle = host.submit(requests)
    try:
        return await gathered(handle)
    except BaseException:
        host.worker.cancel(handle)
        raise


async def streamed(form: AnswerForm) -> Response:
    """Streams the completions. The answer begins with the first token, so that an earlier failure has its own status;
    if the first token takes long, the answer begins with comments. Raises ApiError.
    """
    host, answers = form.host, form.answers
    handle = host.submit(form.requests)
    chunks = _chunks(host.events(handle), answers, form)
    first = asyncio.ensure_future(anext(chunks))
    seconds = COMMENT_SECONDS if form.media_type == EVENTS else None
    try:
        there, _ = await asyncio.wait((first,), timeout=seconds)
        begin = first.result() if there else COMMENT
    except BaseException:
        host.worker.cancel(handle)
        await _left(first, chunks)
        raise
    record = access_log.current()

    def began(connection: Connection) -> None:
        def write(choice: int, piece: Piece) -> bool:
            if not connection.writable:
                return False
            record.event(piece)
            if written := form.part(answers[choice].part(piece)):
                connection.write_part(written)
            return True

        handle.writer = write

    if there:
        return EventStream(begin, chunks, form.media_type, began)
    late = _Late(first, chunks, form, began)
    return EventStream(begin, late.parts(), form.media_type, late.connected)


@dataclass
class _Late:
    """A stream that has begun with a comment. Once its first part is written, parts are written directly (`began`)."""

    first: asyncio.Future[bytes]
    chunks: AsyncGenerator[bytes, None]
    form: AnswerForm
    began: Callable[[Connection], None]
    connection: Connection | None = None

    def connected(self, connection: Connection) -> None:
        self.connection = connection

    async def parts(self) -> AsyncGenerator[bytes, None]:
        try:
            while not (await asyncio.wait((self.first,), timeout=COMMENT_SECONDS))[0]:
                yield COMMENT
            try:
                yield self.first.result()
            except ApiError as error:
                access_log.current().error = error.message
                yield self.form.failed(error)
                return
            if self.connection is not None:
                self.began(self.connection)
            async for chunk in self.chunks:
                yield chunk
        finally:
            await _left(self.first, self.chunks)


async def _left(first: asyncio.Future[bytes], chunks: AsyncGenerator[bytes, None]) -> None:
    """Frees what a stream holds, even while it waits for its first part."""
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await chunks.aclose()


async def _chunks(
    events: AsyncGenerator[tuple[int, Piece | Finished], None],
    answers: Sequence[Answer],
    form: AnswerForm,
) -> AsyncGenerator[bytes, None]:
    ends: dict[int, Finished] = {}
    pending = form.begin()
    begun = False
    async with aclosing(events):
        try:
            async for choice, event in events:
                if isinstance(event, Piece):
                    pending += form.part(answers[choice].part(event))
                else:
                    ends[choice] = event
                    pending += form.finished(answers[choice].end(event))
                if pending:
                    begun = True
                    yield pending
                    pending = b""
        except ApiError as error:
            if not begun:
                raise
            yield form.failed(error)
            return
    last = pending + form.end([ends[choice] for choice in range(len(answers))])
    if last:
        yield last
