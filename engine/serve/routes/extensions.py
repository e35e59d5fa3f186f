"""What constrains or parses texts, as requests ask for it: response formats, grammars, tools.

A request that asks for what the model cannot do is refused; nothing is answered without the constraint that was
asked for.
"""

import re

from quengine.errors import EngineError
from quengine.serve.processes.shared_engine import ServedModel
from quengine.serve.schemas.errors import ApiError, bad_request
from quengine.serve.schemas.fields import Fields
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.tool_calls import ToolUse
from quengine.structured.tool_calls_format import ToolFormat

# llama-server's and vLLM's other names.
CONSTRAINTS = {
    "json_schema": ConstraintSpec.json_schema,
    "grammar": ConstraintSpec.grammar,
    "guided_json": ConstraintSpec.json_schema,
    "guided_regex": ConstraintSpec.regex,
    "guided_grammar": ConstraintSpec.grammar,
}


def read_constraint(fields: Fields) -> ConstraintSpec | None:
    """What the text has to be: response_format, json_schema, grammar, or vLLM's guided_*; one of them at most.

    Raises ApiError.
    """
    found: dict[str, ConstraintSpec] = {}
    for key in ("guided_decoding_backend", "structured_outputs", "grammar_triggers"):
        fields.neutral(key)
    fields.neutral("grammar_lazy", False)
    try:
        spec = ConstraintSpec.from_response_format(fields.any("response_format"))
        if spec is not None:
            found["response_format"] = spec
        for key, make in CONSTRAINTS.items():
            value = fields.any(key)
            if value not in (None, ""):
                found[key] = make(value)
        choices = fields.array("guided_choice")
        if choices is not None:
            if any(not isinstance(choice, str) or not choice for choice in choices):
                raise fields.wrong("guided_choice", "must be texts of at least one character")
            found["guided_choice"] = ConstraintSpec.regex("|".join(map(re.escape, choices)))
    except EngineError as error:
        raise bad_request(str(error)) from None
    if len(found) > 1:
        raise bad_request(f"{' and '.join(found)}: only one of them can hold", next(iter(found)))
    return next(iter(found.values()), None)


def read_tools(fields: Fields, model: ServedModel) -> ToolUse:
    """The tools of a chat request and how they are to be used. Raises ApiError where the model knows no calls."""
    for key in ("functions", "function_call"):
        fields.neutral(key, [], "none")
    fields.ignore("parse_tool_calls")
    try:
        use = ToolUse.from_openai(
            fields.any("tools"), fields.any("tool_choice"), fields.any("parallel_tool_calls")
        )
    except EngineError as error:
        raise bad_request(str(error), "tools") from None
    if use.callable and model.tool_format is None:
        raise ApiError(
            400,
            "tools: the chat template of this model has no known form of calls",
            param="tools",
            code="unsupported",
        )
    return use


def callable_format(use: ToolUse, model: ServedModel) -> ToolFormat | None:
    """How calls are written in answers of a request; None where none are looked for."""
    return model.tool_format if use.callable else None


def tool_constraint(use: ToolUse, model: ServedModel, other: ConstraintSpec | None) -> ConstraintSpec | None:
    """What holds the text to calls where one is required, else `other`. Raises ApiError where both are asked for."""
    tool_format = callable_format(use, model)
    try:
        spec = None if tool_format is None else tool_format.constraint(use)
    except EngineError as error:
        raise bad_request(str(error), "tools") from None
    if spec is not None and other is not None:
        raise bad_request("tool_choice requires a call, and response_format something else", "tool_choice")
    return spec or other
