"""The bodies of OpenAI's API as structs, read as those of the other routes are (`requests`), and its answers as JSON
schemas."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

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
    ReasoningOptions,
    Tools,
    UntilFull,
    Verbose,
    component,
    only,
    without_effect,
)
from quengine.serve.schemas.llama import Timings
from quengine.serve.schemas.openapi_parts import (
    ANY,
    BOOLEAN,
    CHECKED,
    COUNT,
    NULL,
    NUMBER,
    OBJECT,
    PROGRESS,
    STRING,
    TEXT_OR_NULL,
    TIMINGS,
    Schema,
    array,
    const,
    enum,
    native_token,
    or_null,
    record,
    ref,
)
from quengine.serve.schemas.written import Count, Written
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


class TextOptions(Fields, frozen=True):
    format: Annotated[dict[str, Any], component("TextFormat")] | None = None
    verbosity: (
        Annotated[
            Literal["low", "medium", "high"],
            Meta(description="medium; a note says that another has no effect."),
        ]
        | None
    ) = None


class ResponseRequest(Tools, frozen=True, kw_only=True):
    MAX_TOKENS = ("max_output_tokens", "max_new_tokens")

    input: (
        str
        | Annotated[
            list[Annotated[dict[str, Any], component("InputItem")]],
            Meta(min_length=1, extra={"rule": "must be a string or an array of at least one item"}),
        ]
    )
    tools: Annotated[list[Annotated[Any, component("ResponseTool")]], Meta(max_length=MAX_TOOLS)] | None = (
        None
    )
    tool_choice: Annotated[Any, component("ResponseToolChoice")] = None
    instructions: str | None = None
    max_output_tokens: UntilFull | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, description="Of built-in tools: there are none.")] | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: list[str] | None = None
    store: Annotated[bool, Meta(description="Keep the response, for previous_response_id.")] = True
    previous_response_id: (
        Annotated[str, Meta(description="A stored response that this one continues.")] | None
    ) = None
    truncation: (
        Annotated[Literal["auto", "disabled"], Meta(description="auto leaves out the oldest turns to fit.")]
        | None
    ) = None
    metadata: (
        Annotated[
            dict[str, str], Meta(max_length=16, extra={"rule": "must be an object of at most 16 strings"})
        ]
        | None
    ) = None
    client_metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    stream_options: dict[str, Any] | None = None
    background: Annotated[Any, only(False)] = None
    top_logprobs: Annotated[Any, only(0)] = None
    conversation: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    truncation_strategy: Any = None
    prompt_cache_options: Any = None
    access_programs: Any = None


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


_ENCODED = {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}


class Embedding(Written, kw_only=True):
    """`embedding`: numbers, or their bytes in base64."""

    object: Literal["embedding"] = "embedding"
    index: Count
    embedding: Annotated[Any, Meta(extra_json_schema=_ENCODED)]


class PromptUsage(Written):
    prompt_tokens: Count
    total_tokens: Count


class EmbeddingList(Written, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PromptUsage


class PromptTokens(Written, kw_only=True):
    """How long a prompt is."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Count


