"""The server's OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.1): what each route takes and answers.

The limits in it are those of the running server. The schema of a stream (text/event-stream, application/x-ndjson) is
that of one event or line, as is the use before OpenAPI 3.2 has a word of its own for it.
"""

import re
from collections.abc import Sequence
from typing import Any

from quengine import __version__
from quengine.serve.http import EVENTS, LINES
from quengine.serve.routes.route import NOTHING, OfModel, OfServer, alternatives
from quengine.serve.schemas.fields import Schema
from quengine.serve.schemas.openapi_requests import STRING, ref, request_schemas
from quengine.serve.schemas.written import Written, written_schemas
from quengine.serve.settings import ServerSettings

JSON = "application/json"

_MEANINGS = {
    400: "A field is wrong, over a limit or not supported; or the prompt does not fit.",
    401: "No valid key.",
    403: "A Host header or an Origin that is not allowed here, or a route without the flag that it needs.",
    404: "Not here: another model than the one served, or a response that is not stored.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is packed (Content-Encoding).",
    429: "The queue is full.",
    500: "This request failed; others go on.",
    501: "The model has no tokens for this, or the server was not started with the flag for it.",
    502: "The other host cannot be reached.",
    507: "No room on the disk.",
    503: "The model is being loaded, the engine is replaced or does not answer, or the server is ending.",
    529: "The queue is full, or any cause of a 503 of other routes.",
}
_RETRY = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}}
_PART: Schema = {"type": "string", "minLength": 1}
_SLOT: Schema = {"type": "integer", "minimum": 0, "maximum": 10**9 - 1}


def document(
    routes: Sequence[OfModel | OfServer], settings: ServerSettings, vocab_size: int | None = None
) -> dict[str, Any]:
    """The document of a server with these settings. vocab_size: its model's; None while there is no model."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        keyed = bool(settings.api_keys) and not route.keyless
        for path in (path.replace(":path", "") for path in route.paths):
            paths.setdefault(path, {})[route.method.lower()] = _operation(path, route, keyed)
    info = {
        "title": "quengine",
        "version": __version__,
        "description": "OpenAI's API, Anthropic's messages, llama-server's API and Ollama's over one model or several. "
        "Errors have OpenAI's shape, under /v1/messages Anthropic's, under /api Ollama's.",
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    }
    names = settings.model_names if settings.strict_model else ()
    bodies = dict.fromkeys(route.body for route in routes if isinstance(route.body, type))
    read = request_schemas(bodies, settings.limits, names, vocab_size)
    kinds = [
        kind
        for route in routes
        for kind in (*route.answers, *alternatives(route.event), *alternatives(route.line), route.error)
    ]
    _, written = written_schemas(kinds)
    schemas = {**read, **written}
    assert len(schemas) == len(read) + len(written), "a name has two schemas"
    components: dict[str, Any] = {"schemas": schemas}
    if settings.api_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(path: str, route: OfModel | OfServer, keyed: bool) -> dict[str, Any]:
    errors = sorted({403, *route.errors, *((401,) if keyed else ())})
    made: dict[str, Any] = {
        "operationId": _operation_id(route.method, path),
        "summary": route.summary,
        "responses": {
            "204" if route.answer == NOTHING else "200": _success(route),
            **{str(status): _failure(status, route.error) for status in errors},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _SLOT if name == "id_slot" else _PART}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    for name, schema in route.query:
        parameters.append({"name": name, "in": "query", "required": True, "schema": schema})
    if parameters:
        made["parameters"] = parameters
    if route.body is not None:
        name = route.body if isinstance(route.body, str) else route.body.__name__
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": ref(name)}}}
    if keyed:
        made["security"] = [{"bearer": []}, {"header": []}]
    return made


def _operation_id(method: str, path: str) -> str:
    words = path.replace("{", "").replace("}", "").replace(".", "/").replace("-", "/").split("/")
    return "_".join([method.lower(), *filter(None, words)])


def _schema(*kinds: Any) -> Schema:
    schemas, _ = written_schemas(kinds)
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _success(route: OfModel | OfServer) -> dict[str, Any]:
    if route.answer == NOTHING:
        return {"description": route.summary}
    if isinstance(route.answer, str) and "/" in route.answer:
        content: dict[str, Any] = {route.answer: {"schema": STRING}}
    else:
        content = {JSON: {"schema": _schema(*route.answers)}}
    if route.event is not None:
        content[EVENTS] = {"schema": _event(route)}
    if route.line is not None:
        content[LINES] = {"schema": _schema(*alternatives(route.line), route.error)}
    return {"description": route.summary, "content": content}


def _event(route: OfModel | OfServer) -> Schema:
    """An event whose data is JSON, or the end of the stream."""
    assert route.event is not None
    inner = _schema(*alternatives(route.event), route.error)
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": inner}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"event": STRING, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }


def _failure(status: int, error: type[Written]) -> dict[str, Any]:
    failure: dict[str, Any] = {
        "description": _MEANINGS[status],
        "content": {JSON: {"schema": _schema(error)}},
    }
    return {**failure, "headers": _RETRY} if status in (429, 503, 529) else failure
