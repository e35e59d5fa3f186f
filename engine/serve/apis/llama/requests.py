"""The bodies of llama-server's API and of the server's own as structs, a class a route."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quengine.serve.schemas.canonical import Native
from quengine.serve.schemas.fields import (
    Body,
    PoolingField,
    Prompt,
    SomeText,
    Token,
    only,
)

_NO_NAME = r'\x00-\x1f\x7f-\x9f/\\:*?"<>|\uff0e\u2215\u2216\ufeff\ufffd'
FILE_NAME = rf"^(?! )(?!.*[.][.])[^{_NO_NAME}]*[^ .{_NO_NAME}]$(?!\n)"
"""File names as llama-server takes them (common/common.cpp, fs_validate_filename)."""


class NativeRequest(Native, frozen=True, kw_only=True):
    prompt: Prompt


class ExtraFile(msgspec.Struct, frozen=True):
    """A file of the same project."""

    text: str
    filename: SomeText = "tmp"


class InfillRequest(Native, frozen=True, kw_only=True):
    """`prompt` is more of the text before the gap, after `input_prefix`."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[ExtraFile] = msgspec.field(default_factory=list)


class NativeEmbeddingRequest(Body, frozen=True, kw_only=True):
    """llama-server's; `content` is another name of `input`."""

    input: Prompt | None = None
    content: Prompt | None = None
    pooling: PoolingField | None = None
    embd_normalize: Annotated[Any, only(2)] = None
    encoding_format: Annotated[Any, only("float")] = None
    dimensions: Annotated[Any, only()] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    parse_special: bool = True


class Document(msgspec.Struct, frozen=True):
    """A document as an object; what it has beside its text is not read."""

    text: SomeText


Documents = Annotated[
    list[SomeText | Document], Meta(min_length=1, extra={"rule": "must be an array of at least one text"})
]


class RerankRequest(Body, frozen=True, kw_only=True):
    """Jina's and Cohere's fields, and those of text-embeddings-inference: `texts` and `return_text`."""

    query: SomeText
    documents: Documents | None = None
    texts: Annotated[list[SomeText], Meta(min_length=1)] | None = None
    top_n: Annotated[int, Meta(ge=1, description="Answer with so many of the best.")] | None = None
    return_documents: bool = False
    return_text: bool = False
    raw_scores: Annotated[Any, only(False)] = None
    truncate: Annotated[Any, only(False)] = None
    max_tokens_per_doc: Annotated[Any, only()] = None


class TokenizeRequest(Body, frozen=True, kw_only=True):
    content: Annotated[
        str | list[str | Token],
        Meta(extra={"rule": "must be a string, or an array of strings and token ids"}),
    ]
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    tokens: Annotated[list[Token], Meta(extra={"rule": "must be an array of token ids"})]


class ModelRequest(Body, frozen=True):
    """Of a route that loads or unloads a model."""


class StreamsRequest(Body, frozen=True):
    """Of POST /v1/streams/lookup."""

    conversation_ids: Annotated[list[str], Meta(max_length=1000)] = msgspec.field(default_factory=list)


class SlotFileRequest(Body, frozen=True, kw_only=True):
    """Of /slots/{id_slot} with the actions save and restore."""

    filename: Annotated[
        str,
        Meta(
            pattern=FILE_NAME,
            max_length=255,
            description="In the folder of --slot-save-path.",
            extra={
                "rule": "must be a file's name of at most 255 bytes, without a path, .. or any of :*?\"<>|"
            },
        ),
    ]
