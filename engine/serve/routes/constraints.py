"""What constrains or parses completions: response formats, grammars, tools.

A request that wants what the model cannot do is refused; nothing is answered without the constraint that was given.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from quengine.errors import EngineError
from quengine.serve.http import off_loop
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.routes.old_functions import with_tools
from quengine.serve.schemas.canonical import ChatRequest, TemplateRequest
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.fields import Generation, Tools
from quengine.structured.answer_format import NO_CALLS, AnswerFormat
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.tool_calls import ToolUse

CONSTRAINTS: Mapping[str, Callable[[Any], ConstraintSpec | None]] = {
    "response_format": ConstraintSpec.from_response_format,
    "json_schema": ConstraintSpec.json_schema,
    "grammar": ConstraintSpec.grammar,
}
"""OpenAI's field, and llama-server's."""

GUIDED: Mapping[str, Callable[[Any], ConstraintSpec | None]] = {
    "json": ConstraintSpec.json_schema,
    "regex": ConstraintSpec.regex,
    "grammar": ConstraintSpec.grammar,
    "choice": lambda texts: ConstraintSpec.regex("|".join(map(re.escape, texts))),
    "json_object": lambda _: ConstraintSpec.json_object(),
}
"""vLLM's: guided_NAME, or NAME in structured_outputs."""


async def read_constraint(body: Generation) -> ConstraintSpec | None:
    """The one constraint of a request, by whichever of its names. Raises ApiError where there are several."""
    fields: list[tuple[str, object, str, Callable[[Any], ConstraintSpec | None]]]
    fields = [(key, body, key, make) for key, make in CONSTRAINTS.items()]
    fields += [(f"guided_{key}", body, f"guided_{key}", make) for key, make in GUIDED.items()]
    if body.structured_outputs is not None:
        fields += [
            (f"structured_outputs.{key}", body.structured_outputs, key, make) for key, make in GUIDED.items()
        ]
    given = [
        (name, partial(make, value))
        for name, holder, key, make in fields
        if (value := getattr(holder, key)) not in (None, "")
        and (value is not False or not key.endswith("json_object"))  # a schema may be `false`
    ]
    found = {name: spec for name, make in given if (spec := await off_loop(make)) is not None}
    if len(found) > 1:
        raise bad_request(f"{' and '.join(found)}: only one of them can hold", next(iter(found)))
    return next(iter(found.values()), None)


async def read_tools(body: Tools | TemplateRequest, model: ServedModel) -> ToolUse:
    """The tools of a request and how they are to be used. Raises ApiError where the model has no form of calls."""
    form = model.answer_format
    given = body.tools, body.tool_choice, body.parallel_tool_calls
    if isinstance(body, ChatRequest | TemplateRequest):
        given = with_tools(body)
    try:
        use = ToolUse.from_openai(*given)
    except EngineError as error:
        raise bad_request(str(error), "tools") from None
    if use.callable and not form.calls_tools:
        raise bad_request(NO_CALLS, "tools", "unsupported")
    if use.callable:
        await off_loop(
            lambda: form.shown(use)
        )  # the form is found when it is first needed, which takes a while
    return use


async def answer_constraint(
    use: ToolUse, model: ServedModel, text: ConstraintSpec | None, prompt: str = "", budget: int = -1
) -> ConstraintSpec | None:
    """The constraint of the answer: calls if one is required, else `text`. Raises ApiError for a required call together
    with a grammar.

    A JSON schema constrains text, and there is none if a call is required; clients send both. Schemas of tools take up
    to seconds to compile, so that happens in a thread.

    prompt: the prompt's end (`ServedModel.end_of`). budget: the most tokens of reasoning; -1: any number.
    """
    if use.choice == "required" and text is not None and text.kind != "JSON schema":
        raise bad_request(f"tool_choice requires a call, and the {text.kind} something else", "tool_choice")
    if text is None and not use.callable:
        return _held(model.answer_format, use, text, prompt, budget)
    return await asyncio.to_thread(_held, model.answer_format, use, text, prompt, budget)


def _held(
    form: AnswerFormat, use: ToolUse, text: ConstraintSpec | None, prompt: str, budget: int
) -> ConstraintSpec | None:
    try:
        spec = form.constraint(use, text, prompt)
    except EngineError as error:
        raise bad_request(str(error), "tools") from None
    try:
        return form.bounded(spec, prompt, budget)
    except EngineError as error:
        raise bad_request(str(error), "reasoning_budget", "unsupported") from None
