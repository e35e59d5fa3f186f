"""The ollama client against servers with the fake engine, with one that says harmony, and with tiny models."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import ollama
import pytest

from quengine import LLM, SamplingParams
from quengine.serve.apis.ollama.requests import openai_messages
from quengine.serve.apis.ollama.schemas import OllamaCall, OllamaFunction, OllamaMessage
from quengine.serve.http import LINES
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.serve.processes.shared_engine import Event, Failed
from quengine.serve.routes.openapi import document
from quengine.serve.routes.shortening import with_longest_cut
from quengine.serve.settings import ServerSettings
from tests.engine.serve.fake_engine import (
    FIRST_BYTE,
    FakeEngine,
    FakeModel,
    _Sequence,
    expected_embedding,
    expected_tokens,
)
from tests.engine.serve.serving import TABLE, Served, serving
from tests.engine.serve.speaking_engine import SpeakingEngine, ThinkingModel
from tests.engine.serve.tool_model import SCHEMA, serving_tools
from tests.tiny_models import write_tiny

MODEL = FakeModel(4096)
HI = [{"role": "user", "content": "hi"}]
DOCUMENT = document(TABLE, ServerSettings(("fake",)), FakeModel.vocab_size)

THOUGHT, TEXT, PARIS = "They greet. “Hé!”", "Hello! “Ça va?”", '{"city": "Paris"}'
ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}"
SAYS = {
    "greet": f"{ANALYSIS}<|channel|>final<|message|>{TEXT}",
    "weather": f"{ANALYSIS}{CALL}",
    "sunny": "<|channel|>final<|message|>Sun.",
}


def weather(city: str) -> str:
    """Of a city.

    Args:
        city: Its name.
    """
    return city


def text_of(prompt: str, seed: int, count: int) -> str:
    ids = MODEL.encode(prompt, bos=True, special=True)
    return MODEL.decode(expected_tokens(ids, seed, 0, count))


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[ollama.Client]:
    with ollama.Client(served.url, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def reasoner() -> Iterator[ollama.Client]:
    settings = {"defaults": SamplingParams()}
    with (
        serving(lambda: SpeakingEngine(SAYS), settings=settings) as running,
        ollama.Client(running.url, timeout=60) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_tools(tmp_path_factory.mktemp("ollama")) as running:
        yield running


def test_a_chat_answer_is_the_engines_text_with_counts_and_durations(client: ollama.Client) -> None:
    answer = client.chat("fake", HI, options={"seed": 3, "num_predict": 5, "num_ctx": 99999})
    assert answer.message.content == text_of("user: hi", 3, 5)
    assert answer.message.role == "assistant" and answer.message.tool_calls is None
    assert (answer.model, answer.done, answer.done_reason) == ("fake", True, "length")
    assert (answer.prompt_eval_count, answer.eval_count, answer.load_duration) == (8, 5, 0)
    assert answer.total_duration > answer.eval_duration > 0 and answer.prompt_eval_duration > 0


def test_a_streamed_chat_answer_joins_to_the_whole_one(client: ollama.Client) -> None:
    parts = list(client.chat("fake", HI, stream=True, options={"seed": 3, "num_predict": 50}))
    assert "".join(part.message.content for part in parts) == text_of("user: hi", 3, 50)
    assert len(parts) > 2 and [part.done for part in parts].count(True) == 1
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 50)
    assert parts[0].eval_count is None


def test_a_stream_is_the_default_and_its_lines_are_as_documented(served: Served) -> None:
    schemas = {"components": DOCUMENT["components"]}
    with served.http() as http:
        for path, body in (
            ("/api/chat", {"messages": HI, "logprobs": True, "top_logprobs": 1}),
            ("/api/generate", {"prompt": "hi", "raw": True, "logprobs": True}),
            ("/api/pull", {"model": "fake"}),
        ):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.headers["content-type"]) == (200, LINES)
            content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"][LINES]
            for line in lines_of(answer):
                jsonschema.Draft202012Validator({**content["schema"], **schemas}).validate(line)


def test_a_generated_answer_follows_the_system_prompt_and_the_prompt(client: ollama.Client) -> None:
    options = {"seed": 3, "num_predict": 5}
    answer = client.generate("fake:latest", "hi", system="be kind", options=options)
    assert answer.response == text_of("system: be kind\nuser: hi", 3, 5)
    parts = list(client.generate("fake", "hi", stream=True, options=options))
    assert "".join(part.response for part in parts) == text_of("user: hi", 3, 5)
    assert (parts[-1].done, parts[-1].done_reason, parts[-1].eval_count) == (True, "length", 5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_raw_prompt_is_taken_as_it_is(client: ollama.Client, stream: bool) -> None:
    options = {"seed": 3, "num_predict": 20}
    answer = client.generate("fake", "hi", raw=True, stream=stream, options=options, logprobs=True)
    parts = list(answer) if stream else [answer]
    assert "".join(part.response for part in parts) == text_of("hi", 3, 20)
    tokens = [entry for part in parts for entry in part.logprobs or []]
    assert "".join(entry.token for entry in tokens) == text_of("hi", 3, 20)


def test_without_a_limit_the_servers_holds_and_none_is_until_the_context_is_full(
    client: ollama.Client,
) -> None:
    assert client.generate("fake", "hi", raw=True).eval_count == 8
    assert client.generate("fake", "x" * 4080, raw=True, options={"num_predict": -1}).eval_count == 16
    with serving(settings={"defaults": SamplingParams()}) as served:
        answer = ollama.Client(served.url).generate("fake", "x" * 4060, raw=True)
        assert (answer.eval_count, answer.done_reason) == (36, "length")


def test_a_stop_string_ends_the_text_before_it(client: ollama.Client) -> None:
    third = f"w{expected_tokens(MODEL.encode('abc', True, True), 1, 0, 3)[2]} "
    answer = client.generate("fake", "abc", raw=True, options={"seed": 1, "stop": [third]})
    assert (answer.response, answer.done_reason) == (text_of("abc", 1, 2), "stop")


def test_an_empty_request_only_wants_the_model_to_be_there(client: ollama.Client) -> None:
    chat = client.chat("fake", [])
    assert (chat.done, chat.done_reason, chat.message.content) == (True, "load", "")
    generated = list(client.generate("fake", stream=True, keep_alive="5m"))
    assert [(part.done_reason, part.response) for part in generated] == [("load", "")]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_apart_from_the_text(reasoner: ollama.Client, stream: bool) -> None:
    chat = reasoner.chat("fake", [{"role": "user", "content": "greet"}], think="low", stream=stream)
    messages = [part.message for part in chat] if stream else [chat.message]
    assert "".join(m.thinking or "" for m in messages) == THOUGHT
    assert "".join(m.content or "" for m in messages) == TEXT
    generated = reasoner.generate("fake", "greet", think=True, stream=stream)
    parts = list(generated) if stream else [generated]
    assert "".join(part.thinking or "" for part in parts) == THOUGHT
    assert "".join(part.response or "" for part in parts) == TEXT
    assert parts[-1].done_reason == "stop"


def test_a_model_that_has_an_effort_reasons_all_the_same(reasoner: ollama.Client) -> None:
    told = reasoner.chat("fake", [{"role": "user", "content": "greet"}], think=False).message
    assert (told.thinking, told.content) == (THOUGHT, TEXT)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_comes_whole_and_its_result_goes_back(reasoner: ollama.Client, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "weather"}]
    answer = reasoner.chat("fake", messages, tools=[weather], stream=stream)
    parts = list(answer) if stream else [answer]
    (call,) = [call for part in parts for call in part.message.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("weather", json.loads(PARIS))
    assert "".join(part.message.thinking or "" for part in parts) == THOUGHT
    assert parts[-1].done_reason == "stop"
    said = next(part.message for part in parts if part.message.tool_calls)
    messages += [said, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    assert reasoner.chat("fake", messages, tools=[weather]).message.content == "Sun."


def test_a_call_that_was_cut_is_none(reasoner: ollama.Client) -> None:
    given: list[Any] = [{"role": "user", "content": "weather"}]
    count = len(SpeakingEngine(SAYS).model.spoken(SAYS["weather"]))
    answer = reasoner.chat("fake", given, tools=[weather], options={"num_predict": count - 1})
    assert answer.message.tool_calls is None and answer.done_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_several_calls_between_tags_come_apart(stream: bool) -> None:
    hermes = [f'<tool_call>{{"name": "weather", "arguments": {{"city": "{c}"}}}}</tool_call>' for c in "ab"]
    says = {"both": f"<think>\n{THOUGHT}\n</think>\n\nLook: {hermes[0]}\n{hermes[1]}"}
    with (
        serving(
            lambda: SpeakingEngine(says, ThinkingModel(4096)), settings={"defaults": SamplingParams()}
        ) as served,
        ollama.Client(served.url) as client,
    ):
        given = [{"role": "user", "content": "both"}]
        answer = client.chat("fake", given, tools=[weather], think=True, stream=stream)
        messages = [part.message for part in answer] if stream else [answer.message]
        calls = [call for message in messages for call in message.tool_calls or []]
        assert [call.function.arguments for call in calls] == [{"city": "a"}, {"city": "b"}]
        assert "".join(message.thinking or "" for message in messages) == THOUGHT
        assert "".join(message.content or "" for message in messages).strip() == "Look:"
        if stream:
            assert [len(message.tool_calls or []) for message in messages].count(1) == 2


def test_a_model_that_reasons_says_so_and_can_be_told_not_to() -> None:
    with (
        serving(
            lambda: SpeakingEngine({"hi": "Hello."}, ThinkingModel(4096)),
            settings={"defaults": SamplingParams()},
        ) as served,
        ollama.Client(served.url) as client,
    ):
        assert client.show("fake").capabilities == ["completion", "embedding", "insert", "tools", "thinking"]
        plain, off = (client.chat("fake", HI, think=think) for think in (True, False))
        assert plain.message.content == off.message.content == "Hello." and off.message.thinking is None
        longer = len("<think>\n\n</think>\n\n")
        assert (off.prompt_eval_count or 0) - (plain.prompt_eval_count or 0) == longer


def test_a_result_is_that_of_the_call_with_its_name() -> None:
    def call(name: str) -> OllamaCall:
        return OllamaCall(OllamaFunction(name, {"x": 1}))

    def result(content: str, name: str | None = None, call_id: str | None = None) -> OllamaMessage:
        return OllamaMessage("tool", content, tool_name=name, tool_call_id=call_id)

    def found(*messages: OllamaMessage) -> list[tuple[str | None, str | None]]:
        calls = OllamaMessage("assistant", tool_calls=[call("f"), call("g"), call("f")])
        given = openai_messages([OllamaMessage("user", "hi"), calls, *messages])
        assert [each["id"] for each in given[1]["tool_calls"]] == ["call_1_0", "call_1_1", "call_1_2"]
        assert given[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
        return [(each.get("name"), each.get("tool_call_id")) for each in given[2:]]

    in_order = [("f", "call_1_0"), ("g", "call_1_1"), ("f", "call_1_2")]
    assert found(result("1", "f"), result("2", "g"), result("3", "f")) == in_order
    assert found(result("1"), result("2"), result("3")) == in_order
    assert found(result("2", "g"), result("1")) == [("g", "call_1_1"), ("f", "call_1_0")]
    assert found(result("3", call_id="call_1_2")) == [("f", "call_1_2")]
    assert found(result("4", "h"), result("5", call_id="other")) == [("h", None), (None, "other")]


def test_a_name_may_have_the_tag_latest_where_names_are_checked() -> None:
    with serving(settings={"strict_model": True}) as served, ollama.Client(served.url) as client:
        for name in ("fake", "fake:latest"):
            assert client.chat(name, HI).done and client.show(name).capabilities
            assert client.generate(name).done_reason == "load" and client.embed(name, "a").embeddings
        for call in (
            lambda: client.chat("other", HI),
            lambda: client.generate("fake:8b"),
            lambda: client.show("other"),
            lambda: client.embed("other", ""),
        ):
            with pytest.raises(ollama.ResponseError, match="there: fake") as caught:
                call()
            assert caught.value.status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_holds_the_text(tiny: Served, stream: bool) -> None:
    with ollama.Client(tiny.url) as client:
        options = {"num_predict": 100, "seed": 1}
        answer = client.chat("tiny", HI, format=SCHEMA, stream=stream, options=options)
        parts = list(answer) if stream else [answer]
        jsonschema.validate(json.loads("".join(part.message.content or "" for part in parts)), SCHEMA)
        assert parts[-1].done_reason == "stop"


def test_json_is_an_object(tiny: Served) -> None:
    with ollama.Client(tiny.url) as client:
        options = {"num_predict": 4, "temperature": 0}
        assert client.generate("tiny", "hi", format="json", options=options).response.startswith("{")


@pytest.mark.parametrize("field", ["seed", "repeat_penalty", "top_k"])
def test_an_option_reaches_the_sampler_as_the_other_routes_send_it(tiny: Served, field: str) -> None:
    options = {"seed": 7, "num_predict": 12, "temperature": 2.0, field: 3}
    more = {key: value for key, value in options.items() if key != "num_predict"}
    with ollama.Client(tiny.url) as client, tiny.openai() as other:
        found = client.chat("tiny", HI, options=options).message.content
        expected = other.chat.completions.create(
            model="tiny",
            messages=HI,  # type: ignore[arg-type]
            max_tokens=12,
            extra_body=more,
        )
    assert found == expected.choices[0].message.content


def test_each_text_has_an_embedding(client: ollama.Client) -> None:
    def expected(text: str) -> Any:
        return pytest.approx(expected_embedding(MODEL.encode(text, True, True), "mean"))

    answer = client.embed("fake", ["a", "bc"])
    assert list(answer.embeddings) == [expected("a"), expected("bc")]
    assert answer.prompt_eval_count == 3 and answer.total_duration > 0
    assert list(client.embed("fake", "a").embeddings) == [expected("a")]
    assert list(client.embed("fake", "").embeddings) == []
    many = [f"document {number}" for number in range(200)]
    assert list(client.embed("fake", many).embeddings) == [expected(text) for text in many]
    assert client.embeddings("fake", "a").embedding == expected("a")
    assert client.embeddings("fake", "").embedding == []


def test_an_embedding_may_be_shorter(client: ollama.Client) -> None:
    (short,) = client.embed(model="fake", input="abc", dimensions=3)["embeddings"]
    (whole,) = client.embed(model="fake", input="abc")["embeddings"]
    length = math.hypot(*whole[:3])
    assert short == pytest.approx([value / length for value in whole[:3]])


def test_the_model_is_listed_shown_and_in_memory(tiny: Served) -> None:
    with ollama.Client(tiny.url) as client:
        (listed,) = client.list().models
        (loaded,) = client.ps().models
        shown = client.show("tiny:latest")
    assert listed.model == loaded.model == "tiny"
    assert listed.digest == loaded.digest and len(listed.digest or "") == 64
    assert loaded.size > listed.size > 0 and loaded.size_vram == 0  # with the cache
    assert loaded.context_length == 1024 and listed.modified_at is not None
    assert listed.details is not None and listed.details.family == "llama"
    assert shown.capabilities == ["completion", "embedding", "tools"]
    assert shown.template and "num_ctx" in (shown.parameters or "")
    assert shown.modelinfo and shown.modelinfo["llama.embedding_length"] == 64
    assert shown.details == listed.details


def test_clients_find_the_server_and_its_version(served: Served) -> None:
    with served.http() as http:
        for path in ("/", "/api/version", "/api/tags"):
            assert http.head(path).status_code == http.get(path).status_code == 200
        assert "text/html" in http.get("/").headers["content-type"]
        assert tuple(map(int, http.get("/api/version").json()["version"].split("."))) >= (0, 12, 0)


def test_what_the_command_line_does_is_not_pretended(client: ollama.Client) -> None:
    assert client.pull("fake").status == "success"
    assert [part.status for part in client.pull("fake:latest", stream=True)] == ["success"]
    for call, message in (
        (lambda: client.pull("qwen3:8b"), "engine pull qwen3:8b"),
        (lambda: list(client.pull("qwen3:8b", stream=True)), "engine pull qwen3:8b"),
        (lambda: client.delete("fake"), "engine rm fake"),
        (lambda: client.copy("fake", "mine"), "engine serve --alias mine"),
    ):
        with pytest.raises(ollama.ResponseError, match=f"{message}, or .*--allow-model-changes") as caught:
            call()
        assert caught.value.status_code == 403


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "user", "content": "hi", "images": ["aGk="]}]}, "has no projector"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "must be assistant, system, tool or user"),
        ({"messages": [{"content": "hi"}]}, "role"),
        ({"messages": "hi"}, "must be an array"),
        (
            {"messages": [{"role": "user", "content": "x" * 5000}], "truncate": False},
            "context holds 4096",
        ),
        ({"think": "much"}, "must be true, false"),
        ({"format": "yaml"}, 'must be "json" or a JSON schema'),
        ({"format": SCHEMA}, "JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"stream": "yes"}, "stream"),
        ({"options": {"temperature": -1}}, "options.temperature = -1"),
        ({"options": {"num_predict": -3}}, "options.num_predict = -3"),
        ({"options": {"mirostat": 3}}, "options.mirostat = 3"),
        ({"options": {"stop": ["a"] * 17}}, "--max-stops"),
        ({"options": {"seed": 2**70}}, "seed"),
        ({"options": 1}, "options"),
        ({"top_logprobs": 3}, "needs logprobs"),
    ],
    ids=str,
)
def test_what_cannot_be_is_a_400_in_ollamas_shape(served: Served, body: dict[str, Any], message: str) -> None:
    with served.http() as http:
        answer = http.post("/api/chat", json={"model": "fake", "messages": HI, **body})
    assert answer.status_code == 400 and message in answer.json()["error"], answer.text
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"images": ["aGk="]}, "has no projector"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"context": [1, 2]}, "context is not supported"),
        ({"suffix": "end", "raw": True}, "a raw prompt has none"),
        ({"suffix": "end", "system": "be kind"}, "a prompt before a suffix has none"),
        ({"raw": True, "system": "be kind"}, "a raw prompt has none"),
    ],
    ids=str,
)
def test_what_a_prompt_cannot_be_is_a_400(client: ollama.Client, body: dict[str, Any], message: str) -> None:
    with pytest.raises(ollama.ResponseError, match=message) as caught:
        client.generate("fake", "hi", **body)
    assert caught.value.status_code == 400


def test_errors_before_and_behind_a_route_have_ollamas_shape_too(served: Served) -> None:
    with served.http() as http:
        for method, path, status, more in (
            ("GET", "/api/chat", 405, {}),
            ("POST", "/api/blobs", 404, {}),
            ("POST", "/api/chat", 403, {"headers": {"Origin": "http://other.example"}}),
            ("POST", "/api/generate", 500, {"json": {"prompt": "please fail", "raw": True}}),
        ):
            answer = http.request(method, path, **more)  # type: ignore[arg-type]
            assert answer.status_code == status and isinstance(answer.json()["error"], str), path
        assert isinstance(http.get("/v1/none").json()["error"], dict)


class FailingEngine(FakeEngine):
    """Every completion fails behind its third token."""

    def _advance(self, sequence: _Sequence) -> list[Event]:
        if sequence.generated < 3:
            return super()._advance(sequence)
        del self._sequences[sequence.request.id]
        return [Failed(sequence.request.id, "logits are not finite")]


def test_a_failure_in_a_stream_is_its_last_line() -> None:
    with serving(FailingEngine) as served, ollama.Client(served.url) as client:
        parts = []
        with pytest.raises(ollama.ResponseError, match="not finite"):
            for part in client.generate("fake", "hi", raw=True, stream=True):
                parts.append(part.response)
        assert "".join(parts)


def test_a_model_without_a_template_is_given_the_prompt(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny-Q8_0.gguf", changes={"tokenizer.chat_template": None})
    with (
        serving(lambda: LLMEngine(LLM(path, device="cpu"))) as served,
        ollama.Client(served.url) as client,
    ):
        options = {"num_predict": 3, "seed": 1}
        plain = client.generate("fake", "hi", options=options)
        assert plain.response == client.generate("fake", "hi", raw=True, options=options).response
        with pytest.raises(ollama.ResponseError, match="chat template"):
            client.chat("fake", HI)
        assert client.list().models[0].details.quantization_level == "Q8_0"  # type: ignore[union-attr]


def shortened_prompts(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(
        float(line.split()[1]) for line in lines if line.startswith("quengine_shortened_prompts_total ")
    )


def test_a_conversation_that_does_not_fit_loses_its_oldest_turns_and_says_so() -> None:
    system = {"role": "system", "content": "Be kind."}
    turns = [
        {"role": role, "content": f"{number} " + "x" * 400}
        for number in range(10)
        for role in ("user", "assistant")
    ]
    last = {"role": "user", "content": "and now?"}
    with serving(lambda: FakeEngine(ctx_size=2000)) as served, served.http() as client:
        body = {"model": "fake", "messages": [system, *turns, last], "options": {"num_predict": 5}}
        for stream in (False, True):
            answer = client.post("/api/chat", json=body | {"stream": stream})
            assert answer.status_code == 200, answer.text
            note = answer.headers["X-Quengine-Notes"]
            assert re.fullmatch("truncate: the oldest 1[0-9] of 22 messages are left out", note), note
            end = json.loads(answer.text.splitlines()[-1])
            assert 1000 < end["prompt_eval_count"] < 2000 and end["eval_count"] == 5
        assert shortened_prompts(client) == 2
        fits = client.post(
            "/api/chat", json=body | {"messages": [system, *turns[-4:], last], "stream": False}
        )
        assert "X-Quengine-Notes" not in fits.headers and shortened_prompts(client) == 2


def test_the_system_message_and_the_end_of_one_long_text_stay() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a" * 5000 + "the end"},
    ]
    kept = with_longest_cut(messages, 0.3)
    assert kept is not None and kept[0] == messages[0]
    assert kept[1]["content"].endswith("the end") and 1000 < len(kept[1]["content"]) < 1500
    assert with_longest_cut([{"role": "user", "content": "a" * 5}], 0.1) is None
    with serving(lambda: FakeEngine(ctx_size=1000)) as served, served.http() as client:
        chat = client.post("/api/chat", json={"messages": messages, "stream": False})
        assert chat.status_code == 200 and 500 < chat.json()["prompt_eval_count"] <= 750
        raw = client.post("/api/generate", json={"prompt": "b" * 5000, "raw": True, "stream": False})
        assert raw.status_code == 200 and 500 < raw.json()["prompt_eval_count"] <= 750
        for answer in (chat, raw):
            assert "characters are left out" in answer.headers["X-Quengine-Notes"]
        refused = client.post("/api/generate", json={"prompt": "b" * 5000, "truncate": False})
        assert refused.status_code == 400 and "context holds 1000" in refused.json()["error"]


def test_texts_to_embed_lose_their_end_and_say_so() -> None:
    with serving(lambda: FakeEngine(ctx_size=100)) as served, served.http() as client:
        texts = ["short", "y" * 300]
        answer = client.post("/api/embed", json={"model": "fake", "input": texts})
        assert answer.status_code == 200 and answer.json()["prompt_eval_count"] == 5 + 99
        assert answer.json()["embeddings"][1] == pytest.approx(
            list(expected_embedding([FIRST_BYTE + ord("y")] * 99, "mean"))
        )
        assert answer.headers["X-Quengine-Notes"] == "input[1]: the last 201 of 300 tokens are left out"
        assert shortened_prompts(client) == 1
        refused = client.post("/api/embed", json={"model": "fake", "input": texts, "truncate": False})
        assert refused.status_code == 400 and "context holds 100" in refused.json()["error"]
        assert client.post("/v1/embeddings", json={"input": texts}).status_code == 400
