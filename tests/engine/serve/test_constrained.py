"""Schemas, grammars and tools through the server, in front of a tiny model whose words are random: only what holds
its text can make it JSON."""

import ast
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import ollama
import openai
import pytest

from quengine.serve.routes import constraints
from quengine.structured.constraint_spec import ConstraintSpec
from tests.engine.serve.serving import Served
from tests.engine.serve.tool_model import SCHEMA, serving_tools
from tests.llama_cpp_source import llama_cpp_source

MESSAGES = [{"role": "user", "content": "the cat"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_tools(tmp_path_factory.mktemp("constrained")) as running:
        yield running


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("seed", [1, 2])
def test_a_chat_answer_is_valid_under_its_schema(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format=FORMAT,
        seed=seed,
        max_tokens=200,  # type: ignore[arg-type]
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"


def test_responses_and_native_completions_are_held_too(served: Served, client: openai.OpenAI) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    answer = client.responses.create(model="tiny", input="hi", text=text, max_output_tokens=200)  # type: ignore[arg-type]
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    with served.http() as http:
        body = {"prompt": "the", "n_predict": 200, "seed": 1}
        by_schema = http.post("/completion", json=body | {"json_schema": SCHEMA}).json()
        jsonschema.validate(json.loads(by_schema["content"]), SCHEMA)
        by_grammar = http.post("/completion", json=body | {"grammar": 'root ::= "yes" | "no"'}).json()
        assert by_grammar["content"] in ("yes", "no")
        guided = http.post("/v1/completions", json={"prompt": "the", "guided_choice": ["a.b", "c d"]}).json()
        assert guided["choices"][0]["text"] in ("a.b", "c d")


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"json": SCHEMA}, r"\{.*\}"),
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"choice": ["a.b", "c d"]}, r"a\.b|c d"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json_object": True}, r"\{.*\}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_structured_outputs_and_guided_fields_hold_the_answer_as_with_vllm(
    served: Served, wanted: dict[str, object], pattern: str
) -> None:
    ((name, value),) = wanted.items()
    with served.http() as http:
        for fields in ({"structured_outputs": wanted}, {f"guided_{name}": value}):
            body = {"prompt": "the", "seed": 1, "max_tokens": 200, **fields}
            said = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
            assert re.fullmatch(pattern, said, re.DOTALL), (fields, said)


def llama_servers_cases(test: str) -> list[tuple[object, ...]]:
    """What a test of llama-server's own is parametrized with."""
    file = llama_cpp_source() / "tools/server/tests/unit/test_chat_completion.py"
    (function,) = (
        part
        for part in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(part, ast.FunctionDef) and part.name == test
    )
    (parametrize,) = (part for part in function.decorator_list if isinstance(part, ast.Call))
    cases: list[tuple[object, ...]] = ast.literal_eval(parametrize.args[1])
    return cases


