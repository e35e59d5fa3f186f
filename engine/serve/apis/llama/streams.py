"""GET and DELETE /v1/stream, POST /v1/streams/lookup: streams that are read again, as llama-server has them.

The id is in the query, as it may hold a model's name with slashes. There is no list of all: who asks knows the id.
"""

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.apis.llama.requests import StreamsRequest
from quengine.serve.apis.llama.schemas import FoundStream
from quengine.serve.http import EVENTS, EventStream
from quengine.serve.models.registry import Models
from quengine.serve.resumable import KeptStream
from quengine.serve.schemas.errors import ApiError, bad_request


async def read_stream(models: Models, request: Request) -> Response:
    """A conversation's stream again, from a byte on.

    Raises ApiError where it is not kept, or not yet there.
    """
    stream = models.streams.get(_conversation(request))
    if stream is None:
        raise ApiError(404, "no stream of this conversation is kept", param="conv_id")
    if stream.head is None:
        raise ApiError(503, "this stream has not begun", code="not_begun", retry_after=1)
    given = request.query_params.get("from", "0") or "0"
    if not (given.isascii() and given.isdecimal() and len(given) < 16):
        raise bad_request(f"from = {given[:40]!r}: must be a number of bytes", "from", "invalid_value")
    if not stream.dropped <= int(given) <= stream.total:
        raise bad_request(
            f"from = {given}: the bytes from {stream.dropped} to {stream.total} are kept",
            "from",
            "invalid_value",
        )
    return EventStream(b"", _parts(stream, int(given)), EVENTS)


async def _parts(stream: KeptStream, at: int) -> AsyncGenerator[bytes, None]:
    async for part in stream.parts(at):
        yield part


async def stop_stream(models: Models, request: Request) -> Response:
    """End a conversation's stream."""
    models.streams.remove(_conversation(request))
    return Response(status_code=204)


async def find_streams(models: Models, body: StreamsRequest) -> list[FoundStream]:
    """Which conversations have streams.

    And how far each is.
    """
    return [
        FoundStream(
            conversation_id=stream.conversation,
            is_done=stream.done,
            total_bytes=stream.total,
            started_at=int(stream.began),
            completed_at=int(stream.ended_at),
        )
        for stream in models.streams.found(body.conversation_ids)
    ]


def _conversation(request: Request) -> str:
    name = request.query_params.get("conv_id", "")
    if not name:
        raise bad_request(
            "conv_id is missing: /v1/stream?conv_id=...", "conv_id", "missing_required_parameter"
        )
    return name