class DeletedResponse(Written, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class CachedTokens(Written):
    cached_tokens: Count


class ReasoningTokens(Written):
    reasoning_tokens: Count


class Usage(Written):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


_NATIVE = Annotated[
    Any, Meta(extra_json_schema={"anyOf": [ref("NativeCompletion"), array(ref("NativeCompletion"))]})
]
_PROGRESS = Annotated[Any, Meta(extra_json_schema=ref("PromptProgress"))]
_CHAT_SCORES = Annotated[
    Any, Meta(extra_json_schema=or_null(record(content=array(native_token()), refusal=NULL)))
]


class FunctionCall(Written, kw_only=True):
    """`name`: with the first piece of a call alone."""

    name: str | UnsetType = UNSET
    arguments: str


class ChatCall(Written, kw_only=True):
    """A call of a message, or a piece of one, which has an index."""

    index: Count | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class ChatAnswer(Written, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatDelta(Written, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


ChatReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(Written, kw_only=True):
    index: Count
    message: ChatAnswer
    logprobs: _CHAT_SCORES = None
    finish_reason: ChatReason
    schema_violation: str | UnsetType = UNSET


class ChatPiece(Written, kw_only=True):
    index: Count
    delta: ChatDelta
    finish_reason: ChatReason | None = None
    logprobs: _CHAT_SCORES = None
    schema_violation: str | UnsetType = UNSET


class Answered(Written, kw_only=True):
    """What OpenAI's answers begin with, and each chunk of one."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: Count
    model: str
    system_fingerprint: str


class ChatCompletion(Answered, kw_only=True):
    choices: list[ChatChoice]
    usage: Usage
    seed: Count
    timings: Timings
    verbose: _NATIVE | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class ChatChunk(Answered, kw_only=True):
    choices: list[ChatPiece]
    usage: Usage | UnsetType | None = UNSET
    seed: Count | UnsetType = UNSET
    prompt_progress: _PROGRESS | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    verbose: _NATIVE | UnsetType = msgspec.field(default=UNSET, name="__verbose")


_ARRAYS = record(
    tokens=array(STRING),
    token_logprobs=array({"type": ["number", "null"]}),
    top_logprobs=array(or_null({"type": "object", "additionalProperties": NUMBER})),
    text_offset=array(COUNT),
)
_TEXT_SCORES = Annotated[
    Any, Meta(extra_json_schema={"anyOf": [NULL, _ARRAYS, record(content=array(native_token()))]})
]


class TextChoice(Written, kw_only=True):
    index: Count
    text: str
    logprobs: _TEXT_SCORES = None
    finish_reason: Literal["stop", "length"] | None = None
    schema_violation: str | UnsetType = UNSET


class Completion(Answered, kw_only=True):
    choices: list[TextChoice]
    usage: Usage
    seed: Count
    timings: Timings
    verbose: _NATIVE | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class CompletionChunk(Answered, kw_only=True):
    choices: list[TextChoice]
    usage: Usage | UnsetType = UNSET
    seed: Count | UnsetType = UNSET
    prompt_progress: _PROGRESS | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    verbose: _NATIVE | UnsetType = msgspec.field(default=UNSET, name="__verbose")


def openai_answers() -> dict[str, Schema]:
    """The schemas of the answers that are no structs, and of their parts, by component name."""
    status = enum("in_progress", "completed", "incomplete")
    part = record(type=const("output_text"), text=STRING, annotations=array(ANY), logprobs=array(ANY))
    thought = record(type=const("reasoning_text"), text=STRING)
    item = {"id": STRING, "status": status}
    call = {"call_id": STRING, "name": STRING}
    kinds = [
        record(**item, type=const("message"), role=const("assistant"), content=array(part)),
        record(
            {"encrypted_content": STRING},
            **item,
            type=const("reasoning"),
            summary=array(ANY),
            content=array(thought),
        ),
        record(**item, **call, type=const("function_call"), arguments=STRING),
        record(**item, **call, type=const("custom_tool_call"), input=STRING),
    ]
    return {
        "OutputItem": {"anyOf": kinds},
        "Response": _response(),
        "ResponseEvent": _response_event(part, thought),
        "InputItemList": record(
            {"first_id": TEXT_OR_NULL, "last_id": TEXT_OR_NULL},
            object=const("list"),
            data=array(OBJECT),
            has_more=BOOLEAN,
        ),
    }


def _response() -> Schema:
    usage = record(
        input_tokens=COUNT,
        input_tokens_details=record(cached_tokens=COUNT),
        output_tokens=COUNT,
        output_tokens_details=record(reasoning_tokens=COUNT),
        total_tokens=COUNT,
    )
    count_or_null: Schema = {"type": ["integer", "null"]}
    return record(
        CHECKED,
        id=STRING,
        object=const("response"),
        created_at=COUNT,
        completed_at=count_or_null,
        status=enum("in_progress", "completed", "incomplete", "failed"),
        background=const(False),
        error=or_null(record(code=STRING, message=STRING)),
        incomplete_details=or_null(record(reason=const("max_output_tokens"))),
        instructions=TEXT_OR_NULL,
        max_output_tokens=count_or_null,
        max_tool_calls=count_or_null,
        model=STRING,
        output=array(ref("OutputItem")),
        parallel_tool_calls=BOOLEAN,
        previous_response_id=TEXT_OR_NULL,
        prompt_cache_key=TEXT_OR_NULL,
        reasoning=record(effort=TEXT_OR_NULL, summary=NULL),
        safety_identifier=TEXT_OR_NULL,
        service_tier=const("default"),
        store=BOOLEAN,
        temperature=NUMBER,
        text=record(format=OBJECT, verbosity=const("medium")),
        tool_choice=ANY,
        tools=array(OBJECT),
        top_logprobs=const(0),
        top_p=NUMBER,
        truncation=enum("auto", "disabled"),
        usage=or_null(usage),
        user=TEXT_OR_NULL,
        metadata=OBJECT,
    )


def _response_event(part: Schema, thought: Schema) -> Schema:
    def event(*names: str, **fields: Schema) -> Schema:
        kinds = enum(*(f"response.{name}" for name in names))
        return record(TIMINGS | PROGRESS, type=kinds, sequence_number=COUNT, **fields)

    at = {"item_id": STRING, "output_index": COUNT}
    in_part = {**at, "content_index": COUNT}
    whole = ("created", "in_progress", "completed", "incomplete", "failed")
    return {
        "anyOf": [
            event(*whole, response=ref("Response")),
            event("output_item.added", "output_item.done", output_index=COUNT, item=ref("OutputItem")),
            event("content_part.added", "content_part.done", **in_part, part={"anyOf": [part, thought]}),
            event("output_text.delta", **in_part, delta=STRING, logprobs=array(ANY)),
            event("output_text.done", **in_part, text=STRING, logprobs=array(ANY)),
            event("reasoning_text.delta", **in_part, delta=STRING),
            event("reasoning_text.done", **in_part, text=STRING),
            event("function_call_arguments.delta", "custom_tool_call_input.delta", **at, delta=STRING),
            event("function_call_arguments.done", **at, name=STRING, arguments=STRING),
            event("custom_tool_call_input.done", **at, input=STRING),
        ]
    }