def test_response_formats_mean_what_they_mean_to_llama_server(served: Served) -> None:
    cases = llama_servers_cases("test_completion_with_response_format")
    assert len(cases) >= 8
    with served.http() as http:
        for response_format, _, content in cases:
            body = {"messages": MESSAGES, "response_format": response_format, "seed": 1, "max_tokens": 60}
            answer = http.post("/v1/chat/completions", json=body)
            if content is None:
                assert answer.status_code == 400, (response_format, answer.text)
            else:
                assert answer.status_code == 200, (response_format, answer.text)
                said = answer.json()["choices"][0]["message"]["content"]
                assert re.match(str(content), said), (response_format, said)


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_the_schema_beside_json_object_holds_the_answer(served: Served, schema: object) -> None:
    body = {
        "messages": MESSAGES,
        "response_format": {"type": "json_object", "schema": schema},
        "max_tokens": 200,
    }
    with served.http() as http:
        said = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        jsonschema.validate(json.loads(said), SCHEMA)
        body["response_format"] = {"type": "json_object", "schema": {}}
        said = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert said.startswith("{"), "an empty schema is any object, as llama-server has it"


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
        {"response_format": {"type": "xml"}},
        {"grammar": "root ::= ("},
        {"guided_regex": "(?=a)b"},
        {"guided_choice": []},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"structured_outputs": {"regex": "a"}, "guided_regex": "a"},
        {"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required", "grammar": 'root ::= "a"'},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
    ],
    ids=str,
)
def test_a_wrong_schema_grammar_or_tool_is_a_400_and_the_next_request_is_answered(
    served: Served, extra: dict[str, object]
) -> None:
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, **extra})
        assert answer.status_code == 400, answer.text
        assert "\n" not in answer.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "the", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "constraint",
    [
        {"guided_regex": "((a{1,200}){1,200}){1,200}"},
        {"guided_regex": "(((.{1,200}){1,200}){1,200}b){1,200}"},
        {"guided_regex": "(.*a.{200}b.*)|(.*b.{300}a)"},
        {"json_schema": {"type": "string", "minLength": 10**9}},
        {"json_schema": {"type": "integer", "multipleOf": 99999999}},
        {"json_schema": {"enum": list(range(9000))}},
        {"grammar": "root ::= root root | [a-z]*"},
        {"grammar": "start: a\na: a | b\nb: a*"},
    ],
    ids=str,
)
def test_hostile_constraints_are_answered_or_refused_in_one_line(
    served: Served, constraint: dict[str, object]
) -> None:
    with served.http() as http:
        answer = http.post("/completion", json={"prompt": "the", "n_predict": 40, "seed": 1, **constraint})
        assert answer.status_code in (200, 400), answer.text
        assert answer.status_code == 200 or "\n" not in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "reader"),
    [
        ("/completion", {"prompt": "the", "json_schema": SCHEMA}, "json_schema"),
        (
            "/v1/responses",
            {
                "model": "tiny",
                "input": "hi",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            },
            "from_response_format",
        ),
    ],
)
def test_others_are_answered_while_a_constraint_is_read(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], reader: str
) -> None:
    begun, answered = threading.Event(), threading.Event()
    read = getattr(ConstraintSpec, reader)

    def slow(value: Any) -> ConstraintSpec | None:
        begun.set()
        assert answered.wait(60), "no other request was answered meanwhile"
        spec: ConstraintSpec | None = read(value)
        return spec

    monkeypatch.setattr(ConstraintSpec, reader, slow)
    monkeypatch.setattr(
        constraints, "CONSTRAINTS", {reader: slow} if reader in constraints.CONSTRAINTS else {}
    )
    with served.http() as http, ThreadPoolExecutor(1) as other:
        held = other.submit(http.post, path, json=body | {"n_predict": 1, "max_output_tokens": 1})
        assert begun.wait(60)
        with served.http() as beside:
            assert beside.get("/health").status_code == 200
        answered.set()
        assert held.result(60).status_code == 200


def test_a_tool_whose_parameters_are_no_schema_is_named_with_the_path(served: Served) -> None:
    wrong = {"name": "g", "parameters": {"type": "object", "properties": {"size": {"type": 5}}}}
    tools = [TOOL, {"type": "function", "function": wrong}]
    with served.http() as http:
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
        answer = http.post("/v1/chat/completions", json=body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert message.startswith("tools[1].function.parameters: properties.size.type: 5 must be string")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_no_grammar_can_hold_is_checked(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "contains": {"const": 2}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,  # type: ignore[arg-type]
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        stream=stream,
        max_tokens=100,
    )
    choice = list(answer)[-1].choices[0] if stream else answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.schema_violation == "None of [1,1] are valid under the given schema"


_UNHOLDABLE = {
    "type": "array",
    "items": {"const": 1},
    "minItems": 2,
    "maxItems": 2,
    "contains": {"const": 2},
}
_VIOLATION = "None of [1,1] are valid under the given schema"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/completion", {"prompt": "a", "json_schema": _UNHOLDABLE}),
        ("/v1/completions", {"prompt": "a", "json_schema": _UNHOLDABLE}),
        ("/v1/chat/completions", {"messages": MESSAGES, "json_schema": _UNHOLDABLE}),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": _UNHOLDABLE}}},
        ),
        (
            "/v1/messages",
            {
                "messages": MESSAGES,
                "max_tokens": 99,
                "output_config": {"format": {"type": "json_schema", "schema": _UNHOLDABLE}},
            },
        ),
        ("/api/chat", {"messages": MESSAGES, "format": _UNHOLDABLE}),
        ("/api/generate", {"prompt": "a", "format": _UNHOLDABLE}),
    ],
)
def test_every_api_says_what_no_grammar_held(
    served: Served, route: str, body: dict[str, object], stream: bool
) -> None:
    def violations() -> float:
        lines = http.get("/metrics").text.splitlines()
        return next(
            float(each.split()[-1]) for each in lines if "violations_total" in each and each[0] != "#"
        )

    with served.http() as http:
        before = violations()
        limits = {"max_tokens": 99, "max_output_tokens": 99, "options": {"num_predict": 99}}
        answer = http.post(route, json=body | {"model": "tiny", "stream": stream} | limits)
        assert violations() == before + 1
    assert answer.status_code == 200, answer.text
    assert answer.text.count(json.dumps(_VIOLATION)) == 1, answer.text
    assert answer.text.count("schema_violation") == 1
    assert _VIOLATION in answer.text[-3000:]


