"""Anthropic's requests over plain HTTP: what each becomes for chat completions, and extreme values of every field."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from quengine.serve.apis.anthropic.chat_form import chat_request
from quengine.serve.apis.anthropic.content_blocks import ContentBlocks
from quengine.serve.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from quengine.serve.routes.prompts import ending_of, given_answer
from quengine.serve.schemas.canonical import ChatRequest
from quengine.serve.schemas.errors import ApiError
from quengine.serve.schemas.reading import read_body
from quengine.serve.settings import Limits
from quengine.structured.tool_calls import CallDelta, ReasoningDelta, TextDelta
from tests.engine.serve.serving import serving
from tests.engine.serve.speaking_engine import SpeakingModel, ThinkingModel

MODEL = SpeakingModel(4096)
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}, "caller": None}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}
HUGE = 18446744073709551616
LONG = 50_000 * "x"


def translated(model: SpeakingModel = MODEL, **more: Any) -> ChatRequest:
    raw = msgspec.json.encode({"max_tokens": 9, "messages": [USER], **more})
    return chat_request(read_body(MessagesRequest, raw), model, Limits())


def test_turns_become_messages() -> None:
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me see.", "citations": None},
        CALL,
        {**CALL, "id": "t2"},
    ]
    results = [
        {**RESULT, "content": "seen"},
        {**RESULT, "tool_use_id": "t2", "is_error": True, "content": [{"type": "text", "text": "gone"}]},
        {"type": "text", "text": "Go on."},
    ]
    turns = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    body = translated(messages=turns, system=[{"type": "text", "text": "Be kind."}], stop_sequences=["x"])
    function = {"name": "look", "arguments": {"at": 1}}
    assert body.messages == [
        {"role": "system", "content": "Be kind."},
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": key, "type": "function", "function": function} for key in ("t1", "t2")],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "look", "content": "seen"},
        {"role": "tool", "tool_call_id": "t2", "name": "look", "content": "gone"},
        {"role": "user", "content": "Go on."},
    ]
    assert (body.max_tokens, body.stop) == (9, ["x"])


def test_claude_codes_header_is_no_part_of_the_prompt() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.551; cch=3f0a1;"}
    rules = {"type": "text", "text": "You are an agent."}
    assert translated(system=[header, rules]).messages[0] == {"role": "system", "content": rules["text"]}
    assert translated(system=[header]).messages == translated().messages


def test_documents_and_search_results_are_their_text() -> None:
    text = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    parts = {"type": "content", "content": [{"type": "text", "text": "It snows."}]}
    found = {"type": "search_result", "source": "u", "title": "T", "content": [{"type": "text", "text": "x"}]}
    asked = [
        {"type": "document", "title": "Weather", "source": text, "citations": {"enabled": True}},
        {"type": "document", "context": "of today", "source": parts},
        found,
    ]
    said = {"role": "assistant", "content": [CALL]}
    result = {"role": "user", "content": [{**RESULT, "content": [asked[0], found]}]}
    question, _, answer = translated(messages=[{"role": "user", "content": asked}, said, result]).messages
    assert question["content"] == "Weather\nIt rains.\nof today\nIt snows.\nT\nu\nx"
    assert answer["content"] == "Weather\nIt rains.\nT\nu\nx"
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
    with pytest.raises(ApiError, match="base64"):
        translated(messages=[{"role": "user", "content": [pdf]}])


def test_turns_of_one_role_are_one_message() -> None:
    said = {"role": "assistant", "content": [CALL]}
    turns = [USER, USER, {"role": "assistant", "content": "a"}, said, {"role": "user", "content": [RESULT]}]
    first, second, result = translated(messages=turns).messages
    assert (first["content"], second["content"], result["content"]) == ("hi\nhi", "a", "")
    assert [call["id"] for call in second["tool_calls"]] == ["t1"]


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, True),
        ({"type": "none"}, "none", True),
    ],
)
def test_tools_and_their_choice(choice: dict[str, Any], expected: object, parallel: bool) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "strict": True, "type": None}
    body = translated(tools=[tool], tool_choice=choice)
    function = {"name": "f", "description": "", "parameters": {"type": "object"}}
    assert body.tools == [{"type": "function", "function": function}]
    assert (body.tool_choice, body.parallel_tool_calls) == (expected, parallel)


def test_thinking_and_effort_reach_the_template_as_it_takes_them() -> None:
    assert translated(output_config={"effort": "max"}).reasoning_effort == "high"
    assert translated(output_config={"effort": "low"}).reasoning_effort == "low"
    without = SpeakingModel(4096)
    without.template = "{% if enable_thinking %}"
    assert translated(without, output_config={"effort": "high"}).reasoning_effort is None
    for kind, expected in (("enabled", True), ("disabled", False), ("adaptive", None)):
        assert translated(ThinkingModel(4096), thinking={"type": kind}).enable_thinking is expected
        assert translated(thinking={"type": kind}).enable_thinking is None, (
            "it has an effort, and always reasons"
        )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"messages": [{"role": "user", "content": [RESULT]}]}, r"tool_use_id = 't1': no tool_use before"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "tool"}}, r"tool_choice\.name is missing"),
        ({"stop_sequences": 17 * ["a"]}, "stop_sequences: 17 given, this server takes at most 16"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"mcp_servers": [{}]}, "runs no tools"),
    ],
)
def test_what_is_wrong_is_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        translated(**more)
    assert caught.value.status == 400 and "\n" not in caught.value.message


def test_a_last_turn_of_the_assistants_is_continued() -> None:
    request = translated(
        messages=[USER, {"role": "assistant", "content": [{"type": "text", "text": "Well,"}]}]
    )
    ending = ending_of(request.messages, request.add_generation_prompt, request.continue_final_message)
    assert (ending, given_answer(request.messages, ending)) == ("continued", "Well,")


def test_blocks_of_one_kind_are_apart_and_an_empty_answer_has_one() -> None:
    content = ContentBlocks(thinking=True)
    said = [TextDelta("a"), CallDelta(0, '{"x": ', "c1", "f"), CallDelta(0, "1}"), TextDelta("\n\nb")]
    events = msgspec.to_builtins(content.take([ReasoningDelta("t"), *said]) + content.finish())
    blocks = msgspec.to_builtins(content.blocks)
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "text"]
    assert (blocks[2]["input"], blocks[3]["text"]) == ({"x": 1}, "b")
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2, 3]
    empty = ContentBlocks(thinking=False)
    assert not empty.take([ReasoningDelta("t")])
    assert [event["type"] for event in msgspec.to_builtins(empty.finish())] == [
        "content_block_start",
        "content_block_stop",
    ]


WRONG: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("model", (1, "other", ["fake"], LONG)),
    ("messages", ([], {}, "hi", [1], [{}], [{"role": "tool", "content": "a"}], [{"role": "user"}])),
    ("messages", ([{"role": "user", "content": [{"type": "text", "text": 1}]}],)),
    ("messages", ([{"role": "assistant", "content": [{**CALL, "input": "{}"}]}, USER],)),
    ("system", (1, {}, [{"type": "image"}], [1])),
    ("max_tokens", (0, -1, HUGE, 1.5, "9", True, [])),
    ("stop_sequences", ("a", [""], [1], 17 * ["a"])),
    ("temperature", (-1, 1e308, "hot", [], True)),
    ("top_p", (-0.5, 1.5, HUGE, "1")),
    ("top_k", (-2, HUGE, 1.5, "1")),
    ("stream", (1, "true", [])),
    ("tools", ({}, "a", [1], [{}], [{"name": "f"}], [{"name": "", "input_schema": {}}], 129 * [{}])),
    ("tools", ([{"name": LONG, "input_schema": {}}], [{"name": "f", "input_schema": []}])),
    ("tools", (2 * [{"name": "f", "input_schema": {}}], [{"type": "bash_20250124", "name": "bash"}])),
    (
        "tool_choice",
        ("auto", {}, {"type": "all"}, {"type": "tool", "name": 1}, {"type": "tool", "name": "f"}),
    ),
    ("tool_choice", ({"type": "auto", "disable_parallel_tool_use": 1},)),
    ("thinking", ("enabled", {}, {"type": "on"}, {"type": "enabled", "budget_tokens": "9"})),
    ("thinking", ({"type": "enabled", "budget_tokens": 0}, {"type": "adaptive", "display": 1})),
    ("output_config", ("low", {"effort": "huge"}, {"format": {"type": "text"}}, {"format": {}})),
    ("output_config", ({"format": {"type": "json_schema", "schema": 7}},)),
    ("mcp_servers", ([{}], "a")),
)
COUNTED = CountTokensRequest.__struct_fields__
RAW = ("NaN", "1e999", "-Infinity", '"\\ud800"', 200 * "[" + 200 * "]", "1" + 5000 * "0")
"""Values that no JSON of another field may hold either."""


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving(settings={"strict_model": True}) as served, served.http() as made:
        yield made


def check_refused(answer: httpx.Response, what: object) -> None:
    assert answer.status_code in (400, 404), (what, answer.text[:300])
    body = answer.json()
    assert body["type"] == "error" and len(body["error"]["message"]) < 1000, what
    assert body["error"]["type"] in ("invalid_request_error", "not_found_error"), what


@pytest.mark.parametrize(
    ("path", "field", "values"),
    [("/v1/messages", *wrong) for wrong in WRONG]
    + [("/v1/messages/count_tokens", *wrong) for wrong in WRONG if wrong[0] in COUNTED],
)
def test_a_wrong_value_is_a_400(http: httpx.Client, path: str, field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        answer = http.post(path, json={"messages": [USER], "max_tokens": 3, field: value})
        check_refused(answer, (field, value))


def test_what_json_cannot_hold_is_a_400_in_any_field(http: httpx.Client) -> None:
    for field in MessagesRequest.__struct_fields__:
        for value in RAW:
            members = {"messages": json.dumps([USER]), "max_tokens": "3", field: value}
            raw = ", ".join(f'"{key}": {text}' for key, text in members.items())
            check_refused(http.post("/v1/messages", content=f"{{{raw}}}"), (field, value[:20]))


def test_other_statuses_have_the_form_too(http: httpx.Client) -> None:
    wrong_method, missing = http.get("/v1/messages"), http.post("/v1/messages/batches", json={})
    assert [answer.status_code for answer in (wrong_method, missing)] == [405, 404]
    assert {answer.json()["type"] for answer in (wrong_method, missing)} == {"error"}
    assert missing.json()["error"]["type"] == "not_found_error"
    assert "type" not in http.get("/v1/nothing").json(), "other paths have OpenAI's"
