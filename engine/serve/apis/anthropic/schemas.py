"""The bodies of Anthropic's routes, and their answers, as structs.

Source: Anthropic's API reference, "Messages" and "Count Message tokens". Sampling parameters are also taken under this
server's names. What a block or a tool has beside these fields (cache_control, citations, strict, ...) changes no token.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quengine.request.sampling_params import RANGES
from quengine.serve.schemas.fields import Fields, JSONSchema, Sampling, SomeText
from quengine.serve.schemas.messages import TextContent
from quengine.serve.schemas.written import Count, Written
from quengine.structured.tool_calls import MAX_TOOLS


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """What an earlier answer thought."""

    thinking: str


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag="redacted_thinking"):
    """What an earlier answer of another server thought, encrypted: no prompt has it."""


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class TextSource(msgspec.Struct, frozen=True, tag="text"):
    data: str


class PartsSource(msgspec.Struct, frozen=True, tag="content"):
    content: TextContent


class DocumentBlock(msgspec.Struct, frozen=True, tag="document"):
    """A document of text."""

    source: TextSource | PartsSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(msgspec.Struct, frozen=True, tag="search_result"):
    source: str
    title: str
    content: TextContent


class Base64Source(msgspec.Struct, frozen=True, tag="base64"):
    media_type: str
    data: str


class UrlSource(msgspec.Struct, frozen=True, tag="url"):
    url: str


class ImageBlock(msgspec.Struct, frozen=True, tag="image"):
    source: Base64Source | UrlSource

    @property
    def url(self) -> str:
        source = self.source
        return (
            source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
        )


Passage = TextBlock | DocumentBlock | SearchResultBlock | ImageBlock


class ToolResultBlock(msgspec.Struct, frozen=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[Passage] | None = None


AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserTurn(msgspec.Struct, frozen=True, tag_field="role", tag="user"):
    content: str | list[Passage | ToolResultBlock]


class AssistantTurn(msgspec.Struct, frozen=True, tag_field="role", tag="assistant"):
    content: str | list[AssistantBlock]


class SystemTurn(msgspec.Struct, frozen=True, tag_field="role", tag="system"):
    content: TextContent


Turn = UserTurn | AssistantTurn | SystemTurn


class CustomTool(msgspec.Struct, frozen=True):
    name: Annotated[
        str,
        Meta(
            pattern="^[a-zA-Z0-9_.-]{1,64}$",
            extra={"rule": "must be 1 to 64 letters, digits, or _ . -"},
        ),
    ]
    input_schema: dict[str, Any]
    description: str | None = None
    type: (
        Annotated[Literal["custom"], Meta(extra={"rule": "must be custom: this server runs no tools"})] | None
    ) = None


class AutoChoice(msgspec.Struct, frozen=True, tag="auto"):
    """Text or calls, as the model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, frozen=True, tag="any"):
    """A call of any tool."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(msgspec.Struct, frozen=True, tag="tool"):
    """A call of this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, frozen=True, tag="none"):
    """No call."""

    disable_parallel_tool_use: bool | None = None


ToolChoice = AutoChoice | AnyChoice | NamedChoice | NoChoice


class Thinking(Fields, frozen=True):
    """`budget_tokens` is a target at which nothing is cut, and has no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: JSONSchema


class OutputConfig(Fields, frozen=True):
    effort: (
        Annotated[
            Literal["low", "medium", "high", "xhigh", "max"],
            Meta(
                description="How long the model reasons: the nearest value that its chat template takes.",
                extra={"rule": "must be low, medium, high, xhigh or max"},
            ),
        ]
        | None
    ) = None
    format: OutputFormat | None = None
    task_budget: Any = None


class CountTokensRequest(Sampling, frozen=True, kw_only=True):
    """What a prompt is made of, and fields of a request that leave it as it is."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: TextContent | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: Any = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    speed: Any = None
    user_profile_id: Any = None
    mcp_servers: (
        Annotated[list[Any], Meta(max_length=0, extra={"rule": "must be empty: this server runs no tools"})]
        | None
    ) = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    max_tokens: Annotated[
        int, Meta(ge=1, le=RANGES["max_tokens"].high, description="Most tokens to generate.", examples=[16])
    ]
    stop_sequences: list[SomeText] | None = None
    stream: bool = False


class TokenCount(Written):
    input_tokens: Count


class _Typed(Written, tag_field="type"):
    """One of several kinds of an object, which its `type` names."""


class AnthropicText(_Typed, tag="text"):
    text: str = ""


class AnthropicThinking(_Typed, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class AnthropicToolUse(_Typed, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnthropicBlock = AnthropicText | AnthropicThinking | AnthropicToolUse


class AnthropicTextDelta(_Typed, tag="text_delta"):
    text: str


class AnthropicThinkingDelta(_Typed, tag="thinking_delta"):
    thinking: str


class AnthropicSignatureDelta(_Typed, tag="signature_delta"):
    signature: str


class AnthropicInputDelta(_Typed, tag="input_json_delta"):
    partial_json: str


AnthropicDelta = AnthropicTextDelta | AnthropicThinkingDelta | AnthropicSignatureDelta | AnthropicInputDelta


class AnthropicThinkingTokens(Written):
    thinking_tokens: Count


class AnthropicUsage(Written):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: AnthropicThinkingTokens | UnsetType = UNSET


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicStop(Written):
    """Why an answer has ended; None while it goes on."""

    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    schema_violation: str | UnsetType = UNSET


class AnthropicMessage(Written, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnthropicBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    schema_violation: str | UnsetType = UNSET
    usage: AnthropicUsage


class AnthropicMessageStart(_Typed, tag="message_start"):
    message: AnthropicMessage


class AnthropicPing(_Typed, tag="ping"):
    pass


class AnthropicBlockStart(_Typed, tag="content_block_start"):
    index: Count
    content_block: AnthropicBlock


class AnthropicBlockDelta(_Typed, tag="content_block_delta"):
    index: Count
    delta: AnthropicDelta


class AnthropicBlockStop(_Typed, tag="content_block_stop"):
    index: Count


class AnthropicMessageDelta(_Typed, tag="message_delta"):
    delta: AnthropicStop
    usage: AnthropicUsage


class AnthropicMessageStop(_Typed, tag="message_stop"):
    pass


AnthropicEvent = (
    AnthropicMessageStart
    | AnthropicPing
    | AnthropicBlockStart
    | AnthropicBlockDelta
    | AnthropicBlockStop
    | AnthropicMessageDelta
    | AnthropicMessageStop
)
