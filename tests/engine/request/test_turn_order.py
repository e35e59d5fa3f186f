"""Conversations in orders that released models' templates do not write: they are brought into one that they do."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quengine.models.template.chat_template import ChatTemplate, ChatTemplateError
from quengine.request.turn_order import Messages, TurnOrder
from tests.llama_cpp_source import llama_cpp_source

LATER = [
    {"role": "system", "content": "Be kind."},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Good morning"},
    {"role": "system", "content": "It is Monday."},
    {"role": "assistant", "content": "Morning!"},
    {"role": "system", "content": "It rains."},
    {"role": "user", "content": "How is the weather?"},
]
RUNS = [
    {"role": "user", "content": "Good morning"},
    {"role": "user", "content": "How is the weather?"},
]


@cache
def template(name: str) -> ChatTemplate:
    path: Path = llama_cpp_source() / "models" / "templates" / f"{name}.jinja"
    return ChatTemplate(path.read_text("utf-8"), "<s>", "</s>")


def rendered(name: str, messages: Messages) -> str | None:
    try:
        return template(name).render(messages)
    except ChatTemplateError:
        return None


def order(name: str) -> TurnOrder:
    return TurnOrder.of(lambda messages: rendered(name, messages))


def in_order(text: str, messages: Messages) -> bool:
    places = [text.find(message["content"]) for message in messages]
    return -1 not in places and places == sorted(places)


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "LFM2-8B-A1B", "GLM-4.6"])
def test_a_template_that_writes_every_message_is_given_them_as_they_are(name: str) -> None:
    assert order(name) == TurnOrder(True, True)
    assert order(name).fit(LATER) is LATER


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3.5-4B",
        "Mistral-Small-3.2-24B-Instruct-2506",
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "openai-gpt-oss-120b",
        "HuggingFaceTB-SmolLM3-3B",
        "MiniMax-M2",
        "NVIDIA-Nemotron-Nano-v2",
    ],
)
def test_a_template_that_refuses_or_loses_later_system_messages_is_given_their_text_in_place(
    name: str,
) -> None:
    before = rendered(name, LATER)
    assert before is None or not in_order(before, LATER)
    after = rendered(name, order(name).fit(LATER))
    assert after is not None
    assert in_order(after, LATER)


@pytest.mark.parametrize("name", ["Mistral-Small-3.2-24B-Instruct-2506", "google-gemma-2-2b-it"])
def test_a_template_of_alternating_turns_is_given_one_users_message(name: str) -> None:
    assert rendered(name, RUNS) is None
    after = rendered(name, order(name).fit(RUNS))
    assert after is not None
    assert in_order(after, RUNS)


def test_a_prompt_that_is_extended_keeps_its_beginning() -> None:
    fit = TurnOrder(system_messages=False, user_runs=False).fit
    whole = fit(LATER)
    for length in range(1, len(LATER) + 1):
        if LATER[length - 1]["role"] in ("assistant", "user") and length < len(LATER):
            begun = fit(LATER[:length])
            assert whole[: len(begun) - 1] == begun[:-1]
            assert str(whole[len(begun) - 1]["content"]).startswith(str(begun[-1]["content"]))


def test_a_system_message_after_a_tools_result_is_text_of_the_result() -> None:
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    result = {"role": "tool", "content": "sunny", "tool_call_id": "a"}
    reminder = {"role": "system", "content": "Be brief."}
    fitted = TurnOrder(system_messages=False).fit([*RUNS[:1], call, result, reminder])
    assert fitted == [*RUNS[:1], call, {**result, "content": "sunny\n\nBe brief."}]


def test_contents_that_are_no_text_stay_messages_of_their_own() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Good morning"}]}
    reminder = {"role": "system", "content": "Be brief."}
    fitted = TurnOrder(system_messages=False, user_runs=False).fit([parts, reminder])
    assert fitted == [parts, {**reminder, "role": "user"}]
