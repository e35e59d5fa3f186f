"""GET /models, /v1/models and /v1/models/{name}; POST /models/load and /models/unload."""

import time
from typing import Any

from starlette.requests import Request

from quengine.models.hub.hub_name import quant_of
from quengine.models.hub.projectors import find_projector
from quengine.serve.apis.llama.requests import ModelRequest
from quengine.serve.apis.llama.schemas import Modalities, Model, ModelList, ModelStatus, Success
from quengine.serve.guard import check_may_change
from quengine.serve.http import off_loop
from quengine.serve.models.model_host import ModelHost
from quengine.serve.models.registry import Models
from quengine.serve.schemas.errors import ApiError

_EPOCH = time.time() - time.monotonic()
"""The Unix time at which the other clock begins."""


async def models(models: Models, request: Request) -> ModelList:
    """The models, by name.

    With `?reload=1` they are looked for again before.
    """
    if request.query_params.get("reload", "0") not in ("0", "false", ""):
        check_may_change(request.scope, "look for models")
        await models.rescan()
    hosts = list(models.hosts)
    seeing = await off_loop(lambda: {each for each in hosts if _may_see(each)})
    rows = [_model(models, each, name, each in seeing) for each in hosts for name in _ids(each)]
    return ModelList(data=rows)


async def model(models: Models, request: Request) -> Model:
    """The model of a name."""
    name = request.path_params["name"]
    host = models.named(name)
    if name not in host.spec.settings.model_names:
        raise ApiError(404, f"no model {name[:80]!r} here", param="model", code="model_not_found")
    return _model(models, host, name, await off_loop(lambda: _may_see(host)))


async def load(models: Models, body: ModelRequest) -> Success:
    """Begin to load a model.

    GET /models says when it is there.
    """
    models.load(models.named(body.model))
    return Success()


async def unload(models: Models, body: ModelRequest) -> Success:
    """Unload a model after its running answers."""
    await models.unload(models.named(body.model))
    return Success()


def _ids(host: ModelHost) -> tuple[str, ...]:
    """An only model is listed under each of its names."""
    names = host.spec.settings.model_names
    return names if host.alone else names[:1]


def _model(models: Models, host: ModelHost, name: str, may_see: bool) -> Model:
    meta: dict[str, Any] = {"size": host.nbytes}
    modalities = ["text"]
    if host.loaded or host.alone:
        served = host.shown
        modalities += ["image"] if served.marker else []
        shown = {key: value for key, value in served.facts.items() if key != "path"}
        meta = shown | {"n_ctx": served.ctx_size, "ftype": quant_of(str(served.facts.get("path", "")))}
    elif may_see:
        modalities.append("image")
    return Model(
        id=name,
        created=models.created,
        aliases=host.spec.settings.model_names,
        tags=host.spec.settings.model_tags,
        architecture=Modalities(input_modalities=modalities, output_modalities=["text"]),
        meta=meta,
        status=_status(models, host),
    )


def _may_see(host: ModelHost) -> bool:
    """Whether a model has a projector, by the names of files: once it is loaded, it says so itself."""
    if host.loaded or host.alone:
        return False
    path, config = host.spec.path, host.spec.config
    if config.no_mmproj or path is None:
        return False
    return config.mmproj is not None or find_projector(path) is not None


def _status(models: Models, host: ModelHost) -> ModelStatus:
    value = "loading" if host.replaced else host.status
    status = ModelStatus(value=value, unloadable=models.unloads and host.loaded)
    if host.failure is not None and not host.loaded:
        status.failed, status.error = True, host.failure
    if host.loaded:
        status.device, status.memory = host.device, host.memory
        status.running, status.waiting = host.worker.running, host.worker.waiting
        status.last_used, status.keep_seconds = round(_EPOCH + host.used_at, 3), host.keep_s
    return status
