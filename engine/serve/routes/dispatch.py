"""Dispatches a request: reads its body, waits until the model that it names is loaded, calls the route's function and
writes the answer.

While a model is being loaded, a stream begins with comments that give the progress, since clients and proxies drop a
silent connection.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quengine.serve import access_log
from quengine.serve.guard import check_may_change, is_limited
from quengine.serve.http import EVENTS, json_response, read_raw, read_request, to_json, unless_gone
from quengine.serve.models.model_host import ModelHost
from quengine.serve.models.registry import Models
from quengine.serve.routes.route import OfModel, OfServer
from quengine.serve.routes.shortening import tell
from quengine.serve.routes.streaming import AnswerForm, streamed, whole_answers
from quengine.serve.schemas.errors import ApiError, bad_request, in_dialect
from quengine.serve.schemas.fields import Body
from quengine.serve.schemas.reading import read_body
from quengine.serve.settings import Limits

T = TypeVar("T")

COMMENT_SECONDS = 5.0
"""Seconds until a stream that waits for its model begins, and between two of its comments."""
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class ModelRoute:
    """The ASGI application of a path. It calls the function of the method with the host of the model that the query or
    the body names, once the model is loaded."""

    def __init__(self, models: Models, routes: Mapping[str, OfModel]) -> None:
        self._models = models
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, request, limits = (
            self._routes[scope["method"]],
            Request(scope, receive),
            self._models.settings.limits,
        )
        given = await _given(route, request, limits)
        host, body, keep_s = self._models.only, given.get("body"), None
        if host is None or not host.admits:
            if body is None:
                raw = await read_raw(request, limits)
                body = read_body(Body, raw, []) if raw else Body()
            host = self._models.named(request.query_params.get("model", "") or body.model)
            keep_alive = getattr(body, "keep_alive", None)
            keep_s = None if keep_alive is None else seconds_of(keep_alive)
        limited = self._models.only is None and is_limited(scope)
        if limited:
            _check_changes_nothing(scope, host, keep_s)
        if keep_s == 0 and not host.loaded and _asks_nothing(body):
            await (await of_model(route, host, request, given))(scope, receive, send)
            return
        waits = not host.admits
        streams = waits and route.event is not None and getattr(body, "stream", False)
        stream = _WaitingStream(send, scope["path"]) if streams else None
        async with AsyncExitStack() as held:
            try:
                entering = held.enter_async_context(self._models.using(host, keep_s, sets_keep=not limited))
                if waits:
                    waiting = entering if stream is None else stream.until(entering, host, self._models)
                    await unless_gone(receive, waiting)
                else:
                    await entering
                await (await of_model(route, host, request, given))(scope, receive, stream or send)
            except ApiError as error:
                if stream is None or not stream.begun:
                    raise
                access_log.current().error = error.message
                await stream.fail(error)


def _asks_nothing(body: Any) -> bool:
    """Whether a body asks for no answer, but only for the model to be loaded or unloaded."""
    return not any(getattr(body, name, None) for name in ("prompt", "messages", "input"))


async def of_server(route: OfServer, models: Models, request: Request) -> Response:
    """The answer to a request that needs no model. Raises ApiError, and ClientGoneError when the client has gone."""
    answer = await route.endpoint(models, **await _given(route, request, models.settings.limits))
    return answer if isinstance(answer, Response) else json_response(answer)


async def of_model(route: OfModel, host: ModelHost, request: Request, given: dict[str, Any]) -> Response:
    """The answer of a model. Raises ApiError; if the client goes, cancels the work and raises ClientGoneError."""
    return await unless_gone(request.receive, _computed(route, host, request, given))


async def _given(route: OfModel | OfServer, request: Request, limits: Limits) -> dict[str, Any]:
    """The arguments of the route's function besides the models. Raises ApiError."""
    given: dict[str, Any] = {"request": request} if "request" in route.hints else {}
    if (kind := route.hints.get("body")) is not None:
        given["body"] = await read_request(request, kind, limits)
    elif given and isinstance(route, OfModel):
        await read_raw(request, limits)  # `unless_gone` would take what its function has not read
    return given


async def _computed(route: OfModel, host: ModelHost, request: Request, given: dict[str, Any]) -> Response:
    answer = await route.endpoint(host, **given)
    if not isinstance(answer, AnswerForm):
        return answer if isinstance(answer, Response) else json_response(answer)
    if answer.streams:
        response = await streamed(answer)
    else:
        response = json_response(answer.whole(await whole_answers(answer)))
    if answer.notes:
        tell(request.url.path, answer.notes, response)
    return response


def _check_changes_nothing(scope: Scope, host: ModelHost, keep_s: float | None) -> None:
    """Raises ApiError if a request that may only generate would load or unload the model."""
    if keep_s == 0:
        check_may_change(scope, f"unload {host.name}")
    if not host.admits and not host.wanted:
        check_may_change(scope, f"load {host.name}")
    if keep_s is not None:
        access_log.current().ignored.append("keep_alive")


def seconds_of(keep_alive: Any) -> float:
    """The seconds of Ollama's duration: a number, or "5m", "1h30m"; below 0: for ever. Raises ApiError."""
    text = str(keep_alive).removeprefix("-")
    sign = -1.0 if str(keep_alive).startswith("-") else 1.0
    parts = _PART.findall(text)
    if isinstance(keep_alive, str) and parts and "".join(map("".join, parts)) == text:
        return sign * sum(float(count) * _UNITS[unit] for count, unit in parts)
    try:
        seconds = math.nan if isinstance(keep_alive, bool) else float(keep_alive)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):
        rule = 'must be seconds, a duration such as "5m", or -1'
        raise bad_request(f"keep_alive = {text[:40]}: {rule}", "keep_alive", "invalid_value")
    return seconds


class _WaitingStream:
    """The `send` of a stream that may have begun with comments before its answer does."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if not (self.begun and message["type"] == "http.response.start"):
            await self._send(message)

    async def until(self, work: Awaitable[T], host: ModelHost, models: Models) -> T:
        """The result of `work`, with a comment now and then until it is there."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((task,), timeout=COMMENT_SECONDS))[0]:
                await self._comment(models.waiting_text(host))
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _comment(self, text: str) -> None:
        if not self.begun:
            self.begun = True
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            head = Response(headers=headers, media_type=EVENTS)
            del head.headers["content-length"]
            await self._send({"type": "http.response.start", "status": 200, "headers": head.raw_headers})
        line = b": " + text.encode(errors="replace").replace(b"\n", b" ")
        await self._send({"type": "http.response.body", "body": line + b"\n\n", "more_body": True})

    async def fail(self, error: ApiError) -> None:
        """The error as the last event."""
        _, answer = in_dialect(error, self._path)
        name = b"event: error\n" if self._path.startswith("/v1/messages") else b""
        body = name + b"data: " + to_json(answer) + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
