"""litellm against one server, as each of the providers whose API the server has."""

import asyncio
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.engine.serve.clients.conftest import HELLO, THOUGHT
from tests.engine.serve.serving import KEY, Served

PROVIDERS = {
    "openai": "/v1",
    "hosted_vllm": "/v1",
    "llamafile": "/v1",
    "lm_studio": "/v1",
    "anthropic": "",
    "ollama_chat": "",
}
"""Of chats, and the path of their base address."""
GREET, ASKED = [{"role": "user", "content": "greet"}], {"role": "user", "content": "weather"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
RECORD = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}


@pytest.fixture(scope="module")
def litellm() -> Iterator[ModuleType]:
    """Imported here, for it takes seconds; its table of prices is its own, not fetched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        patch.setattr(litellm, "suppress_debug_info", True)
        yield litellm


def to(served: Served, provider: str, **more: Any) -> dict[str, Any]:
    base = served.url + PROVIDERS.get(provider, "")
    return {"model": f"{provider}/fake", "api_base": base, "api_key": KEY, "num_retries": 0, **more}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_provider_chats_streams_and_calls(litellm: ModuleType, speaking: Served, provider: str) -> None:
    given = to(speaking, provider)
    answer = litellm.completion(messages=GREET, **given)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == (HELLO, THOUGHT)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.prompt_tokens == len("user: greet")

    parts = [part.choices[0] for part in litellm.completion(messages=GREET, stream=True, **given)]
    assert "".join(part.delta.content or "" for part in parts) == HELLO
    assert "".join(part.delta.get("reasoning_content") or "" for part in parts) == THOUGHT
    assert len(parts) > 3 and parts[-1].finish_reason == "stop"

    streamed = list(litellm.completion(messages=[ASKED], tools=[WEATHER], stream=True, **given))
    for called in (
        litellm.completion(messages=[ASKED], tools=[WEATHER], **given),
        litellm.stream_chunk_builder(streamed, messages=[ASKED]),
    ):
        assert called.choices[0].finish_reason == "tool_calls"
        (call,) = called.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [ASKED, called.choices[0].message, result]
    assert (
        litellm.completion(messages=turns, tools=[WEATHER], **given).choices[0].message.content
        == "It is sunny."
    )

    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=GREET, **given | {"api_key": "wrong"})
    with pytest.raises(litellm.BadRequestError, match="temperature = -1"):
        litellm.completion(messages=GREET, temperature=-1, **given)
    long = [{"role": "user", "content": "x" * 5000}]
    if provider == "ollama_chat":  # as Ollama does, the server shortens what does not fit
        answer = litellm.completion(messages=long, **given)
        assert answer.choices[0].message.content == HELLO and 2000 < answer.usage.prompt_tokens < 4096
        return
    with pytest.raises(litellm.ContextWindowExceededError, match="5006 tokens"):
        litellm.completion(messages=long, **given)


@pytest.mark.parametrize("provider", ["openai", "ollama_chat"])
def test_a_schema_reaches_the_server(litellm: ModuleType, speaking: Served, provider: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "r", "schema": RECORD, "strict": True}}
    given = to(speaking, provider, messages=[{"role": "user", "content": "record"}], response_format=wanted)
    assert json.loads(litellm.completion(**given).choices[0].message.content) == {"name": "Ann", "age": 7}


def test_ollamas_generate_and_openais_completions_and_responses(
    litellm: ModuleType, speaking: Served
) -> None:
    given = to(speaking, "ollama", messages=GREET)
    assert litellm.completion(**given).choices[0].message.content == HELLO
    parts = list(litellm.completion(stream=True, **given))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == HELLO
    given = to(
        speaking, "text-completion-openai", api_base=f"{speaking.url}/v1", prompt="greet", max_tokens=60
    )
    assert litellm.text_completion(**given).choices[0].text.startswith("analysis")
    response = litellm.responses(input="greet", **to(speaking, "openai"))
    assert response.output[-1].content[0].text == HELLO


def test_embeddings_and_ranks(litellm: ModuleType, speaking: Served) -> None:
    for provider in ("openai", "hosted_vllm", "ollama"):
        answer = litellm.embedding(input=["a", "bc"], **to(speaking, provider))
        assert [len(row["embedding"]) for row in answer.data] == [8, 8]
        many = litellm.embedding(input=[f"document {n}" for n in range(200)], **to(speaking, provider))
        assert len(many.data) == 200
    documents = [f"document {number}" for number in range(200)]
    ranked = litellm.rerank(query=documents[7], documents=documents, **to(speaking, "hosted_vllm"))
    assert ranked.results[0]["index"] == 7 and len(ranked.results) == 200
    ranked = litellm.rerank(query="a", documents=["b", "a"], **to(speaking, "hosted_vllm"))
    assert ranked.results[0]["index"] == 1


def test_what_failed_is_asked_for_again(litellm: ModuleType, speaking: Served) -> None:
    given = to(speaking, "hosted_vllm", messages=[{"role": "user", "content": "flaky"}])
    with pytest.raises(litellm.InternalServerError, match="the first one fails"):
        litellm.completion(**given)
    speaking.server.worker.engine.failed = False  # type: ignore[union-attr]
    assert litellm.completion(**given | {"num_retries": 1}).choices[0].message.content == HELLO


def test_many_at_once(litellm: ModuleType, speaking: Served) -> None:
    async def all_of_them() -> list[str]:
        asked = [
            litellm.acompletion(messages=GREET, **to(speaking, name)) for name in PROVIDERS for _ in "ab"
        ]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    async def streamed() -> str:
        parts = await litellm.acompletion(messages=GREET, stream=True, **to(speaking, "openai"))
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    async def both() -> tuple[list[str], str]:
        return await all_of_them(), await streamed()

    assert asyncio.run(both()) == ([HELLO] * 2 * len(PROVIDERS), HELLO)
