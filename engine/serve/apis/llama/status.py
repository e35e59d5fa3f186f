"""The state of the server and of its models: health, metrics, properties, adapters. None of it loads a model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from quengine.models.hub.hub_name import quant_of
from quengine.serve.apis.llama.native import generation_settings
from quengine.serve.apis.llama.schemas import (
    DefaultSettings,
    Health,
    ListedAdapter,
    Props,
    ReadsMedia,
    Replicas,
    RequestLimits,
    Success,
)
from quengine.serve.http import read_array
from quengine.serve.models.model_host import ModelHost, State
from quengine.serve.models.registry import Models
from quengine.serve.processes.shared_engine import ReplicaStats
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.routes.answers import FINGERPRINT
from quengine.serve.routes.images import MEDIA_MARKER
from quengine.serve.routes.sampling import adapter_scales
from quengine.serve.schemas.errors import ApiError, shutting_down, switched_off
from quengine.serve.schemas.fields import LoraAdapter
from quengine.serve.schemas.reading import read_part
from quengine.serve.settings import ServerSettings


async def health(models: Models) -> Health:
    """Whether requests are taken.

    200 while requests are taken; 503 while an only model is loaded or its engine replaced, a model does not answer,
    or the server is ending.
    """
    if models.draining:
        raise shutting_down()
    for host in models.hosts:
        if host.alone and host.kept is None and host.state in (State.LOADING, State.FAILED):
            raise host.unavailable()
        if (trouble := host.worker.trouble) is not None:
            raise ApiError(503, trouble, code="unresponsive", retry_after=5)
    status = Health()
    if models.only is not None:
        stats = models.only.worker.stats
        status.is_sleeping = UNSET if models.only.kept is None else True
        status.replicas, status.prefill_replicas = _replicas(stats.replicas), _replicas(stats.prefill)
    return status


def _replicas(stats: Sequence[ReplicaStats]) -> Replicas | UnsetType:
    return Replicas(up=sum(each.up for each in stats), of=len(stats)) if stats else UNSET


async def metrics(models: Models, request: Request) -> Response:
    """Counters, for Prometheus.

    Of the server and its only model, or of one that is named, also under llama-server's names.
    """
    if not models.settings.metrics:
        raise switched_off("--no-metrics")
    headers = {"content-type": CONTENT_TYPE_LATEST, "Process-Start-Time-Unix": str(models.created)}
    host = models.queried(request.query_params.get("model", ""))
    joined = models.joined_metrics
    return Response(metrics_text(models, host) if joined is None else await joined(), headers=headers)


def metrics_text(models: Models, host: ModelHost | None) -> bytes:
    """Prometheus' text of a model, with the server's own if it is the only one. host: None for the server and all."""
    if host is None:
        return models.metrics.text({each.name: each.metrics for each in models.hosts})
    own = models.metrics.text({}) if host.alone else b""
    return own + host.metrics.text(host.worker)


async def props(models: Models, request: Request) -> Props:
    """The model, the defaults and the limits.

    As llama-server's; the defaults are those of a request that says nothing.
    """
    host = models.queried(request.query_params.get("model", ""))
    if host is None:
        given = models.settings.models
        return _props(
            models.settings, None, role="router", max_instances=given.most, models_autoload=given.autoload
        )
    served = host.model

    def text_of(token: int | None) -> str:
        return "" if token is None else served.token_bytes(token).decode(errors="replace")

    settings = host.spec.settings
    return _props(
        replace(settings, defaults=replace(settings.defaults, lora=host.lora)),
        served,
        total_slots=host.worker.slots,
        model_alias=host.name,
        model_path=served.facts.get("path", ""),
        chat_template=served.template or "",
        model_ftype=quant_of(str(served.facts.get("path", ""))),
        bos_token=text_of(served.bos_id),
        eos_token=text_of(served.eos_id),
        eos_tokens=[text_of(token) for token in sorted(served.eos_ids)],
        is_sleeping=host.status == "sleeping",
    )


def _props(settings: ServerSettings, model: ServedModel | None, **more: Any) -> Props:
    """The properties, of which `more` depend on the model."""
    ctx_size, limits = 0 if model is None else model.ctx_size, settings.limits
    return Props(
        default_generation_settings=DefaultSettings(ctx_size, generation_settings(settings.defaults, model)),
        modalities=ReadsMedia(vision=bool(model and model.marker)),
        media_marker=MEDIA_MARKER if model and model.marker else "",
        endpoint_slots=settings.slots,
        endpoint_metrics=settings.metrics,
        ui=settings.ui,
        build_info=FINGERPRINT,
        limits=RequestLimits(
            body=limits.body,
            prompt_tokens=limits.prompt or max(0, ctx_size - 1),
            n=limits.n,
            stop=limits.stops,
            logit_bias=limits.biases,
            queue=limits.queue,
        ),
        tools=bool(settings.tools.names or settings.tools.mcp),
        **more,
    )


async def change_props(models: Models) -> Success:
    """Refused.

    POST /props, as llama-server without --props.
    """
    del models
    raise ApiError(501, "this server does not support changing global properties")


async def lora_adapters(models: Models, request: Request) -> list[ListedAdapter]:
    """The LoRA adapters of the only model, or of one that is named, with the scales of requests that give none."""
    host = models.queried(request.query_params.get("model", ""))
    if host is None:
        return []
    of_model = host.model.adapters
    scales = of_model.scales(host.lora)
    return [
        ListedAdapter(id=each.id, path=each.path, scale=scale)
        for each, scale in zip(of_model.adapters, scales, strict=True)
    ]


async def change_lora_adapters(models: Models, request: Request) -> Success:
    """Set the scales of LoRA adapters for requests that give none; those that are left out become 0.

    Of several models the query names one.
    """
    given = read_part(list[LoraAdapter], await read_array(request, models.settings.limits), "adapters")
    host = models.named(request.query_params.get("model", ""))
    host.lora = adapter_scales(given, host.model)
    return Success()
