"""POST /v1/embeddings: a vector of unit length for each text."""

from base64 import b64encode

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quengine.request.sampling_params import SamplingParams
from quengine.serve.http import json_response, read_request, unless_gone
from quengine.serve.processes.shared_engine import Finished, GenerationRequest
from quengine.serve.routes.prompts import read_prompts
from quengine.serve.routes.streaming import whole_answer
from quengine.serve.schemas.requests import EmbeddingRequest
from quengine.serve.service import Service


async def embeddings(service: Service, request: Request) -> Response:
    body = await read_request(request, EmbeddingRequest, service.limits)
    ends, tokens = await embed(service, request, body)
    return json_response(
        {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _encoded(end, body.encoding_format),
                }
                for index, end in enumerate(ends)
            ],
            "model": service.model_name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def embed(service: Service, request: Request, body: EmbeddingRequest) -> tuple[list[Finished], int]:
    """The ends of a body's prompts, which have their vectors; and how many tokens the prompts have. Raises ApiError."""
    service.check_model_name(body.model)
    prompts = await unless_gone(
        request.receive, read_prompts(service, body.input, "input", body.parse_special)
    )
    params = SamplingParams(temperature=0).with_seed()
    pooling = body.pooling or service.settings.pooling
    requests = [GenerationRequest(prompt, params, pooling=pooling) for prompt in prompts]
    outputs = await whole_answer(service, request, requests)
    return [end for _, end in outputs], sum(map(len, prompts))


def _encoded(end: Finished, encoding: str) -> list[float] | str:
    """`base64`: of 32-bit floats, little-endian, the default of OpenAI's clients."""
    assert end.embedding is not None
    if encoding == "float":
        return list(end.embedding)
    return b64encode(np.array(end.embedding, dtype="<f4").tobytes()).decode()
