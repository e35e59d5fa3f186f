"""POST /v1/embeddings: a vector of unit length for each text."""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quengine.request.pooling import POOLINGS
from quengine.request.sampling_params import SamplingParams
from quengine.serve.http import json_response, read_fields, unless_gone
from quengine.serve.processes.server_thread import Ask
from quengine.serve.processes.shared_engine import Finished
from quengine.serve.routes.prompts import read_prompts
from quengine.serve.routes.streaming import whole_texts
from quengine.serve.schemas.fields import Fields
from quengine.serve.service import Service

ENCODINGS = ("float", "base64")


async def embeddings(service: Service, request: Request) -> Response:
    asks, encoding = await unless_gone(
        request.receive, _read(await read_fields(request, service.limits), service)
    )
    texts = await whole_texts(service, request, asks)
    tokens = sum(len(ask.prompt) for ask in asks)
    return json_response(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _encoded(text.end, encoding)}
                for index, text in enumerate(texts)
            ],
            "model": service.model_name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def _read(fields: Fields, service: Service) -> tuple[list[Ask], str]:
    service.check_model_name(fields)
    encoding = _one_of(fields, "encoding_format", ENCODINGS, ENCODINGS[0])
    pooling = _one_of(fields, "pooling", POOLINGS, service.settings.pooling)
    fields.neutral("dimensions")
    fields.ignore("user", "input", "parse_special")
    fields.finish()
    prompts = await read_prompts(fields, service, "input")
    params = SamplingParams(temperature=0).with_seed()
    return [Ask(prompt, params, pooling=pooling) for prompt in prompts], encoding


def _one_of(fields: Fields, key: str, values: Sequence[Any], default: Any) -> Any:
    value = fields.text(key)
    if value is not None and value not in values:
        raise fields.wrong(key, f"must be {' or '.join(values)}")
    return default if value is None else value


def _encoded(end: Finished, encoding: str) -> list[float] | str:
    """`base64`: of 32-bit floats, little-endian, as OpenAI's clients ask for by default."""
    assert end.embedding is not None
    if encoding == "float":
        return list(end.embedding)
    return b64encode(np.array(end.embedding, dtype="<f4").tobytes()).decode()
