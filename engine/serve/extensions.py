"""The seam for what constrains or parses texts: response formats, grammars, tools.

Until they are there, a request that needs one is refused and says so; nothing is answered without the constraint
that was asked for.
"""

from typing import Any

from quengine.serve.errors import ApiError
from quengine.serve.fields import Fields

_CONSTRAINTS = (
    "grammar",
    "json_schema",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "regex",
    "ebnf",
)


def refuse_constraints(fields: Fields) -> None:
    """Raises ApiError for a request that wants its text to follow a schema or grammar."""
    wanted = fields.object("response_format")
    if wanted is not None and wanted.get("type") != "text":
        raise _missing("response_format", f"response_format {str(wanted.get('type'))[:40]!r}")
    for key in _CONSTRAINTS:
        if fields.any(key) not in (None, "", {}):
            raise _missing(key, key)
    fields.ignore("grammar_lazy", "grammar_triggers")


def refuse_tools(fields: Fields) -> None:
    """Raises ApiError for a request whose answer may be tool calls."""
    tools: Any = fields.array("tools")
    if tools and fields.any("tool_choice") != "none":
        raise _missing("tools", "tools")
    if fields.any("tool_choice") not in (None, "none", "auto"):
        raise _missing("tool_choice", "tool_choice without tools")
    fields.neutral("functions", [])
    fields.neutral("function_call", "none")
    fields.ignore("parallel_tool_calls", "parse_tool_calls")


def _missing(key: str, what: str) -> ApiError:
    return ApiError(400, f"{what}: this server cannot do that yet", param=key, code="unsupported")
