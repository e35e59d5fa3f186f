"""OpenAI's chats as they were before tools: `functions` and `function_call`, converted to tools and their calls.

Source: OpenAI's API reference, "chat completions", fields marked deprecated.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quengine.serve.schemas.canonical import ChatRequest, TemplateRequest
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.reading import shown


def with_tools(body: ChatRequest | TemplateRequest) -> tuple[Any, Any, bool | None]:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a body. Functions become tools, with one call per answer.

    Raises ApiError for a body that has both.
    """
    choice = body.function_call
    if isinstance(choice, dict) and isinstance(choice.get("name"), str):
        choice = {"type": "function", "name": choice["name"]}
    elif choice not in (None, "none", "auto"):
        wrong = (
            f"function_call = {shown(choice)}: must be none, auto or an object with the name of a function"
        )
        raise bad_request(wrong, "function_call", "invalid_value")
    if not body.functions:
        return body.tools, body.tool_choice, body.parallel_tool_calls
    if body.tools:
        raise bad_request("functions and tools: only one of them can hold", "functions", "invalid_value")
    return [{"type": "function", "function": each} for each in body.functions], choice, False


def with_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each `function_call` as a tool call, and the function's message after it as the tool's."""
    given: list[dict[str, Any]] = []
    waiting: str | None = None
    for number, message in enumerate(messages):
        call = message.get("function_call") if message.get("role") == "assistant" else None
        if isinstance(call, Mapping) and not message.get("tool_calls"):
            waiting = f"call_{number}"
            calls = [{"id": waiting, "type": "function", "function": call}]
            others = {key: value for key, value in message.items() if key != "function_call"}
            given.append({**others, "tool_calls": calls})
        elif message.get("role") == "function" and waiting is not None:
            given.append({**message, "role": "tool", "tool_call_id": waiting})
            waiting = None
        else:
            given.append(message)
    return given
