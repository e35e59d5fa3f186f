"""langchain-openai against one server: chats through both of OpenAI's APIs, completions, embeddings."""

import asyncio
from functools import reduce
from operator import add
from types import ModuleType
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.engine.serve.clients.conftest import HELLO
from tests.engine.serve.serving import KEY, Served


class Record(BaseModel):
    """A person."""

    name: str
    age: int


def weather(city: str) -> str:
    """Of a city."""
    return city


@pytest.fixture(scope="module")
def langchain() -> ModuleType:
    """Imported here, for it takes a second."""
    import langchain_openai

    return langchain_openai


def connected(kind: Any, served: Served, **more: Any) -> Any:
    return kind(**{"model": "fake", "base_url": f"{served.url}/v1", "api_key": KEY, "max_retries": 0, **more})


def text_of(message: Any) -> str:
    return "".join(block["text"] for block in message.content_blocks if block["type"] == "text")


@pytest.mark.parametrize("responses", [False, True])
def test_a_chat_answers_streams_and_calls(langchain: ModuleType, speaking: Served, responses: bool) -> None:
    chat = connected(langchain.ChatOpenAI, speaking, use_responses_api=responses)
    answer = chat.invoke("greet")
    assert text_of(answer) == HELLO and answer.usage_metadata["input_tokens"] == len("user: greet")
    assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
    parts = list(chat.stream("greet", **({} if responses else {"stream_usage": True})))
    whole: Any = reduce(add, parts)
    assert len(parts) > 3 and text_of(whole) == HELLO
    assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]

    with_tool = chat.bind_tools([weather])
    asked = ("user", "weather")
    called = with_tool.invoke([asked])
    streamed: Any = reduce(add, with_tool.stream([asked]))
    for message in (called, streamed):
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
        result = {"role": "tool", "content": "sunny", "tool_call_id": call["id"]}
        assert text_of(with_tool.invoke([asked, message, result])) == "It is sunny."


@pytest.mark.parametrize("responses", [False, True])
def test_output_has_a_type(langchain: ModuleType, speaking: Served, responses: bool) -> None:
    chat = connected(langchain.ChatOpenAI, speaking, use_responses_api=responses)
    for method, prompt in (
        ("json_schema", "record"),
        ("json_mode", "record"),
        ("function_calling", "call Record"),
    ):
        typed = chat.with_structured_output(Record, method=method)
        assert typed.invoke(prompt) == Record(name="Ann", age=7), method


def test_many_at_once(langchain: ModuleType, speaking: Served) -> None:
    chat = connected(langchain.ChatOpenAI, speaking)

    async def both() -> tuple[list[Any], list[Any]]:
        return await chat.abatch(["greet"] * 8), [part async for part in chat.astream("greet")]

    answers, parts = asyncio.run(both())
    assert [text_of(answer) for answer in answers] == [HELLO] * 8
    assert "".join(map(text_of, parts)) == HELLO


def test_completions_and_embeddings(langchain: ModuleType, speaking: Served) -> None:
    plain = connected(langchain.OpenAI, speaking, max_tokens=60)
    assert plain.invoke("greet").startswith("analysis")
    assert "".join(plain.stream("greet")) == plain.invoke("greet")
    embeddings = connected(langchain.OpenAIEmbeddings, speaking, check_embedding_ctx_length=False)
    assert [len(row) for row in embeddings.embed_documents(["a", "bc"])] == [8, 8]
    rows = embeddings.embed_documents([f"document {number}" for number in range(200)])
    assert [len(row) for row in rows] == [8] * 200


def test_errors_are_the_clients_own_and_a_failure_is_tried_again(
    langchain: ModuleType, speaking: Served
) -> None:
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(openai.AuthenticationError):
        connected(langchain.ChatOpenAI, speaking, api_key="wrong").invoke("greet")
    with pytest.raises(ContextOverflowError, match="5006 tokens"):
        connected(langchain.ChatOpenAI, speaking).invoke("x" * 5000)
    with pytest.raises(openai.BadRequestError, match="temperature = -1"):
        connected(langchain.ChatOpenAI, speaking, temperature=-1).invoke("greet")
    assert text_of(connected(langchain.ChatOpenAI, speaking, max_retries=1).invoke("flaky")) == HELLO
