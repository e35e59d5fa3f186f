"""The chat page and a context that is nearly full, or too small."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from quengine.request.sampling_params import SamplingParams
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.page.driving import (
    NARROW,
    SIZE,
    answered,
    ask,
    look,
    reopened,
    shot,
    wait_for_text,
)
from tests.engine.serve.serving import Served, serving

pytestmark = pytest.mark.browser
CTX_SIZE = 512


def small() -> FakeEngine:
    engine = FakeEngine(CTX_SIZE)
    engine.model.facts = engine.model.facts | {"n_ctx_train": 8192}
    return engine


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(small, settings={"defaults": SamplingParams(max_tokens=8)}) as running:
        yield running


@pytest.fixture
def page(one_tab: Any, served: Served) -> Iterator[Any]:
    with reopened(one_tab, served.url) as made:
        yield made


def overflow(page: Any) -> Any:
    """A chat of two answered questions, and a third that does not fit."""
    for count, letter in enumerate("ab", 1):
        ask(page, letter * 150)
        answered(page, count)
    ask(page, "c" * 150)
    found = page.locator(".overflow")
    found.wait_for()
    return found


def test_a_prompt_over_the_context_is_said_with_numbers_and_what_helps(page: Any) -> None:
    found = overflow(page)
    said = re.search(r"The prompt has (\d+) tokens, and the context holds 512\.", found.inner_text())
    assert said is not None and 512 <= int(said[1]) < 1024
    assert "started with -c 1024." in found.inner_text()
    names = found.get_by_role("button").all_inner_texts()
    assert names == ["Edit the message", "Leave out the oldest 2 messages", "Ask in a new chat", "Try again"]
    page.reload()
    found.get_by_role("button", name="Edit the message").click()
    field = page.get_by_label("Edit the message")
    assert field.input_value() == "c" * 150
    field.fill("short")
    page.keyboard.press("Control+Enter")
    answered(page, 3)
    wait_for_text(page.locator(".user .branches"), "2/2")


def test_the_oldest_messages_are_left_out_in_a_branch_of_their_own(page: Any) -> None:
    found = overflow(page)
    with page.expect_request("**/v1/chat/completions") as sent:
        found.get_by_role("button", name="Leave out the oldest 2 messages").click()
    given = [message["content"][0] for message in sent.value.post_data_json["messages"]]
    assert given == ["b", "w", "c"]
    answered(page, 2)
    assert not page.locator(".error").count()
    wait_for_text(page.locator(".user .branches").first, "2/2")
    page.locator(".user").first.hover()
    page.get_by_role("button", name="Previous version").first.click()
    wait_for_text(page.locator(".user .plain").first, "a" * 150)


def test_the_message_is_asked_in_a_new_chat(page: Any) -> None:
    found = overflow(page)
    before = page.url
    with page.expect_request("**/v1/chat/completions") as sent:
        found.get_by_role("button", name="Ask in a new chat").click()
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["c" * 150]
    answered(page)
    assert page.url != before and page.locator(".chats .title").count() == 2
    page.go_back()
    found.wait_for()


def test_a_message_that_is_too_long_by_itself_can_be_edited(page: Any) -> None:
    ask(page, "x" * 9000)
    found = page.locator(".overflow")
    found.wait_for()
    assert found.get_by_role("button").all_inner_texts() == ["Edit the message", "Try again"]
    assert "-c 8192, which is all that the model was trained for, and too little" in found.inner_text()


def test_a_gauge_shows_the_context_and_warns_near_its_end(page: Any) -> None:
    gauge = page.get_by_role("meter", name="Context")
    assert not gauge.count()
    ask(page, "hi")
    answered(page)
    assert gauge.get_attribute("aria-valuenow") == str(len("user: hi") + 8)
    assert gauge.get_attribute("aria-valuemax") == "512"
    assert gauge.inner_text().strip() == "16 / 512"
    page.reload()
    gauge.wait_for()
    assert gauge.get_attribute("aria-valuenow") == "16"
    ask(page, "y" * 400)
    answered(page, 2)
    assert "nearly full" in (gauge.get_attribute("aria-valuetext") or "")
    wait_for_text(gauge, re.compile(r"Nearly full: 4\d\d / 512"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_it_looks_right(one_tab: Any, served: Served, scheme: str, width: str) -> None:
    size = NARROW if width == "narrow" else SIZE
    with reopened(one_tab, served.url, size, scheme) as page:
        overflow(page)
        shot(page, f"{scheme}-{width}-overflow")
        assert not look(page, "contrast") and not look(page, "unnamed")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
