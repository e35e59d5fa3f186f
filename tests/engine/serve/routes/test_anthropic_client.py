"""The anthropic client against a server: with the fake engine, whose every token is known, with one that says harmony,
and with a tiny model that is held to a tool's schema.

Its 3,000 modules are imported by who runs these tests, not by all that collect them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from quengine.request.sampling_params import SamplingParams
from quengine.serve.settings import Limits
from tests.engine.serve.fake_engine import CRASHING_PROMPT, FAILING_PROMPT, FakeModel, expected_tokens
from tests.engine.serve.serving import KEY, Served, serving
from tests.engine.serve.speaking_engine import SpeakingEngine
from tests.engine.serve.tool_model import SCHEMA, serving_tools

if TYPE_CHECKING:
    from anthropic import Anthropic

MODEL = FakeModel(4096)
ASKED: Any = [{"role": "user", "content": "hi"}]
THOUGHT, PARIS = "They greet. “Hé!”", '{"city": "Paris"}'
HM = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}"
SAYS = {
    "greet": f"{HM}<|channel|>final<|message|>Hello!",
    "before": f"{HM}<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{CALL}",
    "tool: sunny": "<|channel|>final<|message|>It is sunny.",
}
WEATHER: Any = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}


def connected(served: Served, key: str = KEY) -> Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=60)


def words(prompt: str, count: int) -> str:
    ids = MODEL.encode(prompt, bos=True, special=True)
    return MODEL.decode(expected_tokens(ids, 3, 0, count))


def ask(client: Anthropic, **more: Any) -> Any:
    given = {"model": "fake", "max_tokens": 5, "messages": ASKED, "extra_body": {"seed": 3}}
    return client.messages.create(**{**given, **more})


@pytest.fixture(scope="module")
def client() -> Iterator[Anthropic]:
    with serving(settings={"strict_model": True}) as served, connected(served) as made:
        yield made


@pytest.fixture(scope="module")
def speaking() -> Iterator[Anthropic]:
    with (
        serving(lambda: SpeakingEngine(SAYS), settings={"defaults": SamplingParams()}) as served,
        connected(served) as made,
    ):
        yield made


def test_an_answer_is_the_engines_text_with_usage(client: Anthropic) -> None:
    answer = ask(client)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fake")
    assert [(block.type, block.text) for block in answer.content] == [("text", words("user: hi", 5))]
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_input_tokens) == (8, 5, 0)


def test_a_streamed_answer_joins_to_the_whole_one(client: Anthropic) -> None:
    given: Any = {"model": "fake", "max_tokens": 50, "messages": ASKED, "extra_body": {"seed": 3}}
    with client.messages.stream(**given) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert answer.content[0].text == words("user: hi", 50)
    assert (answer.stop_reason, answer.usage.input_tokens, answer.usage.output_tokens) == (
        "max_tokens",
        8,
        50,
    )


def test_system_and_several_turns_are_the_prompt(client: Anthropic) -> None:
    parts = [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be short."}]
    turns = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]
    prompt = "system: Be kind.\nBe short.\nuser: hi\nassistant: Hello.\nuser: a\nb\nc"
    answer = ask(client, system=parts, messages=turns)
    assert answer.content[0].text == words(prompt, 5)
    assert answer.usage.input_tokens == len(prompt)
    counted = client.messages.count_tokens(model="fake", system=parts, messages=turns)  # type: ignore[arg-type]
    assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(client: Anthropic, stream: bool) -> None:
    stop = words("user: hi", 3).split()[-1]
    more: Any = {"model": "fake", "max_tokens": 50, "messages": ASKED, "stop_sequences": ["no", stop]}
    more["extra_body"] = {"seed": 3}
    if stream:
        with client.messages.stream(**more) as events:
            answer: Any = events.get_final_message()
    else:
        answer = client.messages.create(**more)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == words("user: hi", 2)


def test_an_answer_that_fills_the_context_says_so(client: Anthropic) -> None:
    answer = ask(client, max_tokens=100_000, messages=[{"role": "user", "content": "a" * 4000}])
    assert answer.stop_reason == "model_context_window_exceeded"


def test_what_changes_no_token_is_taken(client: Anthropic) -> None:
    answer = ask(
        client,
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "adaptive"},
        output_config={"effort": "max"},
        cache_control={"type": "ephemeral"},
        extra_headers={"anthropic-beta": "x"},
    )
    assert answer.content[0].text == words("user: hi", 5)
    with_betas = client.beta.messages.create(model="fake", max_tokens=5, messages=ASKED, betas=["x"])
    assert with_betas.usage.output_tokens == 5


# --- thinking and tools


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_text_and_calls_are_blocks_in_their_order(speaking: Anthropic, stream: bool) -> None:
    given: Any = {"model": "fake", "max_tokens": 500, "tools": [WEATHER]}
    given["messages"] = [{"role": "user", "content": "before"}]
    if stream:
        with speaking.messages.stream(**given) as events:
            kinds = [event.type for event in events]
            answer: Any = events.get_final_message()
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
        assert {"thinking", "signature", "text", "input_json"} < set(kinds)
    else:
        answer = speaking.messages.create(**given)
    thought, said, call = answer.content
    assert (thought.type, thought.thinking) == ("thinking", THOUGHT) and thought.signature
    assert (said.type, said.text) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})
    assert answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens_details.thinking_tokens == len(THOUGHT.encode())


def test_a_call_its_result_and_the_answer(speaking: Anthropic) -> None:
    asked: Any = {"role": "user", "content": "before"}
    given: Any = {"model": "fake", "max_tokens": 500, "tools": [WEATHER]}
    first = speaking.messages.create(messages=[asked], **given)
    call: Any = first.content[-1]
    for content in ("sunny", [{"type": "text", "text": "sunny"}]):
        result = {"type": "tool_result", "tool_use_id": call.id, "content": content, "is_error": False}
        said = {"role": "assistant", "content": first.content}
        turns: Any = [asked, said, {"role": "user", "content": [result]}]
        answer: Any = speaking.messages.create(messages=turns, **given)
        assert [block.type for block in answer.content] == ["text"]
        assert (answer.content[0].text, answer.stop_reason) == ("It is sunny.", "end_turn")
        counted = speaking.messages.count_tokens(model="fake", messages=turns, tools=[WEATHER])
        assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize(
    "thinking", [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}]
)
def test_thinking_that_is_not_wanted_is_left_out(speaking: Anthropic, thinking: Any) -> None:
    answer = speaking.messages.create(
        model="fake", max_tokens=500, messages=[{"role": "user", "content": "greet"}], thinking=thinking
    )
    assert [block.type for block in answer.content] == ["text"]
    assert answer.usage.output_tokens > len("Hello!") + len(THOUGHT)


def test_an_answer_cut_anywhere_has_whole_blocks(speaking: Anthropic) -> None:
    count = len(SpeakingEngine(SAYS).model.spoken(SAYS["before"]))
    for limit in range(1, count, 7):
        given: Any = {"model": "fake", "max_tokens": limit, "tools": [WEATHER]}
        with speaking.messages.stream(messages=[{"role": "user", "content": "before"}], **given) as events:
            kinds = [event.type for event in events]
            answer = events.get_final_message()
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") >= 1
        assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == limit


def test_a_required_call_has_an_input_of_its_schema_and_the_cache_is_in_the_usage(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tool: Any = {"name": "look", "input_schema": SCHEMA}
    asked: Any = [{"role": "user", "content": "hi " * 30}]
    with serving_tools(tmp_path_factory.mktemp("tools"), 2) as served, connected(served) as client:
        counted = client.messages.count_tokens(model="tiny", messages=asked, tools=[tool]).input_tokens
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}):
            given: Any = {"tools": [tool], "tool_choice": choice, "extra_body": {"seed": 3}}
            answer = client.messages.create(model="tiny", max_tokens=300, messages=asked, **given)
            (call,) = answer.content
            assert (call.type, answer.stop_reason) == ("tool_use", "tool_use")
            jsonschema.validate(call.input, SCHEMA)  # type: ignore[union-attr]
            usage = answer.usage
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
        assert usage.cache_read_input_tokens, "the second prompt begins like the first"
        schema = {"type": "json_schema", "schema": SCHEMA}
        said = client.messages.create(
            model="tiny", max_tokens=300, messages=asked, output_config={"format": schema}
        )  # type: ignore[call-overload]
        jsonschema.validate(json.loads(said.content[0].text), SCHEMA)


# --- errors


def test_errors_are_the_clients_exceptions(client: Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="no model 'other' here") as missing:
        ask(client, model="other")
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="temperature") as wrong:
        ask(client, extra_body={"temperature": -1})
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: the prompt has 5006 tokens"):
        ask(client, messages=[{"role": "user", "content": "a" * 5000}])
    with pytest.raises(anthropic.BadRequestError, match="this model has no projector"):
        source = {"type": "base64", "media_type": "image/png", "data": ""}
        ask(client, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    with pytest.raises(anthropic.BadRequestError, match="this server runs no tools"):
        server_tool = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
        ask(client, tools=[server_tool])
    with pytest.raises(anthropic.InternalServerError, match="logits are not finite") as failed:
        ask(client, messages=[{"role": "user", "content": FAILING_PROMPT}])
    assert (failed.value.status_code, failed.value.type) == (500, "api_error")


def test_a_prompt_that_is_too_long_is_counted(client: Anthropic) -> None:
    long: Any = [{"role": "user", "content": "a" * 5000}]
    assert client.messages.count_tokens(model="fake", messages=long).input_tokens == 5006


def test_a_key_is_asked_for_in_both_headers() -> None:
    import anthropic

    with serving(settings={"api_keys": ("right",)}) as served:
        with connected(served, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as caught:
            ask(client)
        assert caught.value.type == "authentication_error"
        with connected(served, "right") as client:
            assert ask(client).usage.output_tokens == 5
        with anthropic.Anthropic(
            base_url=served.url, auth_token="right", api_key=None, max_retries=0
        ) as client:
            assert ask(client).usage.output_tokens == 5


def test_a_full_queue_is_an_overload() -> None:
    import anthropic

    with (
        serving(limits=Limits(queue=0), settings={"parallel": 1}) as served,
        connected(served) as client,
        client.messages.stream(model="fake", max_tokens=4000, messages=ASKED) as running,
    ):
        next(iter(running))
        with pytest.raises(anthropic.OverloadedError, match="the queue is full") as caught:
            ask(client)
        assert caught.value.type == "overloaded_error" and caught.value.response.headers["retry-after"]


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    import anthropic

    with serving() as served, connected(served) as client:
        with client.messages.stream(model="fake", max_tokens=4000, messages=ASKED) as running:
            next(iter(running))
            with pytest.raises(anthropic.APIStatusError):
                ask(client, messages=[{"role": "user", "content": CRASHING_PROMPT}])
            with pytest.raises(anthropic.APIStatusError) as caught:
                running.until_done()
        assert caught.value.type in ("api_error", "overloaded_error")
