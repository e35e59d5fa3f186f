"""POST /api/pull, /api/create and /api/copy, DELETE /api/delete: changes of the models in --models-dir.

Each is refused without --allow-model-changes, but for a pull of what is here.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from quengine.models.hub.hub import hub_name
from quengine.models.hub.hub_name import own_name
from quengine.serve import access_log
from quengine.serve.apis.ollama.answers import line
from quengine.serve.apis.ollama.schemas import (
    OllamaCopyRequest,
    OllamaCreateRequest,
    OllamaDeleteRequest,
    OllamaPullLine,
    OllamaPullRequest,
    OllamaSuccess,
)
from quengine.serve.http import LINES, EventStream, json_response, off_loop, unless_gone
from quengine.serve.models.model_links import check_name, folder_name
from quengine.serve.models.preset_file import made_options
from quengine.serve.models.pulls import FileProgress, Step
from quengine.serve.models.registry import Models
from quengine.serve.schemas.errors import ApiError, OllamaError, bad_request

_SUCCESS = OllamaSuccess()


async def pull(models: Models, request: Request, body: OllamaPullRequest) -> Response:
    """Fetch a model.

    Nothing is fetched for a model that is here.
    """
    if models.find(body.given) is not None:
        return Response(line(_SUCCESS), media_type=LINES) if body.stream else json_response(_SUCCESS)
    plain = own_name(body.given.removesuffix(":latest"))
    _check_allowed(models, f"no model is fetched over HTTP: run engine pull {_shown(plain)}")
    name = folder_name(body.given)
    check_name(name, "model")
    await off_loop(lambda: hub_name(plain))
    steps = models.pulls.follow(name, plain)
    if body.stream:
        return EventStream(line(OllamaPullLine(status="pulling manifest")), _lines(steps), LINES)
    await unless_gone(request.receive, _last(steps))
    return json_response(_SUCCESS)


async def _lines(steps: AsyncGenerator[Step, None]) -> AsyncGenerator[bytes, None]:
    """The lines of a stream, of which the last is that of success or an error."""
    async with aclosing(steps):
        try:
            async for step in steps:
                yield b"".join(map(line, _statuses(step)))
            yield line(_SUCCESS)
        except ApiError as error:
            access_log.current().error = error.message
            yield line(OllamaError(error.message))


async def _last(steps: AsyncGenerator[Step, None]) -> None:
    async with aclosing(steps):
        async for _ in steps:
            pass


def _statuses(step: Step) -> list[OllamaPullLine]:
    if not isinstance(step, FileProgress):
        return [OllamaPullLine(status=step)]
    kind = "sha256" if len(step.digest) == 64 else "sha1"
    progress = OllamaPullLine(
        status=f"pulling {step.digest[:12]}",
        digest=f"{kind}:{step.digest}",
        total=step.total,
        completed=step.completed,
    )
    done = step.completed == step.total
    return [progress, *([OllamaPullLine(status=f"verifying {kind} digest")] if done else [])]


async def delete(models: Models, body: OllamaDeleteRequest) -> OllamaSuccess:
    """Delete a model's file.

    The model takes no more requests, and is unloaded after its running answers.
    """
    _check_allowed(models, f"no model is deleted over HTTP: run engine rm {_shown(body.given)}")
    await models.remove(_given(body.given, "model"))
    return _SUCCESS


async def create(models: Models, body: OllamaCreateRequest) -> Response:
    """A model of this server under a new name, with options.

    A served model under a new name, with a system message, a template, parameters and first messages of its own.
    """
    _check_allowed(models, f"no model is made over HTTP: run engine create {_shown(body.given)}")
    name, base = folder_name(_given(body.given, "model")), _given(body.base, "from")
    check_name(name, "model")
    ignored = access_log.current().ignored
    options = await off_loop(
        lambda: made_options(body.system, body.template, body.parameters, body.messages, ignored)
    )
    await models.create(name, base, options)
    return Response(line(_SUCCESS), media_type=LINES) if body.stream else json_response(_SUCCESS)


async def copy(models: Models, body: OllamaCopyRequest) -> OllamaSuccess:
    """Give a model one more name."""
    name = _shown(body.destination)
    _check_allowed(models, f"names are given when the server starts: run engine serve --alias {name}")
    source, destination = _given(body.source, "source"), folder_name(_given(body.destination, "destination"))
    check_name(destination, "destination")
    await models.copy(source, destination)
    return _SUCCESS


def _given(name: str, param: str) -> str:
    if not name:
        raise bad_request(f"{param}: no model is named", param, "invalid_value")
    return name


def _check_allowed(models: Models, instead: str) -> None:
    if not models.settings.models.changes:
        more = "or start it with --models-dir DIR --allow-model-changes"
        raise ApiError(403, f"{instead}, {more}", code="unsupported")


def _shown(name: str) -> str:
    """A name in a command that an error gives."""
    return name[:80] or "NAME"