def test_clients_read_answers_that_say_so(served: Served, client: openai.OpenAI) -> None:
    import anthropic

    limits: dict[str, Any] = {"max_tokens": 99}
    answer = client.responses.create(
        model="tiny",
        input="a",
        text={"format": {"type": "json_schema", "name": "x", "schema": _UNHOLDABLE}},
        max_output_tokens=99,
    )
    assert json.loads(answer.output_text) == [1, 1] and answer.schema_violation == _VIOLATION  # type: ignore[attr-defined]
    given = {"model": "tiny", "prompt": "a", "extra_body": {"json_schema": _UNHOLDABLE}, **limits}
    *_, last = client.completions.create(**given, stream=True)
    assert last.choices[0].schema_violation == _VIOLATION
    config = {"output_config": {"format": {"type": "json_schema", "schema": _UNHOLDABLE}}}
    with anthropic.Anthropic(base_url=served.url, api_key="x", max_retries=0) as claude:
        asked: Any = {"model": "tiny", "messages": MESSAGES, "extra_body": config, **limits}
        message = claude.messages.create(**asked)
        assert message.stop_reason == "end_turn" and message.schema_violation == _VIOLATION
        with claude.messages.stream(**asked) as events:
            assert events.get_final_message().stop_reason == "end_turn"
    given = {"messages": MESSAGES, "format": _UNHOLDABLE, "options": {"num_predict": 99}}
    parts: Any = list(ollama.Client(host=served.url).chat("tiny", **given, stream=True))
    assert parts[-1].done and json.loads("".join(part.message.content or "" for part in parts)) == [1, 1]


def test_arguments_of_a_required_call_have_no_invented_keys(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    named = {"type": "function", "function": {"name": "look"}}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            tools=[tool],
            tool_choice=named,
            seed=seed,
            max_tokens=200,  # type: ignore[arg-type]
        )
        choice = answer.choices[0]
        (call,) = choice.message.tool_calls or ()
        assert choice.finish_reason == "tool_calls"
        assert json.loads(call.function.arguments).keys() <= {"city"}  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI, stream: bool) -> None:
    given = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "seed": 3, "max_tokens": 300}
    given |= {"tool_choice": {"type": "function", "function": {"name": "look"}}, "stream": stream}
    answer = client.chat.completions.create(**given)  # type: ignore[call-overload]
    if stream:
        chunks = list(answer)
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
        assert deltas and {delta.index for delta in deltas} == {0}
        name, reason = deltas[0].function.name, chunks[-1].choices[0].finish_reason
        arguments = "".join(delta.function.arguments or "" for delta in deltas)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    else:
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, choice.finish_reason
        assert call.id and choice.message.content is None
    jsonschema.validate(json.loads(arguments), SCHEMA)
    assert (name, reason) == ("look", "tool_calls")


def test_a_required_call_that_is_cut_anywhere_leaves_nothing_of_it_in_the_text(
    served: Served, client: openai.OpenAI
) -> None:
    given = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "seed": 3}
    function = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    for count in range(1, 24):
        answer = client.chat.completions.create(**given, max_tokens=count)  # type: ignore[call-overload]
        choice = answer.choices[0]
        assert choice.finish_reason == "length" and not choice.message.content, choice.message
        stream = client.chat.completions.create(**given, max_tokens=count, stream=True)  # type: ignore[call-overload]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ""
        body = {"input": "a", "tools": [function], "tool_choice": "required", "max_output_tokens": count}
        with served.http() as http:
            items = http.post("/v1/responses", json=body).json()["output"]
        assert not any(part["text"] for item in items for part in item.get("content", []))


