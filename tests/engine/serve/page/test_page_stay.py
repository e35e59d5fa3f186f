"""What stays on the chat page: each chat at its address, what is not sent, and answers that go on through a reload, a
closed tab, a broken connection and a model that is being loaded."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quengine.request.sampling_params import SamplingParams
from quengine.serve.processes.shared_engine import Event
from tests.engine.serve.fake_engine import FakeEngine, FakeModel, expected_tokens
from tests.engine.serve.page.driving import (
    act,
    answered,
    ask,
    attach,
    choose,
    menu,
    opened,
    reopened,
    wait_for_text,
)
from tests.engine.serve.serving import Served, serving

pytestmark = pytest.mark.browser
PARTIAL = re.compile(r"(w\d+ ){4}")
CHAT = re.compile(r"#/chat/[\w-]+$")
LONG = 150
"""Tokens of an answer that takes a second and a half."""
WITHOUT_LOCKS = "delete Navigator.prototype.locks"
"""As on a page of the local network, which browsers hold for insecure."""


def words(prompt: str, seed: int, count: int) -> str:
    model = FakeModel(4096)
    return model.decode(expected_tokens(model.encode(prompt, True, False), seed, 0, count)).strip()


class GatedEngine(FakeEngine):
    """Stands still while its gate is closed."""

    gate = threading.Event()

    def step(self) -> list[Event]:
        assert self.gate.wait(60)
        return super().step()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    GatedEngine.gate.set()
    defaults = SamplingParams(max_tokens=12)
    with serving(lambda: GatedEngine(step_s=0.01), settings={"defaults": defaults}) as running:
        try:
            yield running
        finally:
            GatedEngine.gate.set()


@pytest.fixture
def page(one_tab: Any, served: Served) -> Iterator[Any]:
    with reopened(one_tab, served.url) as made:
        yield made


def box(page: Any) -> Any:
    return page.get_by_label("Message", exact=True)


def shows(page: Any, text: str) -> None:
    wait_for_text(page.locator(".user .plain"), text)


def test_each_chat_has_an_address_and_back_goes_through_them(page: Any) -> None:
    ask(page, "first chat")
    answered(page)
    first = page.url
    assert CHAT.search(first)
    page.keyboard.press("Alt+n")
    page.locator(".empty").wait_for()
    assert page.url.endswith("#/")
    ask(page, "second chat")
    answered(page)
    second = page.url
    assert CHAT.search(second) and second != first
    page.go_back()
    shows(page, "first chat")
    assert page.url == first and page.title() == "first chat · fake"
    page.go_forward()
    shows(page, "second chat")
    page.reload()
    shows(page, "second chat")
    assert page.url == second
    page.get_by_role("button", name="first chat", exact=True).click()
    shows(page, "first chat")
    page.go_back()
    shows(page, "second chat")
    other = page.context.new_page()
    other.goto(first)
    shows(other, "first chat")


def test_an_address_of_no_chat_says_so_and_offers_a_new_one(page: Any) -> None:
    ask(page, "to be deleted")
    answered(page)
    gone = page.url
    menu(page, "Actions on to be deleted", "Delete")
    page.locator(".empty").wait_for()
    assert page.url.endswith("#/")
    page.goto(gone)
    page.get_by_role("heading", name="This chat is not here").wait_for()
    page.get_by_role("button", name="New chat", exact=True).last.click()
    page.get_by_role("heading", name="What shall we talk about?").wait_for()
    assert page.url.endswith("#/")
    page.goto(f"{page.url}chat/%00")
    page.get_by_role("heading", name="This chat is not here").wait_for()
    ask(page, "anew")
    answered(page)
    assert CHAT.search(page.url)
    page.reload()
    shows(page, "anew")


def test_what_is_not_sent_is_there_after_a_reload(page: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("remember the milk")
    box(page).fill("of a new chat")
    page.reload()
    assert box(page).input_value() == "of a new chat"
    page.keyboard.press("Enter")
    answered(page)
    box(page).fill("of this chat")
    attach(page, tmp_path / "notes.txt")
    page.locator(".composer .chips li").wait_for()
    page.keyboard.press("Alt+n")
    page.locator(".empty").wait_for()
    assert box(page).input_value() == ""
    page.go_back()
    shows(page, "of a new chat")
    page.reload()
    shows(page, "of a new chat")
    assert box(page).input_value() == "of this chat"
    assert page.locator(".composer .chips li").inner_text().startswith("notes.txt")
    page.get_by_role("button", name="Remove notes.txt").click()
    box(page).fill("")
    page.reload()
    shows(page, "of a new chat")
    assert box(page).input_value() == "" and not page.locator(".composer .chips").count()


@pytest.mark.parametrize("locks", [True, False])
def test_an_answer_goes_on_through_a_reload(browser: Any, served: Served, locks: bool) -> None:
    with opened(browser, served.url) as page:
        if not locks:
            page.context.add_init_script(WITHOUT_LOCKS)
            page.reload()
        choose(page, max_tokens=LONG, seed=5)
        ask(page, "a long one")
        for _ in range(2):
            wait_for_text(page.locator(".assistant .markdown"), PARTIAL)
            page.reload()
        assert answered(page).inner_text() == words("user: a long one", 5, LONG)
        assert not page.get_by_text("Interrupted").count()
        assert f"{LONG} tokens" in page.locator(".assistant .costs").inner_text()
        page.reload()
        assert answered(page).inner_text() == words("user: a long one", 5, LONG)


def test_another_tab_goes_on_with_the_answer_of_one_that_is_closed(page: Any) -> None:
    first = page.context.new_page()
    first.goto(page.url)
    box(first).wait_for()
    choose(first, max_tokens=LONG, seed=5)
    ask(first, "a long one")
    wait_for_text(first.locator(".assistant .markdown"), PARTIAL)
    GatedEngine.gate.clear()
    other = page.context.new_page()
    other.goto(first.url)
    wait_for_text(other.locator(".assistant .markdown"), PARTIAL)
    assert not other.get_by_role("button", name="Regenerate").count()
    first.close()
    GatedEngine.gate.set()
    assert answered(other).inner_text() == words("user: a long one", 5, LONG)


def test_an_answer_whose_stream_is_gone_is_kept_as_far_as_it_came_and_is_continued(
    page: Any, served: Served
) -> None:
    choose(page, max_tokens=3000)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "a long one")
    text = page.locator(".assistant .markdown")
    wait_for_text(text, PARTIAL)
    early = text.inner_text().strip()
    page.route("**/v1/stream?*", lambda route: route.fulfill(status=404, json={"error": {"message": "none"}}))
    page.reload()
    wait_for_text(page.locator(".assistant"), "Interrupted")
    with served.http() as client:
        name = sent.value.headers["x-conversation-id"]
        client.delete("/v1/stream", params={"conv_id": name})
    kept = text.inner_text().strip()
    assert kept.startswith(early)
    page.unroute("**/v1/stream?*")
    choose(page, max_tokens=4)
    with page.expect_request("**/v1/chat/completions") as sent:
        act(page, "assistant", "Continue")
    assert sent.value.post_data_json["messages"][-1]["content"].strip() == kept
    answered(page)
    assert text.inner_text().startswith(kept) and len(text.inner_text()) > len(kept)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.97])
def test_a_connection_that_breaks_is_read_on_from_its_place(page: Any, served: Served, part: float) -> None:
    choose(page, max_tokens=20, seed=5)

    def half(route: Any) -> None:
        request = route.request
        with served.http() as client:
            headers = {"X-Conversation-Id": request.headers["x-conversation-id"]}
            whole = client.post("/v1/chat/completions", json=request.post_data_json, headers=headers).content
        route.fulfill(content_type="text/event-stream", body=whole[: int(part * len(whole))])

    page.route("**/v1/chat/completions", half)
    ask(page, "hi there")
    assert answered(page).inner_text() == words("user: hi there", 5, 20)
    assert not page.locator(".error").count()


def test_a_stopped_or_deleted_answer_ends_at_the_server(page: Any, served: Served) -> None:
    worker = served.server.worker
    for number, end in enumerate(("Stop", "Delete")):
        choose(page, max_tokens=3000)
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, f"to {end}")
        wait_for_text(page.locator(".assistant .markdown").nth(number), PARTIAL)
        if end == "Stop":
            page.keyboard.press("Escape")
        else:
            menu(page, "Actions on to Stop", "Delete")
        assert served.wait_until(lambda: worker.idle and not worker.stats.slots)
        name = sent.value.headers["x-conversation-id"]
        gone = httpx.get(f"{served.url}/v1/stream", params={"conv_id": name})
        assert gone.status_code == 404


def test_a_message_to_a_model_that_is_being_loaded_is_sent_when_it_is_there(browser: Any) -> None:
    loads = threading.Event()

    def engine() -> FakeEngine:
        assert loads.wait(60)
        return FakeEngine()

    with serving(engine, ready=False) as served:
        try:
            with opened(browser, served.url) as page:
                ask(page, "stopped")
                waiting = page.get_by_text("The model is being loaded. Your message is sent when")
                waiting.wait_for()
                page.keyboard.press("Escape")
                waiting.wait_for(state="detached")
                assert not page.locator(".assistant").count()
                ask(page, "hi there")
                waiting.wait_for()
                assert not page.locator(".error").count()
                page.reload()
                waiting.wait_for()
                loads.set()
                assert re.match(PARTIAL, answered(page).inner_text())
                wait_for_text(page.locator(".picker"), "fake")
        finally:
            loads.set()
