"""Tools that are no functions, and the text that a custom tool is called with."""

import json

import pytest

from quengine.serve.apis.openai.responses.tools import CustomInput, offered_tools

LOOK = {"type": "function", "name": "look", "parameters": None}
EDIT = {"type": "custom", "name": "edit", "description": "Edits."}
TEXTS = ["", "plain", 'a "quoted" \\ line\nand\ttab', "é 😀 \u2028", "\x00\x1f", "\\u0041 is no escape"]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("escape", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_a_custom_input_is_the_string_however_it_is_cut(text: str, escape: bool, size: int) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=escape)
    read = CustomInput()
    pieces = [read.push(arguments[n : n + size]) for n in range(0, len(arguments), size)]
    assert "".join([*pieces, read.finish()]) == read.text == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("*** Begin Patch", "*** Begin Patch"),
        ('"a\\nb"', "a\nb"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"x": 1, "input": "a"}', "a"),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "cut \\ud83d', "cut "),
        ('{"input": 3}', '{"input": 3}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_what_is_no_string_is_the_text_itself(arguments: str, text: str) -> None:
    read = CustomInput()
    read.push(arguments)
    read.finish()
    assert read.text == text


def test_tools_of_other_types_are_skipped_with_a_note() -> None:
    notes: list[str] = []
    given = [LOOK, {"type": "local_shell"}, EDIT, {"type": "web_search", "filters": None}]
    offered = offered_tools(given, "auto", notes)
    assert [function["name"] for function in offered.functions] == ["look", "edit"]
    assert offered.functions[1]["parameters"]["required"] == ["input"]
    assert notes == ['tools[1] skipped: "local_shell"', 'tools[3] skipped: "web_search"']


def test_the_grammar_of_a_custom_tool_is_shown_to_the_model() -> None:
    notes: list[str] = []
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    (function,) = offered_tools([{**EDIT, "format": form}], None, notes).functions
    assert function["description"] == "Edits.\n\nThe input is text of this lark grammar:\nstart: /a+/"
    assert len(notes) == 1


def test_choices_name_functions_custom_tools_and_subsets() -> None:
    both = [LOOK, EDIT]
    assert offered_tools(both, {"type": "custom", "name": "edit"}, []).choice == {
        "type": "function",
        "name": "edit",
    }
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "edit"}]}
    offered = offered_tools(both, allowed, [])
    assert offered.choice == "required" and [each["name"] for each in offered.functions] == ["edit"]
    nested = {"type": "function", "function": {"name": "look"}}
    assert offered_tools([nested], {**allowed, "tools": [nested]}, []).functions == [nested]
