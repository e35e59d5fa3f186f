"""POST /api/embed, and /api/embeddings, which it replaced: vectors as /v1/embeddings has them."""

import time

from starlette.responses import Response

from quengine.serve.apis.ollama.answers import nanoseconds
from quengine.serve.apis.ollama.requests import served_name
from quengine.serve.apis.ollama.schemas import (
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)
from quengine.serve.http import json_response, off_loop
from quengine.serve.models.model_host import ModelHost, Vector
from quengine.serve.routes.shortening import tell
from quengine.serve.routes.vectors import as_json
from quengine.serve.routes.vectors import embed as embed_prompts
from quengine.serve.schemas.canonical import EmbeddingRequest


async def embed(host: ModelHost, body: OllamaEmbedRequest) -> Response:
    """A vector for each text.

    None for no text, as Ollama has it.
    """
    began = time.perf_counter()
    notes: list[str] | None = None if body.truncate is False else []
    vectors, tokens = await _vectors(host, body.model, body.input, notes, body.dimensions)
    answer = await off_loop(
        lambda: json_response(
            OllamaEmbed(
                model=host.name,
                embeddings=[as_json(vector.tolist()) for vector in vectors],
                total_duration=nanoseconds(time.perf_counter() - began),
                prompt_eval_count=tokens,
            )
        )
    )
    tell("/api/embed", notes or (), answer)
    return answer


async def one_embedding(host: ModelHost, body: OllamaEmbeddingsRequest) -> Response:
    """A vector for a text."""
    notes: list[str] = []
    vectors, _ = await _vectors(host, body.model, body.prompt, notes)
    answer = json_response(OllamaEmbeddings(embedding=vectors[0].tolist() if vectors else []))
    tell("/api/embeddings", notes, answer)
    return answer


async def _vectors(
    host: ModelHost,
    name: str,
    texts: str | list[str],
    notes: list[str] | None,
    dimensions: int | None = None,
) -> tuple[list[Vector], int]:
    """The vectors, and how many tokens all texts have."""
    name = served_name(host, name)
    if not texts:
        host.check_model_name(name)
        return [], 0
    given = EmbeddingRequest(model=name, input=texts, dimensions=dimensions)
    return await embed_prompts(host, given, notes)
