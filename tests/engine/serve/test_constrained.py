"""Schemas, grammars and tools through the server, in front of a tiny model whose words are random: only what holds
its text can make it JSON."""

import json
from collections.abc import Iterator

import jsonschema
import openai
import pytest

from tests.engine.serve.serving import Served
from tests.engine.serve.tool_model import SCHEMA, serving_tools

MESSAGES = [{"role": "user", "content": "the cat"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_tools(tmp_path_factory.mktemp("constrained")) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai() as made:
        yield made


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
    "extra",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
        {"response_format": {"type": "xml"}},
        {"grammar": "root ::= ("},
        {"guided_regex": "(?=a)b"},
        {"guided_choice": []},
        {"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI, stream: bool) -> None:
    given = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "seed": 3, "max_tokens": 300}
    given |= {"tool_choice": {"type": "function", "function": {"name": "look"}}, "stream": stream}
    answer = client.chat.completions.create(**given)  # type: ignore[call-overload]
    if stream:
        chunks = list(answer)
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
        assert [delta.index for delta in deltas] == [0] * len(deltas) and len(deltas) > 1
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


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"ok": true}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL], max_tokens=3)  # type: ignore[arg-type]
    assert answer.usage is not None and answer.usage.completion_tokens <= 3


def test_a_prompt_is_told_of_tools_unless_none_may_be_called(served: Served) -> None:
    with served.http() as http:
        body = {"messages": MESSAGES, "tools": [TOOL]}
        assert "look" in http.post("/apply-template", json=body).json()["prompt"]
        none = http.post("/apply-template", json=body | {"tool_choice": "none"}).json()["prompt"]
        assert "look" not in none
