"""What constrains or parses completions: response formats, grammars, tools.

A request that wants what the model cannot do is refused; nothing is answered without the constraint that was given.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from quengine.errors import EngineError
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.requests import Generation, TemplateRequest, Tools
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.tool_calls import ToolUse
from quengine.structured.tool_calls_format import ToolFormat

# llama-server's and vLLM's other names.
CONSTRAINTS: Mapping[str, Callable[[Any], ConstraintSpec | None]] = {
    "response_format": ConstraintSpec.from_response_format,
    "json_schema": ConstraintSpec.json_schema,
    "grammar": ConstraintSpec.grammar,
    "guided_json": ConstraintSpec.json_schema,
    "guided_regex": ConstraintSpec.regex,
    "guided_grammar": ConstraintSpec.grammar,
}


def read_constraint(body: Generation) -> ConstraintSpec | None:
    """response_format, json_schema, grammar, or vLLM's guided_*; at most one of them. Raises ApiError."""
    found: dict[str, ConstraintSpec] = {}
    try:
        for key, make in CONSTRAINTS.items():
            value = getattr(body, key)
            if value not in (None, "") and (spec := make(value)) is not None:
                found[key] = spec
        if body.guided_choice is not None:
            found["guided_choice"] = ConstraintSpec.regex("|".join(map(re.escape, body.guided_choice)))
    except EngineError as error:
        raise bad_request(str(error)) from None
    if len(found) > 1:
        raise bad_request(f"{' and '.join(found)}: only one of them can hold", next(iter(found)))
    return next(iter(found.values()), None)


def read_tools(body: Tools | TemplateRequest, model: ServedModel) -> ToolUse:
    """The tools of a request and how they are to be used. Raises ApiError where the model has no form of calls."""
    try:
        use = ToolUse.from_openai(body.tools, body.tool_choice, body.parallel_tool_calls)
    except EngineError as error:
        raise bad_request(str(error), "tools") from None
    if use.callable and model.tool_format is None:
        message = "tools: the chat template of this model has no known form of calls"
        raise bad_request(message, "tools", "unsupported")
    return use


def callable_format(use: ToolUse, model: ServedModel) -> ToolFormat | None:
    """How calls are written in answers of a request; None where none are looked for."""
    return model.tool_format if use.callable else None


def tool_constraint(use: ToolUse, model: ServedModel, other: ConstraintSpec | None) -> ConstraintSpec | None:
    """The constraint to calls where one is required, else `other`. Raises ApiError where both are given."""
    tool_format = callable_format(use, model)
    try:
        spec = None if tool_format is None else tool_format.constraint(use)
    except EngineError as error:
        raise bad_request(str(error), "tools") from None
    if spec is not None and other is not None:
        raise bad_request("tool_choice requires a call, and response_format something else", "tool_choice")
    return spec or other
