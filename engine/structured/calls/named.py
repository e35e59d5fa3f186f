"""Known forms of calls, found by words in a chat template, where renderings do not show the form.

| form | a call | models |
|---|---|---|
| Kimi K2 | `<|tool_call_begin|>functions.`name:0`<|tool_call_argument_begin|>`{...} | Kimi K2 of some months |
| Kimi K3 | `<|open|>`call tool="name" index="1"`<|sep|>`, arguments between tags with their types | Kimi K3 |
| MiniMax M3 | `]<]minimax[>[<invoke name="..">`, arguments as nested elements | MiniMax M3 |
| Granite 3 | `<|tool_call|>` [{"name": ..., "arguments": {...}}, ...] | Granite 3 |
| LFM 2 | `<|tool_call_start|>` [name(key='value', ...), ...] | LFM 2 |
| Mistral | `[TOOL_CALLS]` [{"name": ..., "arguments": {...}}, ...] | Mistral 7B v0.3, Nemo, Small 2501 |
| | `[TOOL_CALLS]`name`[ARGS]`{...}, some with `[CALL_ID]` and an id before `[ARGS]` | Small 3.2, Devstral, Magistral |
| Llama 3 | {"name": ..., "parameters": {...}}, or as `json_calls` after `<|python_tag|>` | Llama 3.1 to 3.3 |
| Hermes | `<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>` | Qwen 2.5 and 3, Hermes; any other |

gpt-oss writes calls as messages of its own form, which `harmony` has.
"""

from collections.abc import Mapping
from dataclasses import replace

from quengine.structured.calls.form import ID, INDEX, KEY, SEPARATED_TYPES, CallForm, ParameterForm
from quengine.structured.calls.format import GENERIC_FORM
from quengine.structured.calls.json_calls import PYTHON_TAG
from quengine.structured.calls.probe import Render, found_form, shows_tools, takes_system

_K3_TYPES = {"integer": "number"}
_MINIMAX = "]<]minimax[>["
MISTRAL_ID = 9
"""The length of an id that Mistral's templates accept: letters and digits."""

MARKED_FORMS: Mapping[str, CallForm] = {
    "<|end_of_msg|>": CallForm(
        head='<|open|>call tool="',
        middle=f'" index="{INDEX}"<|sep|>',
        tail="<|close|>call<|sep|>",
        open="<|open|>tools<|sep|>",
        close="<|close|>tools<|sep|>",
        index=1,
        parameters=ParameterForm(
            '<|open|>argument key="',
            {kind: f'" type="{_K3_TYPES.get(kind, kind)}"<|sep|>' for kind in (*SEPARATED_TYPES, "null")},
            "<|close|>argument<|sep|>",
        ),
        text_ends=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    _MINIMAX: CallForm(
        head=f'{_MINIMAX}<invoke name="',
        middle='">',
        tail=f"{_MINIMAX}</invoke>\n",
        open=f"{_MINIMAX}<tool_call>\n",
        close=f"{_MINIMAX}</tool_call>",
        parameters=ParameterForm(
            f"{_MINIMAX}<", dict.fromkeys(SEPARATED_TYPES, ">"), f"{_MINIMAX}</{KEY}>", item="item"
        ),
    ),
}
"""Forms by a text of the template; templates with such a text are not rendered."""

NAMED_FORMS: Mapping[str, CallForm] = {
    # Its template cannot be rendered with calls: it changes a list.
    "<|tool_calls_section_begin|>": CallForm(
        head="<|tool_call_begin|>functions.",
        middle=f":{INDEX}<|tool_call_argument_begin|>",
        tail="<|tool_call_end|>",
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
    ),
    # Its template tells the model of this form, and writes no calls.
    "<|tool_call|>": CallForm('{"name": "', '", "arguments": ', "}", "<|tool_call|>[", ", ", "]"),
    # Calls as Python writes them.
    "List of tools: ": CallForm(
        head="",
        middle="(",
        tail=")",
        open="<|tool_call_start|>[",
        separator=", ",
        close="]<|tool_call_end|>",
        parameters=ParameterForm("", dict.fromkeys(SEPARATED_TYPES, "="), "", ", ", quote="'"),
    ),
    "[CALL_ID]": CallForm("[TOOL_CALLS]", f"[CALL_ID]{ID}[ARGS]", "", id_length=MISTRAL_ID),
    "[ARGS]": CallForm("[TOOL_CALLS]", "[ARGS]", "", id_length=MISTRAL_ID),
    "[TOOL_CALLS]": CallForm(
        '{"name": "', '", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]", id_length=MISTRAL_ID
    ),
}
"""Forms by a text of the template, for templates whose renderings do not show the form."""

LLAMA_FORM = CallForm('{"name": "', '", "parameters": ', "}", several=False, python_tag=PYTHON_TAG)


def marked_form(source: str) -> CallForm | None:
    """The form of a template with one of the texts of MARKED_FORMS, else None."""
    return next((form for text, form in MARKED_FORMS.items() if text in source), None)


def template_form(source: str, render: Render) -> CallForm:
    """The form of a chat template.

    Args:
        source: its text. render: its `ChatTemplate.render`, which is called some ten times if necessary.
    """
    if (marked := marked_form(source)) is not None:
        return marked
    form = found_form(render)
    if form is None:
        form = next((form for text, form in NAMED_FORMS.items() if text in source), None)
        form = LLAMA_FORM if form is None and _is_llama(source) else form
        told = form is not None or _tells_generic(source)
        form = replace(form or GENERIC_FORM, writes_calls=False, shows_tools=told and shows_tools(render))
    elif not form.starts_marked and _is_llama(source):  # renderings show its bare JSON alone
        form = replace(form, python_tag=PYTHON_TAG)
    return replace(form, takes_system=form.shows_tools or takes_system(render))


def _is_llama(source: str) -> bool:
    return PYTHON_TAG in source or ("<|start_header_id|>" in source and '"parameters"' in source)


def _tells_generic(source: str) -> bool:
    """Whether a template describes the generic form. Others have parameters between the same tags."""
    return "<tool_call>" in source and "<function=" not in source and "<arg_key>" not in source
