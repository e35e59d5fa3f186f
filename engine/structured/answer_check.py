"""Whether a finished answer, its text or its tool calls, is valid under the schemas that it was held to."""

from collections.abc import Sequence

from quengine.structured.calls.form import arguments_expression
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.schema_check import schema_violation
from quengine.structured.tool_calls import ToolCall, ToolUse


def answer_violation(
    spec: ConstraintSpec | None, use: ToolUse | None, text: str, calls: Sequence[ToolCall] = ()
) -> str | None:
    """What of a finished answer is not valid under the schemas that it was held to, in one line; None where all is.

    Args:
        spec: the request's constraint.
        use: its tools; the arguments of calls are checked where calls were required.
        text: the answer's text, without its reasoning.
        calls: its calls.
    """
    if use is not None and use.choice == "required":
        tools = {tool.name: tool for tool in use.callable}
        for call in calls:
            if call.name not in tools:
                continue
            wrong = schema_violation(arguments_expression(tools[call.name]).standard, call.arguments)
            if wrong is not None:
                return f"{call.name}: {wrong}"
        return None
    return schema_violation(spec.schema, text) if spec is not None else None
