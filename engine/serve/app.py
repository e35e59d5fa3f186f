"""The application: the routes, and what every request passes on its way to one."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quengine.serve import access_log
from quengine.serve.guard import APP_ORIGIN, CORS, LOOPBACK_ORIGIN, Guard, admits_apps, cors_origins
from quengine.serve.http import Catch, error_response
from quengine.serve.models.registry import Models
from quengine.serve.resumable import Resumable
from quengine.serve.routes.dispatch import ModelRoute, of_server
from quengine.serve.routes.route import OfModel, OfServer
from quengine.serve.schemas.errors import ApiError
from quengine.serve.table import ROUTES

R = TypeVar("R", OfModel, OfServer)


def _by_path(routes: Sequence[OfModel | OfServer], kind: type[R]) -> dict[str, dict[str, R]]:
    """The routes of each path by method. Each path becomes one Starlette route, so that a 405 names all its methods."""
    by_path: dict[str, dict[str, R]] = {}
    for route in routes:
        if isinstance(route, kind):
            for path in route.paths:
                by_path.setdefault(path, {})[route.method] = route
    return by_path


async def _dispatch(models: Models, routes: Mapping[str, OfServer], request: Request) -> Response:
    return await of_server(routes["GET" if request.method == "HEAD" else request.method], models, request)


def _of_model(models: Models, routes: Mapping[str, OfModel]) -> ASGIApp:
    app = ModelRoute(models, routes)
    kept = any(route.resumable for route in routes.values())
    return Resumable(app, models.streams, models.settings.limits) if kept else app


def for_apps(routes: Sequence[OfModel | OfServer]) -> frozenset[tuple[str, str]]:
    """Method and path of what apps of this machine may use."""
    return frozenset((route.method, path) for route in routes if route.apps for path in route.paths)


def make_app(models: Models, more: Sequence[OfServer] = ()) -> Starlette:
    """The ASGI application of a server. more: routes of services beside the models (`server.SideRoom`)."""
    settings, table = models.settings, (*ROUTES, *more)
    known = frozenset(path for route in table for path in route.paths)
    keyless = frozenset(path for route in table if route.keyless for path in route.paths)

    def answered(path: str, status: int) -> None:
        record = access_log.current()
        named = path if path in known else "other"
        models.metrics.answered(named, status, len(record.ignored), record.shortened)

    routes = [
        *(
            Route(path, partial(_dispatch, models, each), methods=list(each))
            for path, each in _by_path(table, OfServer).items()
        ),
        *(
            Route(path, _of_model(models, each), methods=list(each))
            for path, each in _by_path(table, OfModel).items()
        ),
    ]
    routes.sort(key=lambda route: "{" in route.path)  # OPTIONS of a path is answered by the first that fits
    middleware = [Middleware(Catch, answered, settings.limits.write_s)]
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
    middleware.append(Middleware(Guard, settings, keyless, for_apps(table)))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
    )
    if settings.otlp_endpoint is not None:
        from quengine.serve.traces import Traced, provider_for

        app.add_middleware(Traced, provider_for(settings.otlp_endpoint))
    app.state.routes = table
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
