"""POST /v1/rerank: documents by how near they are to a query.

A ranking model scores a pair by its trained head, any other model by the cosine of the embeddings of query and
document. The answer says which in its header X-Rerank-Method and, if it is an object, in `method`.
"""

from collections.abc import Sequence
from uuid import uuid4

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quengine.request.pooling import RANK
from quengine.serve.apis.llama.requests import Document, RerankRequest
from quengine.serve.apis.llama.schemas import (
    ApiVersion,
    Ranked,
    RankedDocuments,
    RankedText,
    RankingMeta,
    RankingUsage,
    ScoredText,
)
from quengine.serve.http import json_response
from quengine.serve.models.model_host import ModelHost
from quengine.serve.routes.prompts import read_pairs, read_prompts
from quengine.serve.routes.vectors import chosen_pooling, embedded
from quengine.serve.schemas.errors import CONTEXT_EXCEEDED, bad_request
from quengine.serve.schemas.reading import wrong_value

COSINE, HEAD = "embedding-cosine", "trained-head"
"""How scores are computed: without a ranking model, or by one."""


async def rerank(host: ModelHost, request: Request, body: RerankRequest) -> Response:
    """Documents by the cosine of their embeddings with a query's.

    In Jina's and Cohere's form, or for `texts` in that of Hugging Face's text-embeddings-inference; best first.
    """
    host.check_model_name(body.model)
    documents: Sequence[str | Document] | None
    key, documents = ("texts", body.texts) if body.documents is None else ("documents", body.documents)
    if body.documents is not None and body.texts is not None:
        raise bad_request("documents and texts: only one of them can hold", "texts", "invalid_value")
    if documents is None:
        raise wrong_value(RerankRequest, "documents", None)
    texts = [each.text if isinstance(each, Document) else each for each in documents]
    by_head = host.model.ranks
    scores, tokens = await (_by_head if by_head else _by_cosine)(host, body.query, texts, key)
    order = sorted(range(len(documents)), key=lambda index: -scores[index])[: body.top_n]
    method = HEAD if by_head else COSINE
    headers = {"X-Rerank-Method": method}
    if key == "texts":
        with_text = body.return_text
        scored = [
            ScoredText(index=index, score=scores[index], text=texts[index] if with_text else UNSET)
            for index in order
        ]
        return json_response(scored, headers=headers)
    with_text, v2 = body.return_documents, request.url.path == "/v2/rerank"
    answer = RankedDocuments(
        model=host.name,
        method=method,
        usage=RankingUsage(tokens, tokens),
        results=[
            Ranked(
                index=index,
                relevance_score=scores[index],
                document=RankedText(texts[index]) if with_text else UNSET,
            )
            for index in order
        ],
        id=str(uuid4()) if v2 else UNSET,
        meta=RankingMeta(ApiVersion()) if v2 else UNSET,
    )
    return json_response(answer, headers=headers)


async def _by_cosine(host: ModelHost, query: str, texts: list[str], key: str) -> tuple[list[float], int]:
    prompts = await _read(host, query, texts, key)
    chosen = chosen_pooling(host, None)
    pooling = "mean" if chosen == "none" else chosen
    vectors = np.array(await embedded(host, prompts, pooling, key))
    scores: list[float] = (vectors[1:] @ vectors[0]).tolist()
    return scores, sum(len(prompts[0]) + len(prompt) for prompt in prompts[1:])


async def _by_head(host: ModelHost, query: str, texts: list[str], key: str) -> tuple[list[float], int]:
    """The scores, and the tokens of all pairs."""
    pairs = await (_encoder_pairs if host.model.ranker is None else read_pairs)(host, query, texts, key)
    for index, pair in enumerate(pairs):
        if len(pair) > host.model.ctx_size:
            problem = (
                f"{key}[{index}]: with the query {len(pair)} tokens: the context holds {host.model.ctx_size}"
            )
            raise bad_request(problem, key, CONTEXT_EXCEEDED)
    found = await embedded(host, pairs, RANK, key)
    return [float(vector[0]) for vector in found], sum(map(len, pairs))


async def _encoder_pairs(host: ModelHost, query: str, texts: list[str], key: str) -> list[list[int]]:
    """The tokens of each pair: the query, what the model puts between the two, and the document without its BOS."""
    first, *documents = await _read(host, query, texts, key)
    begin = host.model.bos_id
    first = first + host.model.pair_gap
    return [first + document[document[:1] == [begin] :] for document in documents]


async def _read(host: ModelHost, query: str, texts: list[str], key: str) -> list[list[int]]:
    given = [query, *texts]
    return await read_prompts(host, given, key, parse_special=False, ended=True)
