"""The canonical requests, to which bodies of other APIs are converted: chats, completions and embeddings in OpenAI's
fields, completions in llama-server's, and a conversation without an answer."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quengine.serve.schemas.fields import (
    Body,
    Dimensions,
    Effort,
    Fields,
    Generation,
    Logprobs,
    Messages,
    PoolingField,
    Prompt,
    Thinking,
    Tools,
    UntilFull,
    Verbose,
    component,
    only,
    without_effect,
)
from quengine.structured.tool_calls import MAX_TOOLS


class StreamOptions(Fields, frozen=True):
    include_usage: bool = False
    include_obfuscation: Any = None


class ChatRequest(Tools, frozen=True, kw_only=True):
    MAX_TOKENS = ("max_completion_tokens", "max_tokens", "n_predict", "max_new_tokens")

    messages: Messages
    functions: Annotated[list[Annotated[Any, component("Function")]], Meta(max_length=MAX_TOOLS)] | None = (
        None
    )
    function_call: Annotated[Any, component("FunctionChoice")] = None
    n: Annotated[int, Meta(ge=1)] = 1
    n_cmpl: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: UntilFull | None = None
    max_tokens: UntilFull | None = None
    n_predict: UntilFull | None = None
    stream_options: Annotated[StreamOptions, Meta(description="Ignored without stream: true.")] = (
        StreamOptions()
    )
    logprobs: bool = False
    top_logprobs: Logprobs = 0
    skip_special_tokens: bool = True
    modalities: Annotated[Any, only(["text"])] = None
    verbosity: Annotated[Any, without_effect("medium")] = None
    reasoning_effort: Effort | None = None
    reasoning_format: (
        Annotated[
            Literal["none", "deepseek", "auto"],
            Meta(
                description="none: reasoning stays in the text; else it is apart.",
                extra={"rule": "must be none, deepseek or auto"},
            ),
        ]
        | None
    ) = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verbose: Verbose = False
    audio: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    chat_template: Annotated[Any, only()] = None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    MAX_TOKENS = ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens")

    prompt: Prompt
    n: Annotated[int, Meta(ge=1)] = 1
    n_cmpl: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: UntilFull | None = None
    max_completion_tokens: UntilFull | None = None
    n_predict: UntilFull | None = None
    stream_options: Annotated[StreamOptions, Meta(description="Ignored without stream: true.")] = (
        StreamOptions()
    )
    logprobs: Logprobs | None = None
    echo: bool = False
    suffix: Annotated[
        str, Meta(description="What follows the gap after the prompt, which is then one text.")
    ] = ""
    skip_special_tokens: bool = True
    parse_special: bool = True
    verbose: Verbose = False


class EmbeddingRequest(Body, frozen=True, kw_only=True):
    input: Prompt
    pooling: PoolingField | None = None
    encoding_format: Annotated[
        Literal["float", "base64"], Meta(extra={"rule": "must be float or base64"})
    ] = "float"
    dimensions: Dimensions | None = None
    task: Annotated[
        str | None, Meta(description="What texts are embedded for, of a model with adapters for tasks.")
    ] = None
    embd_normalize: Annotated[Any, only(2)] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    parse_special: bool = True
    user: Any = None


class Native(Generation, frozen=True, kw_only=True):
    """llama-server's names."""

    MAX_TOKENS = ("n_predict", "max_tokens", "max_new_tokens")

    n: Annotated[int, Meta(ge=1)] = 1
    n_cmpl: Annotated[int, Meta(ge=1)] | None = None
    n_predict: UntilFull | None = None
    max_tokens: UntilFull | None = None
    n_probs: Annotated[int, Meta(ge=0, le=100)] = 0
    return_tokens: bool = False
    parse_special: bool = True
    image_data: Annotated[Any, only([])] = None
    response_fields: Annotated[
        list[str], Meta(description="Answer with these alone; a/b is b in a. None: with all.")
    ] = msgspec.field(default_factory=list)


class TemplateRequest(Body, frozen=True, kw_only=True):
    messages: Messages
    tools: Annotated[list[Annotated[Any, component("Tool")]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, component("ToolChoice")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Annotated[Any, component("Function")]], Meta(max_length=MAX_TOOLS)] | None = (
        None
    )
    function_call: Annotated[Any, component("FunctionChoice")] = None
    parse_tool_calls: Any = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    reasoning_effort: Effort | None = None
    enable_thinking: Thinking | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
