"""/v1/responses with tools: items in, items out, whole and as events; the order in which an answer's items grow."""

import json
from collections.abc import Iterator

import jsonschema
import openai
import pytest
from msgspec import UNSET

from quengine.serve.apis.openai.responses.input_items import messages_of
from quengine.serve.apis.openai.responses.output_items import OutputItems
from quengine.serve.apis.openai.schemas import OutputItem
from quengine.serve.schemas.errors import ApiError
from quengine.structured.calls.format import GENERIC_FORM
from quengine.structured.calls.parser import CallFormParser
from tests.engine.serve.serving import Served
from tests.engine.serve.tool_model import SCHEMA, serving_tools

TOOL = {"type": "function", "name": "look", "parameters": SCHEMA}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"ok": true}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "seen"}
ANSWER = (
    'Let me see. <tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"a": 2}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_tools(tmp_path_factory.mktemp("responses")) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI, stream: bool) -> None:
    given = {"model": "tiny", "input": "hi", "tools": [TOOL], "tool_choice": "required", "stream": stream}
    given |= {"text": {"format": {"type": "json_object"}}}  # of text, of which there is none
    given |= {"max_output_tokens": 300, "extra_body": {"seed": 3}, "parallel_tool_calls": False}
    answer = client.responses.create(**given)  # type: ignore[call-overload]
    if stream:
        events = list(answer)
        kinds = [event.type for event in events]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert kinds[-3:] == [
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == events[-3].arguments
        answer = events[-1].response
        assert events[-2].item == answer.output[0]
    (call,) = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "look", "completed")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert answer.status == "completed" and answer.tool_choice == "required"
    assert answer.tools[0].name == "look" and answer.tools[0].parameters == SCHEMA


def test_a_custom_tool_is_called_with_text(client: openai.OpenAI) -> None:
    edit = {"type": "custom", "name": "edit", "description": "Edits.", "format": {"type": "text"}}
    choice = {"type": "custom", "name": "edit"}
    given = {
        "model": "tiny",
        "input": "hi",
        "tools": [TOOL, edit],
        "tool_choice": choice,
        "max_output_tokens": 60,
    }
    *events, last = client.responses.create(**given, stream=True)  # type: ignore[call-overload]
    (call,) = last.response.output
    assert (call.type, call.name) == ("custom_tool_call", "edit")
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input
    assert last.response.tools[1].model_dump(exclude_unset=True) == edit
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    given |= {"previous_response_id": last.response.id, "input": [output], "tool_choice": "auto"}
    answer = client.responses.create(**given)  # type: ignore[call-overload]
    assert answer.usage.input_tokens > last.response.usage.input_tokens


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="tiny", input="hi", tools=[TOOL], tool_choice="required", max_output_tokens=300
    )  # type: ignore[call-overload]
    call = first.output[0]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
    items = [{"role": "user", "content": "hi"}, call.model_dump(), output]
    answer = client.responses.create(model="tiny", input=items, tools=[TOOL], max_output_tokens=3)  # type: ignore[call-overload]
    assert answer.usage is not None and answer.usage.input_tokens > first.usage.input_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": ["look"]},
        {"tools": [{"name": "look"}]},
        {"tools": [{"type": "custom"}]},
        {"tools": [{"type": "custom", "name": "a b"}]},
        {"tools": [{"type": "custom", "name": "look"}, TOOL]},
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "web_search"}},
        {"tools": [TOOL], "tool_choice": {"type": "custom", "name": "other"}},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "any", "tools": [TOOL]}},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 3}},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
        {"tool_choice": "required"},
        {"text": {"format": {"type": "json_object"}}, "grammar": 'root ::= "a"'},
        {"input": [{"type": "reasoning", "summary": []}]},
        {"input": [{"type": "web_search_call"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        {"input": [{"type": "reasoning", "content": [{"type": "image"}]}]},
        {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "look"}]},
        {"input": [{"type": "local_shell_call", "action": {}}]},
        {"input": [{"type": 7}]},
        {"background": True},
        {"truncation": "middle"},
        {"max_tool_calls": 0},
        {"metadata": {"a": 1}},
        {"metadata": {str(n): "" for n in range(17)}},
        {"include": "reasoning.encrypted_content"},
        {"reasoning": {"summary": "long"}},
        {"text": {"verbosity": "none"}},
        {"input": [OUTPUT]},
        {"input": [{**CALL, "arguments": {"ok": True}}]},
        {"input": [CALL, {"type": "function_call_output", "call_id": "c1"}]},
        {"input": [{**CALL, "arguments": "not JSON"}, OUTPUT]},
    ],
    ids=str,
)
def test_what_is_wrong_with_tools_or_items_is_a_400(client: openai.OpenAI, extra: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={"input": "hi", **extra}, cast_to=object)
    assert "\n" not in caught.value.body["message"]  # type: ignore[index]


def test_items_of_an_input_become_messages() -> None:
    said = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": "wait"}
    second = {**CALL, "call_id": "c2", "id": "fc_1", "status": "completed"}
    parts = {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b"}]}
    messages = messages_of([{"role": "user", "content": "hi"}, said, CALL, second, OUTPUT, parts, CALL])
    function = {"name": "look", "arguments": '{"ok": true}'}
    calls = [{"id": key, "type": "function", "function": function} for key in ("c1", "c2")]
    assert messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "wait", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "seen"},
        {"role": "tool", "tool_call_id": "c2", "name": "look", "content": "b"},
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
    ]


def test_a_refusal_is_what_was_said() -> None:
    part = {"type": "refusal", "refusal": "No."}
    assert messages_of([{"role": "assistant", "content": [part]}]) == [
        {"role": "assistant", "content": "No."}
    ]


def test_a_wrong_item_is_named_by_its_place() -> None:
    with pytest.raises(ApiError, match=r"input\[1\]\.content is missing"):
        messages_of([{"role": "user", "content": "a"}, {"role": "user"}])


def text_of(item: OutputItem) -> str:
    assert item.content
    return item.content[0].text


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_text_and_calls_are_items_in_their_order_however_the_text_is_cut(size: int) -> None:
    output, parser = OutputItems(), CallFormParser(GENERIC_FORM, (), iter(["c1", "c2"]).__next__)
    cut = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    events = [event for text in cut for event in output.take(parser.push(text))]
    events += output.take(parser.finish()) + output.finish(cut=False)
    assert [item.type for item in output.items] == ["message", "function_call", "function_call"]
    assert [item.arguments for item in output.items] == [UNSET, '{"a": 1}', '{"a": 2}']
    assert text_of(output.items[0]) == "Let me see."
    assert {item.status for item in output.items} == {"completed"}
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == output.items
    for index, item in enumerate(output.items):
        joined = "".join(e.delta for e in events if e.delta and e.output_index == index)
        assert joined == (item.arguments or text_of(item))


def test_an_answer_cut_in_a_call_is_incomplete_and_an_empty_one_is_a_message() -> None:
    output, parser = OutputItems(), CallFormParser(GENERIC_FORM, (), lambda: "c1")
    output.take(parser.push(ANSWER[:60]) + parser.finish())
    output.finish(cut=True)
    assert [item.status for item in output.items] == ["completed", "incomplete"]
    assert output.items[1].arguments == '{"a": '
    kinds = [event.type.removeprefix("response.") for event in OutputItems().finish(cut=False)]
    assert kinds == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
