"""POST /predict: Vertex AI's form of a request, whose instances are bodies of other routes.

`@requestFormat` names an instance's route, by its path or by the words of the path ("chatCompletions", "tokenize"). In
a container of Vertex AI the variables AIP_* say under which paths it asks, and on which port. Sources: "Custom
container requirements for prediction" of Google Cloud, and llama-server (tools/server/server-http.cpp).
"""

import asyncio
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from quengine.errors import EngineError
from quengine.serve.http import BODY_KEY, Catch, json_response, read_request, to_json, unless_gone
from quengine.serve.models.registry import Models
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.requests import PredictRequest

PATH = "/predict"
_FORMAT = "@requestFormat"


@dataclass(frozen=True)
class VertexPaths:
    """What Vertex AI calls paths of this server; empty outside of it. `port`: 0 where it names none."""

    names: tuple[tuple[str, str], ...] = ()
    port: int = 0

    @classmethod
    def of_environment(cls) -> "VertexPaths":
        """Raises EngineError for a port that is none."""
        if os.environ.get("AIP_MODE") != "PREDICTION":
            return cls()
        port = os.environ.get("AIP_HTTP_PORT", "8080")
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise EngineError(f"AIP_HTTP_PORT {port}: must be a port, from 1 to 65535")
        given = (("AIP_PREDICT_ROUTE", PATH), ("AIP_HEALTH_ROUTE", "/health"))
        names = ((os.environ.get(name, ""), path) for name, path in given)
        return cls(tuple((f"/{name.lstrip('/')}", path) for name, path in names if name), int(port))


async def predict(models: Models, request: Request) -> Response:
    """Answer requests of other routes, in Vertex AI's form.

    The answers of all instances, as many at once as there are slots. One that fails has its error in its place.
    """
    body = await read_request(request, PredictRequest, models.settings.limits)
    slots = asyncio.Semaphore(models.settings.parallel)

    async def in_turn(instance: dict[str, Any]) -> Any:
        async with slots:
            return await _answer(request, instance)

    answers = asyncio.gather(*map(in_turn, body.instances))
    return json_response({"predictions": await unless_gone(request.receive, answers)})


async def _answer(request: Request, instance: dict[str, Any]) -> Any:
    """What the route of an instance answers."""
    given = instance.get(_FORMAT)
    path = request.app.state.formats.get(given) if isinstance(given, str) else None
    if path is None:
        return bad_request(f"{_FORMAT} = {json.dumps(given)[:80]}: no route is called that", _FORMAT).body
    body = {key: value for key, value in instance.items() if key != _FORMAT}
    if "stream" in body:
        body["stream"] = False
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))

    async def receive() -> Message:  # the body is there, and `predict` notices a client that leaves
        return await asyncio.Future()

    scope = {**request.scope, "path": path, "raw_path": path.encode(), BODY_KEY: to_json(body)}
    await Catch(request.app.router, lambda *_: None)(scope, receive, send)
    return json.loads(b"".join(parts))


def formats_of(paths: Iterable[str]) -> dict[str, str]:
    """What instances may name of the routes of models with these paths."""
    formats: dict[str, str] = {}
    for path in paths:
        if not path.startswith("/api/") and "{" not in path:
            first, *others = re.split("[/_-]", path.removeprefix("/v1").removeprefix("/"))
            formats.setdefault(first + "".join(word.capitalize() for word in others), path)
            formats[path] = path
    return formats