_ENDLESS = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 400}},
    "required": ["text"],
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_without_an_end_is_cut_and_said_so_in_every_api(served: Served, stream: bool) -> None:
    """Nothing of it may look like a call that is whole: arguments are no JSON, or there is no call at all."""
    function = {"name": "note", "parameters": _ENDLESS}
    tools = [{"type": "function", "function": function}]
    cut = {"tool_choice": "required", "max_tokens": 60, "max_output_tokens": 60, "seed": 3, "stream": stream}
    with served.http() as http:
        given = {"messages": MESSAGES, "tools": tools, **cut}
        chat = _events(http.post("/v1/chat/completions", json=given))
        old = {"messages": MESSAGES, "functions": [function], "function_call": {"name": "note"}}
        before = _events(http.post("/v1/chat/completions", json={**cut, "tool_choice": None, **old}))
        flat = {"input": "a", "tools": [{"type": "function", **function}], **cut}
        response = _events(http.post("/v1/responses", json=flat))[-1]
        named = [{"name": "note", "input_schema": _ENDLESS}]
        asked = {"messages": MESSAGES, "tools": named, "max_tokens": 60, "stream": stream}
        claude = _events(http.post("/v1/messages", json={**asked, "tool_choice": {"type": "any"}}))
    for events in (chat, before):
        choices = [choice for event in events for choice in event["choices"]]
        assert choices[-1]["finish_reason"] == "length"
        parts = [choice.get("message", choice.get("delta")) for choice in choices]
        calls = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
        calls += [part["function_call"] for part in parts if part.get("function_call")]
        with pytest.raises(json.JSONDecodeError):
            json.loads("".join(call["arguments"] for call in calls))
    response = response.get("response", response)
    assert response["status"] == "incomplete" and response["output"][-1]["status"] == "incomplete"
    reasons = [event.get("stop_reason", event.get("delta", {}).get("stop_reason")) for event in claude]
    assert "max_tokens" in reasons
    whole = [block for event in claude for block in event.get("content", ()) if block["type"] == "tool_use"]
    assert not whole
    pieces = [
        event["delta"].get("partial_json") for event in claude if event["type"] == "content_block_delta"
    ]
    if pieces:
        with pytest.raises(json.JSONDecodeError):
            json.loads("".join(filter(None, pieces)))


def _events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream, or the one of a whole answer."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [answer.json()]
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"ok": true}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL], max_tokens=3)  # type: ignore[arg-type]
    assert answer.usage is not None and answer.usage.completion_tokens <= 3


def test_a_prompt_names_tools_unless_none_may_be_called(served: Served) -> None:
    with served.http() as http:
        body = {"messages": MESSAGES, "tools": [TOOL]}
        assert "look" in http.post("/apply-template", json=body).json()["prompt"]
        none = http.post("/apply-template", json=body | {"tool_choice": "none"}).json()["prompt"]
        assert "look" not in none


FUNCTION: dict[str, Any] = {"functions": [TOOL["function"]], "function_call": {"name": "look"}}


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_called_in_their_old_form(client: openai.OpenAI, stream: bool) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 300, **FUNCTION}
    answer: Any = client.chat.completions.create(**given, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        calls = [choice.delta.function_call for choice in choices if choice.delta.function_call]
        name, arguments = calls[0].name, "".join(call.arguments or "" for call in calls)
        assert not any(choice.delta.tool_calls for choice in choices)
        reason = choices[-1].finish_reason
    else:
        (choice,) = answer.choices
        name, arguments = choice.message.function_call.name, choice.message.function_call.arguments
        assert choice.message.tool_calls is None and choice.message.content is None
        reason = choice.finish_reason
    assert (name, reason) == ("look", "function_call")
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_old_calls_are_told_to_the_template_as_those_of_tools(served: Served) -> None:
    call = {"name": "look", "arguments": '{"ok": true}'}
    old = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "look", "content": "seen"},
    ]
    called = {"id": "call_1", "type": "function", "function": call}
    new = [
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "seen"},
    ]
    with served.http() as http:
        prompts = [
            http.post("/apply-template", json={"messages": [*MESSAGES, *turns], **tools}).json()["prompt"]
            for turns, tools in ((old, {"functions": [TOOL["function"]]}), (new, {"tools": [TOOL]}))
        ]
        assert prompts[0] == prompts[1] and "look" in prompts[0]
        for wrong in (
            {"tools": [TOOL], "functions": [TOOL["function"]]},
            {"functions": [TOOL["function"]], "function_call": {"name": "none"}},
            {"functions": [TOOL["function"]], "function_call": "required"},
            {"functions": [5]},
        ):
            answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, **wrong})
            assert answer.status_code == 400, answer.text
