"""A model that reasons between tags, through the openai client: an engine that says given texts."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import openai
import pytest

from quengine import LLM, SamplingParams
from quengine.request.chat_options import ChatOptions
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.speaking_engine import SpeakingEngine, ThinkingModel, chat
from tests.gguf_builder import ModelSizes
from tests.tiny_models import chat_vocabulary, write_tiny

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


def test_reasoning_stays_in_the_text_where_that_is_asked(client: openai.OpenAI) -> None:
    for given in ("auto", "deepseek"):
        assert parts(chat(client, "greet", extra_body={"reasoning_format": given}), False)[:2] == (
            THOUGHT,
            TEXT,
        )
    assert parts(chat(client, "greet", extra_body={"reasoning_format": "none"}), False)[:2] == (
        "",
        SAYS["greet"],
    )
    with pytest.raises(openai.BadRequestError, match="must be none, deepseek or auto"):
        chat(client, "greet", extra_body={"reasoning_format": "raw"})


# --- a tiny model whose template has a switch and opens the section

TEMPLATE = (
    "{{ date_string }}\n{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
START = "<|im_start|>assistant\n"
HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def tiny(model_path: Path) -> Iterator[Served]:
    with serving(
        lambda: LLMEngine(LLM(model_path, device="cpu")), settings={"model_names": ("fake",)}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thinking") / "tiny.gguf"
    vocabulary = chat_vocabulary() | {"tokenizer.chat_template": TEMPLATE}
    sizes = ModelSizes(embedding=64, feed_forward=128, context=1024)
    return write_tiny(path, kind="Q8_0", sizes=sizes, vocabulary=vocabulary)


def prompt_of(served: Served, *messages: dict[str, Any], **fields: Any) -> Any:
    with served.http() as http:
        answer = http.post("/apply-template", json={"messages": messages, **fields}).json()
    return answer["prompt"].partition("\n")[2] if "prompt" in answer else answer["error"]["message"]


def test_reasoning_is_on_unless_it_is_switched_off(tiny: Served) -> None:
    on, off = f"{START}<think>\n", f"{START}<think>\n\n</think>\n\n"
    assert prompt_of(tiny, HELLO).endswith(on)
    assert prompt_of(tiny, HELLO, reasoning_effort="high").endswith(on)
    for fields in (
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert prompt_of(tiny, HELLO, **fields).endswith(off)


def test_the_date_is_todays(tiny: Served) -> None:
    with tiny.http() as http:
        prompt = http.post("/apply-template", json={"messages": [HELLO]}).json()["prompt"]
    assert abs(datetime.strptime(prompt.partition("\n")[0], "%d %b %Y") - datetime.now()) < timedelta(days=2)


def test_an_answer_at_the_end_is_continued(tiny: Served) -> None:
    said = {"role": "assistant", "content": "I <|im_end|> am "}
    off = f"{START}<think>\n\n</think>\n\n"
    assert prompt_of(tiny, HELLO, said).endswith(f"{off}I <|im_end|> am ")
    assert prompt_of(tiny, HELLO, said, continue_final_message=True).endswith(f"{off}I <|im_end|> am ")
    thinking = {"role": "assistant", "content": "", "reasoning_content": "They"}
    assert prompt_of(tiny, HELLO, thinking).endswith(f"{START}<think>\nThey")
    assert prompt_of(tiny, HELLO, {**said, "content": "", "reasoning": "Hm"}).endswith("<think>\nHm")
    parts = [{"type": "text", "text": "I"}, {"type": "text", "text": "am"}]
    assert prompt_of(tiny, HELLO, {**said, "content": parts}).endswith(f"{off}I\n\nam")
    both = {**said, "reasoning_content": "They"}
    assert prompt_of(tiny, HELLO, both).endswith(f"{START}<think>\nThey\n</think>\n\nI <|im_end|> am ")
    assert prompt_of(tiny, HELLO, said, add_generation_prompt=False).endswith("am <|im_end|>\n")
    assert prompt_of(tiny, HELLO, said, continue_final_message=False).endswith(
        f"<|im_end|>\n{START}<think>\n"
    )
    assert prompt_of(tiny, HELLO, add_generation_prompt=False).endswith("Hello<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "fields", "error"),
    [
        ([HELLO], {"continue_final_message": True}, "the last message must be the assistant's"),
        ([], {"continue_final_message": True}, "the last message must be the assistant's, and there is none"),
        ([HELLO] + 2 * [{"role": "assistant", "content": "a"}], {}, "two of the assistant's"),
        ([HELLO], {"continue_final_message": True, "add_generation_prompt": True}, "only one of them"),
    ],
)
def test_what_cannot_be_continued_is_an_error(
    messages: list[dict[str, Any]], fields: dict[str, Any], error: str, tiny: Served
) -> None:
    assert error in prompt_of(tiny, *messages, **fields)


def test_a_continued_answer_goes_on_in_its_section(tiny: Served) -> None:
    thinking = {"role": "assistant", "content": "", "reasoning_content": "They ask <|im_end|> me"}
    with tiny.openai() as client:
        messages: Any = [HELLO, thinking]
        answer = client.chat.completions.create(model="fake", messages=messages, max_tokens=5, seed=1)
        assert answer.choices[0].message.model_extra["reasoning_content"]
        assert not answer.choices[0].message.content
        answer = chat(client, "Hello", max_tokens=5, seed=1, extra_body={"enable_thinking": False})
        assert answer.choices[0].message.content and not answer.choices[0].message.model_extra


@pytest.mark.parametrize("schema", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_spent_budget_closes_the_section(budget: int, schema: bool, tiny: Served) -> None:
    more: dict[str, Any] = {"extra_body": {"reasoning_budget": budget}, "seed": 2, "max_tokens": 60}
    if schema:
        more["response_format"] = {"type": "json_object", "schema": {"enum": ["yes", "no"]}}
    with tiny.openai() as client:
        answer = chat(client, "Hello", **more)
    message = answer.choices[0].message
    details = answer.usage.completion_tokens_details
    assert message.content and "</think>" not in message.content
    assert (details.reasoning_tokens if details else 0) <= budget + 3 + len("\n</think>")
    assert bool((message.model_extra or {}).get("reasoning_content")) == (budget > 0)
    if schema:
        assert message.content in ('"yes"', '"no"')


def test_a_budget_holds_in_a_section_that_has_no_switch(tiny: Served) -> None:
    with tiny.openai() as client:
        kwargs = {"enable_thinking": True}
        body = {"reasoning_budget": 0, "chat_template_kwargs": kwargs}
        message = chat(client, "Hello", seed=2, max_tokens=30, extra_body=body).choices[0].message
        assert message.content and "</think>" not in message.content and not message.model_extra


# --- the server's own settings


def test_the_servers_options_hold_where_a_request_has_none(model_path: Path) -> None:
    template = (
        "{{ mood }} {{ lamp }} {% if enable_thinking %}<think>{% endif %}</think>"
        "{{ messages | map(attribute='content') | join(' ') }}"
    )
    options = ChatOptions(template, None, '{"mood": "good", "lamp": "on"}', "none", 0, system="kind")
    settings = {"model_names": ("fake",), "chat": options}
    engine = lambda: LLMEngine(LLM(model_path, device="cpu", chat_template=options.source()))  # noqa: E731
    with serving(engine, settings=settings) as running, running.http() as http:
        body = {"messages": [HELLO], "chat_template_kwargs": {"lamp": "off"}}
        shown = http.post("/apply-template", json=body).json()["prompt"]
        assert shown == "good off <think></think>kind Hello"
        body["messages"] = [{"role": "system", "content": "brief"}, HELLO]
        assert http.post("/apply-template", json=body).json()["prompt"].endswith(">brief Hello")
        long = {"messages": [{"role": "user", "content": "a" * 20_000}]}
        assert http.post("/apply-template", json=long).json()["prompt"].startswith("good on ")
        with running.openai() as client:
            message = chat(client, "Hello", max_tokens=3).choices[0].message
            assert message.content and not message.model_extra
