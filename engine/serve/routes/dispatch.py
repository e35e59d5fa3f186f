"""A route's function, called with the body that it takes, and its answer, written as a response."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.http import json_response, read_request, unless_gone
from quengine.serve.models.model_host import ModelHost
from quengine.serve.models.registry import Models
from quengine.serve.routes.route import OfModel, OfServer
from quengine.serve.routes.shortening import tell
from quengine.serve.routes.streaming import AnswerForm, streamed, whole_answers
from quengine.serve.settings import Limits


async def of_server(route: OfServer, models: Models, request: Request) -> Response:
    """Raises ApiError, and ClientGoneError when the client has gone."""
    return _written(await route.endpoint(models, **await _given(route, request, models.settings.limits)))


async def of_model(route: OfModel, host: ModelHost, request: Request) -> Response:
    """Raises ApiError, and ClientGoneError when the client has gone, whose work is cancelled."""
    given = await _given(route, request, host.limits)
    return await unless_gone(request.receive, _computed(route, host, request, given))


async def _given(route: OfModel | OfServer, request: Request, limits: Limits) -> dict[str, Any]:
    """What the function takes besides the models."""
    given: dict[str, Any] = {"request": request} if "request" in route.hints else {}
    if (kind := route.hints.get("body")) is not None:
        given["body"] = await read_request(request, kind, limits)
    return given


async def _computed(route: OfModel, host: ModelHost, request: Request, given: dict[str, Any]) -> Response:
    answer = await route.endpoint(host, **given)
    if not isinstance(answer, AnswerForm):
        return _written(answer)
    form = answer
    response = await streamed(form) if form.streams else json_response(form.whole(await whole_answers(form)))
    tell(request.url.path, form.notes, response)
    return response


def _written(answer: Any) -> Response:
    return answer if isinstance(answer, Response) else json_response(answer)
