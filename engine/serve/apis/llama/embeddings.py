"""POST /embeddings: rows of each text, in llama-server's form."""

from starlette.responses import Response

from quengine.serve.apis.llama.requests import NativeEmbeddingRequest
from quengine.serve.apis.llama.schemas import NativeEmbedding
from quengine.serve.http import json_response, off_loop
from quengine.serve.models.model_host import ModelHost
from quengine.serve.routes.prompts import read_prompts
from quengine.serve.routes.vectors import as_json, chosen_pooling, embedded
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.reading import wrong_value


async def native_embeddings(host: ModelHost, body: NativeEmbeddingRequest) -> Response:
    """Rows of each text, in llama-server's form.

    An array of rows for each text: one row of unit length, or with pooling `none` one of each token, as it is.
    """
    host.check_model_name(body.model)
    pooling = chosen_pooling(host, body.pooling)
    key, given = ("content", body.content) if body.input is None else ("input", body.input)
    if body.input is not None and body.content is not None:
        raise bad_request("input and content: only one of them can hold", "content", "invalid_value")
    if given is None:
        raise wrong_value(NativeEmbeddingRequest, "input", None)
    prompts = await read_prompts(host, given, key, body.parse_special, ended=True)
    width = host.model.facts["n_embd"]
    vectors = await embedded(host, prompts, pooling, key)
    return await off_loop(
        lambda: json_response(
            [
                NativeEmbedding(
                    index=index, embedding=[as_json(row.tolist()) for row in vector.reshape(-1, width)]
                )
                for index, vector in enumerate(vectors)
            ]
        )
    )
