"""POST /v1/rerank: documents by how near they are to a query.

The engine has no ranking models. The score is the cosine of the embeddings of query and document, which the answer says
in its header X-Rerank-Method and, where it is an object, in `method`.
"""

from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.http import json_response, read_request, unless_gone
from quengine.serve.routes.prompts import read_prompts
from quengine.serve.routes.vectors.embeddings import chosen_pooling, embedded
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.reading import wrong_value
from quengine.serve.schemas.requests import RerankRequest
from quengine.serve.service import Service

METHOD = "embedding-cosine"
"""How the scores were computed: not by a ranking model."""


async def rerank(service: Service, request: Request) -> Response:
    """In Jina's form, or for `texts` in that of Hugging Face's text-embeddings-inference; best first."""
    body = await read_request(request, RerankRequest, service.limits)
    service.check_model_name(body.model)
    key, documents = ("texts", body.texts) if body.documents is None else ("documents", body.documents)
    if body.documents is not None and body.texts is not None:
        raise bad_request("documents and texts: only one of them can hold", "texts", "invalid_value")
    if documents is None:
        raise wrong_value(RerankRequest, "documents", None)
    given = [body.query, *documents]
    prompts = await unless_gone(
        request.receive, read_prompts(service, given, key, parse_special=False, ended=True)
    )
    chosen = chosen_pooling(service, None)
    pooling = "mean" if chosen == "none" else chosen
    vectors = np.array(await embedded(service, request, prompts, pooling, key))
    scores = (vectors[1:] @ vectors[0]).tolist()
    order = sorted(range(len(documents)), key=lambda index: -scores[index])[: body.top_n]
    headers = {"X-Rerank-Method": METHOD}
    if key == "texts":
        return json_response(
            [
                {"index": index, "score": scores[index]}
                | ({"text": documents[index]} if body.return_text else {})
                for index in order
            ],
            headers=headers,
        )
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if body.return_documents else {})
        for index in order
    ]
    return json_response(_answer(service, results, sum(map(len, prompts))), headers=headers)


def _answer(service: Service, results: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    return {
        "model": service.model_name,
        "object": "list",
        "method": METHOD,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": results,
    }
