"""POST /v1/embeddings: a vector of unit length for each text."""

from base64 import b64encode
from typing import Any

from starlette.responses import Response

from quengine.serve.apis.openai.schemas import Embedding, EmbeddingList, PromptUsage
from quengine.serve.http import json_response, off_loop
from quengine.serve.models.model_host import ModelHost, Vector
from quengine.serve.routes.vectors import as_json, embed
from quengine.serve.schemas.canonical import EmbeddingRequest


async def embeddings(host: ModelHost, body: EmbeddingRequest) -> Response:
    """A vector for each text."""
    vectors, tokens = await embed(host, body)
    return await off_loop(
        lambda: json_response(
            EmbeddingList(
                data=[
                    Embedding(index=index, embedding=as_json(_encoded(vector, body.encoding_format)))
                    for index, vector in enumerate(vectors)
                ],
                model=host.name,
                usage=PromptUsage(prompt_tokens=tokens, total_tokens=tokens),
            )
        )
    )


def _encoded(vector: Vector, encoding: str) -> Any:
    """`base64`: of 32-bit floats, little-endian, the default of OpenAI's clients."""
    return vector.tolist() if encoding == "float" else b64encode(vector.astype("<f4").tobytes()).decode()
