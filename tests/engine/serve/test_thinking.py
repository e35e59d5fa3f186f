"""A model that reasons between tags, through the openai client: an engine that says given texts."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quengine import SamplingParams
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.speaking_engine import SpeakingEngine, ThinkingModel

THOUGHT, TEXT, PARIS = "They greet. “Hé!”", "Hello! <think>“Ça va?”</think>", '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
SAYS = {
    "greet": f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}",
    "opened": f"{THOUGHT}\n</think>\n\n{TEXT}",
    "weather": f"<think>\n{THOUGHT}\n</think>\n\n{CALL}",
    "plain": TEXT,
}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
OPENED = {"chat_template_kwargs": {"opened": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(
        lambda: SpeakingEngine(SAYS, ThinkingModel(4096)), settings={"defaults": SamplingParams()}
    ) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai() as made:
        yield made


def chat(client: openai.OpenAI, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}], **more)


def parts(answer: Any, stream: bool) -> tuple[str, str, list[str], str]:
    """Reasoning, text, arguments of calls and the reason of the end."""
    if not stream:
        (choice,) = answer.choices
        message = choice.message
        calls = [call.function.arguments for call in message.tool_calls or []]
        return (
            getattr(message, "reasoning_content", ""),
            message.content or "",
            calls,
            choice.finish_reason,
        )
    choices = [chunk.choices[0] for chunk in answer if chunk.choices]
    thought = "".join(getattr(c.delta, "reasoning_content", None) or "" for c in choices)
    deltas = [delta for c in choices for delta in c.delta.tool_calls or []]
    calls = ["".join(delta.function.arguments or "" for delta in deltas)] if deltas else []
    return thought, "".join(c.delta.content or "" for c in choices), calls, choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_text_are_apart(client: openai.OpenAI, stream: bool) -> None:
    assert parts(chat(client, "greet", stream=stream), stream) == (THOUGHT, TEXT, [], "stop")
    opened = chat(client, "opened", stream=stream, extra_body=OPENED)
    assert parts(opened, stream) == (THOUGHT, TEXT, [], "stop")
    assert parts(chat(client, "plain", stream=stream), stream) == ("", TEXT, [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_behind_reasoning_are_calls(client: openai.OpenAI, stream: bool) -> None:
    answer = chat(client, "weather", tools=TOOLS, stream=stream)
    assert parts(answer, stream) == (THOUGHT, "", [PARIS], "tool_calls")


def test_an_answer_cut_within_the_section_is_reasoning(client: openai.OpenAI) -> None:
    answer = chat(client, "opened", max_tokens=9, extra_body=OPENED)
    assert parts(answer, False) == (THOUGHT[:9].rstrip(), "", [], "length")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 9


def test_usage_counts_reasoning(client: openai.OpenAI) -> None:
    usage = chat(client, "opened", extra_body=OPENED).usage
    between = (
        len(f"{THOUGHT}\n</think>".encode()) - 1
    )  # a byte is a token, and the last one closes the section
    assert usage.completion_tokens_details.reasoning_tokens == between


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_reasoning_items(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.responses.create(model="fake", input="opened", stream=stream, extra_body=OPENED)
    if stream:
        events = list(answer)
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == THOUGHT
        answer = events[-1].response
    thought, said = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT)
    assert said.content[0].text == TEXT
