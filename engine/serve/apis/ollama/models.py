"""Which models there are, under each of their names."""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quengine.models.hub.hub_name import quant_of
from quengine.serve.apis.llama.native import generation_settings
from quengine.serve.apis.ollama.answers import timestamp
from quengine.serve.apis.ollama.requests import served_name
from quengine.serve.apis.ollama.schemas import (
    OllamaDetails,
    OllamaProcess,
    OllamaProcesses,
    OllamaShow,
    OllamaShowRequest,
    OllamaTag,
    OllamaTags,
    OllamaVersion,
)
from quengine.serve.models.model_host import ModelHost
from quengine.serve.models.registry import Models
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.routes.gaps import fills_gaps

API_VERSION = "0.12.0"
"""The release of Ollama whose API this is: clients compare it with the one that they need."""
NEVER = "9999-12-31T23:59:59Z"
"""The time of unloading of a model that is kept for ever."""
_LONG_S = 100 * 365 * 24 * 3600.0
_SHOWN = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")


async def version(models: Models) -> OllamaVersion:
    """The release of Ollama's API."""
    del models
    return OllamaVersion(version=API_VERSION)


async def tags(models: Models) -> OllamaTags:
    """The models, by name."""
    listed = [
        OllamaTag(
            name=name,
            model=name,
            size=_facts(each).get("size", 0),
            digest=_digest(each),
            details=_details(_facts(each)),
            modified_at=_modified(models, each),
        )
        for each in models.hosts
        for name in each.spec.settings.model_names
    ]
    return OllamaTags(models=listed)


async def running(models: Models) -> OllamaProcesses:
    """The models in memory.

    Raises ApiError (503) while an only one is being loaded at first.
    """
    there = [each for each in models.hosts if each.loaded or (each.alone and each.kept is None)]
    listed = [_in_memory(each, name) for each in there for name in each.spec.settings.model_names]
    return OllamaProcesses(models=listed)


def _in_memory(host: ModelHost, name: str) -> OllamaProcess:
    left, size = host.expires_in, host.memory or host.nbytes
    return OllamaProcess(
        name=name,
        model=name,
        size=size,
        digest=_digest(host),
        details=_details(_facts(host)),
        expires_at=NEVER if left is None else timestamp(time.time() + min(left, _LONG_S)),
        size_vram=size if host.device.startswith("cuda") else 0,
        context_length=host.shown.ctx_size,
    )


async def show(models: Models, body: OllamaShowRequest) -> OllamaShow:
    """What the model is.

    It is not loaded for that.
    """
    host = models.named(body.given)
    host.check_model_name(served_name(host, body.given))
    model = await models.described(host)
    settings = generation_settings(host.settings.defaults, model)
    parameters = [("num_ctx", model.ctx_size), *((name, getattr(settings, name)) for name in _SHOWN)]
    return OllamaShow(
        modelfile=f"FROM {host.name}\n",
        parameters="\n".join(f"{name:30} {value}" for name, value in parameters),
        template=model.template or "",
        details=_details(model.facts),
        model_info=_model_info(model),
        capabilities=_capabilities(model),
        modified_at=_modified(models, host),
    )


def _facts(host: ModelHost) -> Mapping[str, Any]:
    """The model's facts; of one that is not loaded, path and size. Raises ApiError while the only model is loading."""
    if host.loaded or host.alone:
        return host.shown.facts
    return {"path": str(host.spec.path), "size": host.nbytes}


def _modified(models: Models, host: ModelHost) -> str:
    """The time at which the file was last written; the server's start where that cannot be read."""
    given = _facts(host).get("path")
    try:
        return timestamp(Path(given).stat().st_mtime if given else models.created)
    except OSError:
        return timestamp(models.created)


def _digest(host: ModelHost) -> str:
    """The SHA-256 of a model's description. That of the file would take reading all of it."""
    text = json.dumps(dict(_facts(host)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _details(facts: Mapping[str, Any]) -> OllamaDetails:
    path, family = Path(facts.get("path") or ".gguf"), str(facts.get("architecture", ""))
    return OllamaDetails(
        format="gguf" if path.name.endswith(".gguf") else "safetensors",
        family=family,
        families=[family],
        parameter_size=_parameter_size(int(facts.get("n_params", 0))),
        quantization_level=quant_of(path.name),
    )


def _parameter_size(count: int) -> str:
    """A number of parameters, such as 7.2B or 135M."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _model_info(model: ServedModel) -> dict[str, Any]:
    """The model's facts under the keys of GGUF."""
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
    more = (
        ("vision", bool(model.marker)),
        ("insert", fills_gaps(model)),
        ("tools", form.calls_tools),
        ("thinking", form.reasons),
    )
    return ["completion", "embedding", *(name for name, has in more if has)]
