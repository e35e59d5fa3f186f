"""The state of the server: models, health, metrics, properties, adapters."""

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from quengine import __version__
from quengine.serve.http import json_response, read_array
from quengine.serve.routes.native import generation_settings
from quengine.serve.schemas.errors import ApiError, bad_request
from quengine.serve.schemas.reading import shown
from quengine.serve.service import Service


async def health(service: Service, request: Request) -> Response:
    """200 while requests are taken and computed; 503 while the model is loaded, the engine is replaced or does not
    answer, or the server is ending."""
    del request
    state = service.worker.state
    if state != "ready":
        raise service.unavailable(state)
    if (trouble := service.worker.trouble) is not None:
        raise ApiError(503, trouble, code="unresponsive", retry_after=5)
    return json_response({"status": "ok"})


async def models(service: Service, request: Request) -> Response:
    del request
    return json_response(
        {"object": "list", "data": [_model(service, n) for n in service.settings.model_names]}
    )


async def model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in service.settings.model_names:
        raise ApiError(404, f"no model {name[:80]!r} here", param="model", code="model_not_found")
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    shown = {key: value for key, value in service.model.facts.items() if key != "path"}
    meta = shown | {"n_ctx": service.model.ctx_size}
    return {"id": name, "object": "model", "created": service.created, "owned_by": "quengine", "meta": meta}


async def metrics(service: Service, request: Request) -> Response:
    del request
    headers = {"content-type": CONTENT_TYPE_LATEST, "Process-Start-Time-Unix": str(service.created)}
    return Response(service.metrics.text(service.worker), headers=headers)


async def props(service: Service, request: Request) -> Response:
    """As llama-server's; the defaults are those of a request that says nothing."""
    del request
    served, settings = service.model, service.settings
    defaults = generation_settings(settings.defaults, served.ctx_size)
    bos = served.bos_id
    return json_response(
        {
            "default_generation_settings": {"n_ctx": served.ctx_size, "params": defaults},
            "total_slots": service.worker.slots,
            "model_alias": service.model_name,
            "model_path": served.facts.get("path", ""),
            "chat_template": served.template or "",
            "bos_token": "" if bos is None else served.token_bytes(bos).decode(errors="replace"),
            "eos_tokens": [served.token_bytes(t).decode(errors="replace") for t in sorted(served.eos_ids)],
            "modalities": {"vision": False, "audio": False},
            "build_info": f"quengine {__version__}",
            "limits": {
                "body": settings.limits.body,
                "prompt_tokens": settings.limits.prompt or served.ctx_size - 1,
                "n": settings.limits.n,
                "stop": settings.limits.stops,
                "logit_bias": settings.limits.biases,
                "queue": settings.limits.queue,
            },
        }
    )


async def change_props(service: Service, request: Request) -> Response:
    """POST /props, as llama-server without --props."""
    del service, request
    raise ApiError(501, "this server does not support changing global properties")


async def lora_adapters(service: Service, request: Request) -> Response:
    """GET /lora-adapters: there are none."""
    del service, request
    return json_response([])


async def change_lora_adapters(service: Service, request: Request) -> Response:
    """POST /lora-adapters: the scales of adapters, of which there are none."""
    if adapters := await read_array(request, service.limits):
        message = f"adapter {shown(adapters[0])}: this server has no adapters; only [] is accepted"
        raise bad_request(message, code="unsupported")
    return json_response({"success": True})
