"""The application: which function answers which path, and what every request passes on its way there."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quengine.errors import EngineError
from quengine.serve import access_log
from quengine.serve.connections import WriteDeadline
from quengine.serve.guard import APP_ORIGIN, CORS, LOOPBACK_ORIGIN, Guard, admits_apps, cors_origins
from quengine.serve.http import Catch, WithoutTrailingSlash, error_response, json_response
from quengine.serve.models.model_route import Endpoint, ModelRoute
from quengine.serve.models.registry import Models
from quengine.serve.page.files import page, page_file
from quengine.serve.predict import PATH, VertexPaths, formats_of, predict
from quengine.serve.resumable import Resumable
from quengine.serve.routes import slot_routes, status_routes, stream_routes, token_routes
from quengine.serve.routes.anthropic.messages import count_tokens, messages
from quengine.serve.routes.chat import chat_completions, chat_tokens
from quengine.serve.routes.completions import completions
from quengine.serve.routes.infill import infill
from quengine.serve.routes.models import table
from quengine.serve.routes.native import completion
from quengine.serve.routes.ollama.table import OLLAMA_ROUTES, OLLAMA_SERVER_ROUTES
from quengine.serve.routes.responses.route import (
    delete_response,
    response_input_items,
    response_tokens,
    responses,
    stored_response,
)
from quengine.serve.routes.vectors.embeddings import embeddings, native_embeddings
from quengine.serve.routes.vectors.rerank import rerank
from quengine.serve.schemas.errors import ApiError
from quengine.serve.schemas.openapi import document
from quengine.serve.tools.cors_proxy import cors_proxy
from quengine.serve.tools.tool_routes import call_tool, list_tools

ServerEndpoint = Callable[[Models, Request], Awaitable[Response]]


async def openapi(models: Models, request: Request) -> Response:
    """What every route takes and answers."""
    del request
    engine = None if models.only is None else models.only.worker.engine
    return json_response(document(models.settings, None if engine is None else engine.model.vocab_size))


SERVER_ROUTES: tuple[tuple[str, str, ServerEndpoint], ...] = (
    ("GET", "/", page),
    ("GET", "/page/{name}", page_file),
    ("GET", "/openapi.json", openapi),
    ("GET", "/health", status_routes.health),
    ("GET", "/v1/health", status_routes.health),
    ("GET", "/metrics", status_routes.metrics),
    ("GET", "/props", status_routes.props),
    ("POST", "/props", status_routes.change_props),
    ("GET", "/slots", slot_routes.slots),
    ("GET", "/lora-adapters", status_routes.lora_adapters),
    ("POST", "/lora-adapters", status_routes.change_lora_adapters),
    ("GET", "/models", table.models),
    ("GET", "/v1/models", table.models),
    ("GET", "/v1/models/{name:path}", table.model),
    ("POST", PATH, predict),
    ("POST", "/models/load", table.load),
    ("POST", "/models/unload", table.unload),
    ("GET", "/v1/responses/{id}", stored_response),
    ("DELETE", "/v1/responses/{id}", delete_response),
    ("GET", "/v1/responses/{id}/input_items", response_input_items),
    ("GET", "/v1/stream", stream_routes.read_stream),
    ("DELETE", "/v1/stream", stream_routes.stop_stream),
    ("POST", "/v1/streams/lookup", stream_routes.find_streams),
    ("GET", "/tools", list_tools),
    ("POST", "/tools", call_tool),
    ("GET", "/cors-proxy", cors_proxy),
    ("POST", "/cors-proxy", cors_proxy),
    *OLLAMA_SERVER_ROUTES,
)
"""Of no model: called with all of them."""

ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/slots/{id_slot}", slot_routes.slot_action),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions/input_tokens", chat_tokens),
    ("POST", "/chat/completions/input_tokens", chat_tokens),
    ("POST", "/v1/responses", responses),
    ("POST", "/responses", responses),
    ("POST", "/v1/responses/input_tokens", response_tokens),
    ("POST", "/responses/input_tokens", response_tokens),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/embeddings", native_embeddings),
    ("POST", "/embedding", native_embeddings),
    ("POST", "/v1/rerank", rerank),
    ("POST", "/v2/rerank", rerank),
    ("POST", "/rerank", rerank),
    ("POST", "/v1/reranking", rerank),
    ("POST", "/reranking", rerank),
    ("POST", "/infill", infill),
    ("POST", "/completion", completion),
    ("POST", "/completions", completion),
    ("POST", "/tokenize", token_routes.tokenize),
    ("POST", "/detokenize", token_routes.detokenize),
    ("POST", "/apply-template", token_routes.apply_template),
    *OLLAMA_ROUTES,
)
"""Of a model: called with its host."""

FOR_APPS = frozenset(
    [("POST", path) for _, path, _ in ROUTES if not path.startswith("/slots")]
    + [
        ("GET", path)
        for path in ("/health", "/v1/health", "/models", "/v1/models", "/props", "/openapi.json")
    ]
    + [("GET", path) for path in ("/api/tags", "/api/ps", "/api/version")]
    + [("POST", "/api/show")]
)
"""What apps of this machine may use where no key guards anything: generating, and what they look at before."""

E = TypeVar("E")


def _by_path(routes: Iterable[tuple[str, str, E]]) -> dict[str, dict[str, E]]:
    """The functions of each path by method: a path is one route, so that a 405 names all its methods."""
    by_path: dict[str, dict[str, E]] = {}
    for method, path, endpoint in routes:
        by_path.setdefault(path, {})[method] = endpoint
    return by_path


async def _dispatch(models: Models, endpoints: Mapping[str, ServerEndpoint], request: Request) -> Response:
    return await endpoints["GET" if request.method == "HEAD" else request.method](models, request)


def _of_model(models: Models, endpoints: Mapping[str, Endpoint]) -> ASGIApp:
    route = ModelRoute(models, endpoints)
    chat = chat_completions in endpoints.values()
    return Resumable(route, models.streams, models.settings.limits) if chat else route


def make_app(models: Models) -> Starlette:
    """The ASGI application of a server."""
    settings = models.settings
    known = {path for _, path, _ in (*ROUTES, *SERVER_ROUTES)}
    vertex = VertexPaths.of_environment()
    if taken := next((name for name, path in vertex.names if name in known - {path}), None):
        raise EngineError(
            f"AIP_PREDICT_ROUTE or AIP_HEALTH_ROUTE {taken}: that is another route of this server"
        )

    def answered(path: str, status: int) -> None:
        models.metrics.answered(path if path in known else "other", status)
        record = access_log.current()
        models.metrics.ignored(len(record.ignored))
        models.metrics.shortened(record.shortened)

    of_server, of_models = _by_path(SERVER_ROUTES), _by_path(ROUTES)
    routes = [
        *(
            Route(path, partial(_dispatch, models, each), methods=list(each))
            for path, each in of_server.items()
        ),
        *(Route(path, _of_model(models, each), methods=list(each)) for path, each in of_models.items()),
    ]
    routes.sort(key=lambda route: "{" in route.path)  # OPTIONS of a path is answered by the first that fits
    middleware = [Middleware(WriteDeadline, settings.limits.write_s)]
    origins, apps = cors_origins(settings), admits_apps(settings)
    if origins or apps:
        loopback = LOOPBACK_ORIGIN.pattern if "localhost" in origins else None
        middleware.append(
            Middleware(
                CORS,
                allow_origins=origins,
                allow_origin_regex=APP_ORIGIN.pattern if apps else loopback,
                allow_methods=("GET", "POST", "DELETE", "OPTIONS"),
                allow_headers=("*",),
                allow_credentials=True,
                allow_private_network=True,
            )
        )
    middleware.append(Middleware(Guard, settings, FOR_APPS))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(WithoutTrailingSlash, vertex.names), Middleware(Catch, answered), *middleware],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
    )
    app.state.formats = formats_of(path for method, path, _ in ROUTES if method == "POST")
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    access_log.current().error = error.message
    error.__traceback__ = None  # with the body in its frames, which would wait for a collection of cycles
    return error_response(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(
            status_code=204, headers={"Allow": f"{(error.headers or {}).get('Allow', 'GET')}, OPTIONS"}
        )
    what = f"{request.method} {request.url.path[:80]}"
    message = f"there is no {what} here" if error.status_code in (404, 405) else f"{what}: {error.detail}"
    response = error_response(ApiError(error.status_code, message), request.url.path)
    response.headers.update(error.headers or {})  # Allow, of a 405
    return response
