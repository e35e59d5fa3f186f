"""Translates Anthropic's requests into chat completions with the same prompt and answer.

| Anthropic's | chat completions' |
|---|---|
| `system`, text blocks | system messages, `content` joined by line breaks |
| Claude Code's `x-anthropic-billing-header` in `system` | nothing |
| `thinking` blocks of earlier answers | `reasoning_content`, of which the template takes what it needs |
| `tool_use`, `tool_result` | `tool_calls`, messages of role tool |
| consecutive turns of one role | one message |
| a last turn of the assistant's | the answer's beginning, which is continued |
| `tool_choice` any, tool | required, a named function |
| `thinking` | `enable_thinking`; left out where the model has an effort |
| `output_config` | `reasoning_effort`, `response_format` |
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quengine.serve.apis.anthropic.schemas import (
    AnyChoice,
    AssistantBlock,
    AssistantTurn,
    CountTokensRequest,
    CustomTool,
    DocumentBlock,
    ImageBlock,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    Passage,
    SearchResultBlock,
    SystemTurn,
    TextBlock,
    TextSource,
    Thinking,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.routes.prompts import content_text
from quengine.serve.schemas.canonical import ChatRequest
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.fields import Effort, Sampling
from quengine.serve.schemas.messages import TextContent
from quengine.serve.settings import Limits

Message = dict[str, Any]

_BILLING_HEADER = "x-anthropic-billing-header:"

_EFFORTS: Mapping[str, Effort] = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


def chat_request(body: CountTokensRequest, model: ServedModel, limits: Limits) -> ChatRequest:
    """The chat request. Raises ApiError for turns that are no conversation, and for a tool choice without its tool."""
    given: dict[str, Any] = {name: getattr(body, name) for name in Sampling.__struct_fields__}
    if isinstance(body, MessagesRequest):
        given |= {"max_tokens": body.max_tokens, "stream": body.stream, "stop": _stops(body, limits)}
    choice, config = body.tool_choice, body.output_config
    if config.format is not None:
        schema = {"schema": config.format.schema}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    return ChatRequest(
        **given,
        messages=_system(body.system) + _messages(body.messages),
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=None if choice is None else _tool_choice(choice, body.tools or ()),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        reasoning_effort=_effort(config.effort, model),
        enable_thinking=_thinking(body.thinking, model),
    )


def _stops(body: MessagesRequest, limits: Limits) -> list[str] | None:
    if body.stop_sequences and len(body.stop_sequences) > limits.stops:
        raise bad_request(
            f"stop_sequences: {len(body.stop_sequences)} given, this server takes at most {limits.stops} (--max-stops)",
            "stop_sequences",
            "over_limit",
        )
    return body.stop_sequences


def _system(content: TextContent | None) -> list[Message]:
    """The system message, without Claude Code's header block. The block may differ in each request; at the beginning of
    the prompt it would keep a conversation from being found in the prefix cache."""
    if isinstance(content, list):
        content = [part for part in content if not part.text.startswith(_BILLING_HEADER)]
    return [{"role": "system", "content": text}] if (text := content_text(content)) else []


def _messages(turns: Sequence[Turn]) -> list[Message]:
    messages: list[Message] = []
    called: dict[str, str] = {}
    for i, turn in enumerate(turns):
        if isinstance(turn, SystemTurn):
            messages.append({"role": "system", "content": content_text(turn.content)})
        elif isinstance(turn, AssistantTurn):
            said = [TextBlock(turn.content)] if isinstance(turn.content, str) else turn.content
            called |= {block.id: block.name for block in said if isinstance(block, ToolUseBlock)}
            messages.append(_answer(said))
        else:
            asked = [TextBlock(turn.content)] if isinstance(turn.content, str) else turn.content
            for j, block in enumerate(asked or [TextBlock("")]):
                messages.append(_question(block, called, f"messages[{i}].content[{j}]"))
    return _joined(messages)


def _answer(blocks: Sequence[AssistantBlock]) -> Message:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    return {
        "role": "assistant",
        "content": "\n".join(texts),
        **({"reasoning_content": "\n\n".join(thoughts)} if thoughts else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": block.input},
    }


def _question(block: Passage | ToolResultBlock, called: Mapping[str, str], at: str) -> Message:
    if not isinstance(block, ToolResultBlock):
        return {"role": "user", "content": _content([block])}
    key = block.tool_use_id
    if key not in called:
        raise bad_request(
            f"{at}.tool_use_id = {key[:40]!r}: no tool_use before it has this id", "messages", "invalid_value"
        )
    given = block.content or ""
    content = given if isinstance(given, str) else _content(given)
    return {"role": "tool", "tool_call_id": key, "name": called[key], "content": content}


def _content(blocks: Sequence[Passage]) -> str | list[dict[str, Any]]:
    """The content of blocks: a text, or a list of parts where one of them is an image."""
    if not any(isinstance(block, ImageBlock) for block in blocks):
        return "\n".join(_passage(block) for block in blocks if not isinstance(block, ImageBlock))
    return [
        {"type": "image_url", "image_url": {"url": block.url}}
        if isinstance(block, ImageBlock)
        else {"type": "text", "text": _passage(block)}
        for block in blocks
    ]


def _passage(block: TextBlock | DocumentBlock | SearchResultBlock) -> str:
    """The text of a block; that of a document or a search result begins with its name."""
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join((block.title, block.source, content_text(block.content)))
    source = block.source
    text = source.data if isinstance(source, TextSource) else content_text(source.content)
    return "\n".join(filter(None, (block.title, block.context, text)))


def _joined(messages: Sequence[Message]) -> list[Message]:
    """The messages, with successive ones of one role, user or assistant, joined into one."""
    joined: list[Message] = []
    for message in messages:
        last: Message = joined[-1] if joined else {"role": None}
        if message["role"] != last["role"] or message["role"] not in ("user", "assistant"):
            joined.append(message)
            continue
        contents = [each["content"] for each in (last, message) if each["content"]]
        joined[-1] = {**last, **message, "content": _together(contents)}
        if calls := last.get("tool_calls", []) + message.get("tool_calls", []):
            joined[-1]["tool_calls"] = calls
    return joined


def _together(contents: Sequence[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """The contents of several messages, joined into one."""
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return "\n".join(texts)
    return [
        part
        for each in contents
        for part in ([{"type": "text", "text": each}] if isinstance(each, str) else each)
    ]


def _tool(tool: CustomTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice, tools: Sequence[CustomTool]) -> Any:
    if isinstance(choice, NamedChoice):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AnyChoice) and not tools:
        raise bad_request("tool_choice.type = any: there are no tools", "tool_choice")
    if isinstance(choice, NoChoice):
        return "none"
    return "required" if isinstance(choice, AnyChoice) else "auto"


def _effort(effort: str | None, model: ServedModel) -> Effort | None:
    """The template's effort for Anthropic's `effort`; None where the template has no efforts, or not this one."""
    if effort is None or "reasoning_effort" not in (model.template or ""):
        return None
    known, nearest = model.answer_format.efforts, _EFFORTS[effort]
    return nearest if known is None or nearest in known else None


def _thinking(thinking: Thinking | None, model: ServedModel) -> bool | None:
    """Whether to reason; None: as the model decides, for adaptive thinking or where only an effort changes it."""
    if (
        thinking is None
        or thinking.type not in ("enabled", "disabled")
        or model.answer_format.efforts is not None
    ):
        return None
    return thinking.type == "enabled"
