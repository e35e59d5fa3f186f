"""Which models there are: the one that this server was started with, under each of its names.

Others are fetched, deleted and named by the command line; what asks for that here is a 400 that says so.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.models.hub.hub_name import quant_of
from quengine.serve.http import json_response, read_request
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.routes.native import generation_settings
from quengine.serve.routes.ollama.answers import LINES, line, timestamp
from quengine.serve.routes.ollama.requests import served_name
from quengine.serve.schemas.errors import ApiError, bad_request
from quengine.serve.schemas.ollama import (
    OllamaCopyRequest,
    OllamaDeleteRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from quengine.serve.service import Service

API_VERSION = "0.12.0"
"""The release of Ollama whose API this is: clients compare it with the one that they need."""
NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""
_SHOWN = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")


async def version(service: Service, request: Request) -> Response:
    del service, request
    return json_response({"version": API_VERSION})


async def tags(service: Service, request: Request) -> Response:
    del request
    entry = {**_entry(service), "modified_at": _modified(service)}
    names = service.settings.model_names
    return json_response({"models": [{"name": name, "model": name, **entry} for name in names]})


async def running(service: Service, request: Request) -> Response:
    del request
    model, entry = service.model, _entry(service)
    on_gpu = str(model.facts.get("device", "cpu")).startswith("cuda")
    entry |= {
        "expires_at": NEVER,
        "size_vram": entry["size"] if on_gpu else 0,
        "context_length": model.ctx_size,
    }
    names = service.settings.model_names
    return json_response({"models": [{"name": name, "model": name, **entry} for name in names]})


async def show(service: Service, request: Request) -> Response:
    body = await read_request(request, OllamaShowRequest, service.limits)
    service.check_model_name(served_name(service, body.given))
    model = service.model
    settings = generation_settings(service.settings.defaults, model)
    parameters = [("num_ctx", model.ctx_size), *((name, settings[name]) for name in _SHOWN)]
    return json_response(
        {
            "modelfile": f"FROM {service.model_name}\n",
            "parameters": "\n".join(f"{name:30} {value}" for name, value in parameters),
            "template": model.template or "",
            "details": _details(model),
            "model_info": _model_info(model),
            "capabilities": _capabilities(model),
            "modified_at": _modified(service),
        }
    )


async def pull(service: Service, request: Request) -> Response:
    """Nothing is fetched for the model that is here."""
    body = await read_request(request, OllamaPullRequest, service.limits)
    name = served_name(service, body.given)
    if name not in service.settings.model_names:
        raise _elsewhere(f"no model is fetched over HTTP: run engine pull {_shown(name)}, and serve it")
    success = {"status": "success"}
    return Response(line(success), media_type=LINES) if body.stream else json_response(success)


async def delete(service: Service, request: Request) -> Response:
    body = await read_request(request, OllamaDeleteRequest, service.limits)
    raise _elsewhere(f"no model is deleted over HTTP: run engine rm {_shown(body.given)}")


async def copy(service: Service, request: Request) -> Response:
    body = await read_request(request, OllamaCopyRequest, service.limits)
    name = _shown(body.destination)
    raise _elsewhere(f"names are given when the server starts: run engine serve --alias {name}")


def _elsewhere(message: str) -> ApiError:
    return bad_request(message, code="unsupported")


def _shown(name: str) -> str:
    """A name in a command that an error gives."""
    return name[:80] or "NAME"


def _path(model: ServedModel) -> Path | None:
    given = model.facts.get("path")
    return Path(given) if given else None


def _modified(service: Service) -> str:
    """When the file was last written; when the server was started where that cannot be read."""
    path = _path(service.model)
    try:
        return timestamp(service.created if path is None else path.stat().st_mtime)
    except OSError:
        return timestamp(service.created)


def _entry(service: Service) -> dict[str, Any]:
    """What lists of models say of each. `digest` is that of the description: the file's would take reading it."""
    model = service.model
    facts = json.dumps(dict(model.facts), sort_keys=True, default=str)
    return {
        "size": model.facts.get("size", 0),
        "digest": hashlib.sha256(facts.encode(errors="replace")).hexdigest(),
        "details": _details(model),
    }


def _details(model: ServedModel) -> dict[str, Any]:
    path, family = _path(model), str(model.facts.get("architecture", ""))
    return {
        "parent_model": "",
        "format": "gguf" if path is None or path.suffix == ".gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _parameter_size(int(model.facts.get("n_params", 0))),
        "quantization_level": quant_of(path.name) if path is not None else "",
    }


def _parameter_size(count: int) -> str:
    """As 7.2B, 135M."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _model_info(model: ServedModel) -> dict[str, Any]:
    """Under the keys of GGUF."""
    facts = model.facts
    family = facts.get("architecture", "")
    info = {
        "general.architecture": family,
        "general.parameter_count": facts.get("n_params"),
        f"{family}.context_length": facts.get("n_ctx_train"),
        f"{family}.embedding_length": facts.get("n_embd"),
        f"{family}.vocab_size": facts.get("n_vocab"),
    }
    return {key: value for key, value in info.items() if value is not None}


def _capabilities(model: ServedModel) -> list[str]:
    form = model.answer_format
    more = (("tools", form.calls_tools), ("thinking", form.reasons))
    return ["completion", "embedding", *(name for name, has in more if has)]
