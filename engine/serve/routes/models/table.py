"""GET /models, /v1/models and /v1/models/{name}; POST /models/load and /models/unload."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.models.hub.hub_name import quant_of
from quengine.models.hub.projectors import find_projector
from quengine.serve.guard import check_may_change
from quengine.serve.http import json_response, off_loop, read_request
from quengine.serve.models.model_entry import ModelEntry
from quengine.serve.models.registry import Models
from quengine.serve.schemas.errors import ApiError
from quengine.serve.schemas.requests import ModelRequest

_EPOCH = time.time() - time.monotonic()
"""The Unix time at which the other clock begins."""


async def models(models: Models, request: Request) -> Response:
    """All models; with `?reload=1` they are looked for again before."""
    if request.query_params.get("reload", "0") not in ("0", "false", ""):
        check_may_change(request.scope, "look for models")
        await models.rescan()
    entries = list(models.entries)
    seeing = await off_loop(lambda: {each for each in entries if _may_see(each)})
    rows = [_model(models, each, name, each in seeing) for each in entries for name in _ids(each)]
    return json_response({"object": "list", "data": rows})


async def model(models: Models, request: Request) -> Response:
    name = request.path_params["name"]
    entry = models.named(name)
    if name not in entry.spec.settings.model_names:
        raise ApiError(404, f"no model {name[:80]!r} here", param="model", code="model_not_found")
    return json_response(_model(models, entry, name, await off_loop(lambda: _may_see(entry))))


async def load(models: Models, request: Request) -> Response:
    """Begin to load a model; GET /models says when it is there."""
    body = await read_request(request, ModelRequest, models.settings.limits)
    models.load(models.named(body.model))
    return json_response({"success": True})


async def unload(models: Models, request: Request) -> Response:
    """Unload a model, as soon as its running answers have ended."""
    body = await read_request(request, ModelRequest, models.settings.limits)
    await models.unload(models.named(body.model))
    return json_response({"success": True})


def _ids(entry: ModelEntry) -> tuple[str, ...]:
    """An only model is listed under each of its names."""
    names = entry.spec.settings.model_names
    return names if entry.alone else names[:1]


def _model(models: Models, entry: ModelEntry, name: str, may_see: bool) -> dict[str, Any]:
    meta: dict[str, Any] = {"size": entry.nbytes}
    modalities = ["text"]
    if entry.loaded or entry.alone:
        served = entry.service.model
        modalities += ["image"] if served.marker else []
        shown = {key: value for key, value in served.facts.items() if key != "path"}
        meta = shown | {"n_ctx": served.ctx_size, "ftype": quant_of(str(served.facts.get("path", "")))}
    elif may_see:
        modalities.append("image")
    return {
        "id": name,
        "object": "model",
        "created": models.created,
        "owned_by": "quengine",
        "aliases": entry.spec.settings.model_names,
        "tags": entry.spec.settings.model_tags,
        "architecture": {"input_modalities": modalities, "output_modalities": ["text"]},
        "meta": meta,
        "status": _status(models, entry),
    }


def _may_see(entry: ModelEntry) -> bool:
    """Whether a model has a projector, by the names of files: once it is loaded, it says so itself."""
    if entry.loaded or entry.alone:
        return False
    path, config = entry.spec.path, entry.spec.config
    if config.no_mmproj or path is None:
        return False
    return config.mmproj is not None or find_projector(path) is not None


def _status(models: Models, entry: ModelEntry) -> dict[str, Any]:
    """As llama-server's router has it, with what `engine ps` prints, and whether POST /models/unload can unload it."""
    status: dict[str, Any] = {"value": entry.state, "unloadable": models.unloads and entry.loaded}
    if entry.failure is not None and not entry.loaded:
        status |= {"failed": True, "error": entry.failure}
    if entry.loaded:
        worker = entry.service.worker
        status |= {
            "device": entry.device,
            "memory": entry.memory,
            "running": worker.running,
            "waiting": worker.waiting,
            "last_used": round(_EPOCH + entry.used_at, 3),
            "keep_seconds": entry.keep_s,
        }
    return status
