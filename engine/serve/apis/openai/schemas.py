"""The answers of OpenAI's API as structs, and its bodies that are no canonical request."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quengine.serve.apis.llama.schemas import NativeCompletion
from quengine.serve.schemas.fields import (
    Fields,
    ReasoningOptions,
    Tools,
    UntilFull,
    component,
    only,
)
from quengine.serve.schemas.shared_answers import PromptProgress, ScoredToken, Timings
from quengine.serve.schemas.written import Count, Written
from quengine.structured.tool_calls import MAX_TOOLS


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


_Native = NativeCompletion | list[NativeCompletion]


class ChatScores(Written, kw_only=True):
    content: list[ScoredToken]
    refusal: None = None


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
    logprobs: ChatScores | None = None
    finish_reason: ChatReason
    schema_violation: str | UnsetType = UNSET


class ChatPiece(Written, kw_only=True):
    index: Count
    delta: ChatDelta
    finish_reason: ChatReason | None = None
    logprobs: ChatScores | None = None
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
    verbose: _Native | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class ChatChunk(Answered, kw_only=True):
    choices: list[ChatPiece]
    usage: Usage | UnsetType | None = UNSET
    seed: Count | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    verbose: _Native | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class TextScores(Written, kw_only=True):
    """Parallel arrays; with post_sampling_probs `content` alone, in llama-server's form."""

    tokens: list[str] | UnsetType = UNSET
    token_logprobs: list[float | None] | UnsetType = UNSET
    top_logprobs: list[dict[str, float] | None] | UnsetType = UNSET
    text_offset: list[Count] | UnsetType = UNSET
    content: list[ScoredToken] | UnsetType = UNSET


class TextChoice(Written, kw_only=True):
    index: Count
    text: str
    logprobs: TextScores | None = None
    finish_reason: Literal["stop", "length"] | None = None
    schema_violation: str | UnsetType = UNSET


class Completion(Answered, kw_only=True):
    choices: list[TextChoice]
    usage: Usage
    seed: Count
    timings: Timings
    verbose: _Native | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class CompletionChunk(Answered, kw_only=True):
    choices: list[TextChoice]
    usage: Usage | UnsetType = UNSET
    seed: Count | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    verbose: _Native | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class ItemPart(Written, kw_only=True):
    """Part of an item's content; the arrays are those of a message's text, and empty."""

    type: Literal["output_text", "reasoning_text"]
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    text: str = ""


class OutputItem(Written, kw_only=True):
    """A message or reasoning, with content, or a call."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    role: Literal["assistant"] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    content: list[ItemPart] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    encrypted_content: str | UnsetType = UNSET


class ResponseFailure(Written):
    code: str
    message: str


class IncompleteDetails(Written):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReasoning(Written):
    effort: str | None
    summary: None = None


class ResponseText(Written):
    format: dict[str, Any]
    verbosity: Literal["medium"] = "medium"


class ResponseUsage(Written, kw_only=True):
    input_tokens: Count
    input_tokens_details: CachedTokens
    output_tokens: Count
    output_tokens_details: ReasoningTokens
    total_tokens: Count


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseObject(Written, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: Count
    completed_at: Count | None = None
    status: ResponseStatus
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0] = 0
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    schema_violation: str | UnsetType = UNSET


class ResponseEvent(Written, kw_only=True):
    """An event of a stream: which fields it has follows from its type, as in OpenAI's reference."""

    type: str
    sequence_number: Count = 0
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: Count | UnsetType = UNSET
    content_index: Count | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: ItemPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class InputItemList(Written, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
