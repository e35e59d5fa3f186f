"""The chat page in a headless Chromium, against the fake engine, whose every word is known.

Wants a Chromium on PATH (Debian's package `chromium`) and the playwright package (`pip install -e '.[browser]'`);
skipped without. QUENGINE_SCREENSHOTS=FOLDER keeps pictures of what is tested.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quengine.request.sampling_params import SamplingParams
from tests.engine.serve.fake_engine import FakeEngine, FakeModel, expected_tokens
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.speaking_engine import SpeakingEngine

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[browser]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
NARROW = {"width": 390, "height": 780}
MODEL = FakeModel(4096)


def words(prompt: str, seed: int, count: int) -> str:
    """The answer to a conversation rendered as `prompt`."""
    return MODEL.decode(expected_tokens(MODEL.encode(prompt, True, False), seed, 0, count)).strip()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    defaults = SamplingParams(max_tokens=12)
    with serving(lambda: FakeEngine(step_s=0.01), settings={"defaults": defaults}) as running:
        yield running


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """The page as a new visitor sees it. What its console says is wrong fails the test."""
    context = browser.new_context(viewport={"width": 1100, "height": 700})
    opened = context.new_page()
    opened.set_default_timeout(10_000)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    opened.goto(served.url)
    yield opened
    context.close()
    assert not problems


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answered(page: Any, count: int = 1) -> Any:
    """The newest answer, once `count` answers are whole."""
    sync_api.expect(page.locator("#log .assistant .info", has_text="tok/s")).to_have_count(count)
    return page.locator("#log .assistant .text").last


def choose(page: Any, **settings: object) -> None:
    if not page.locator("#temperature").is_visible():
        page.get_by_text("Settings", exact=True).click()
    for name, value in settings.items():
        page.locator(f"#{name}").fill(str(value))


def shot(page: Any, name: str) -> None:
    folder = os.environ.get("QUENGINE_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def test_a_message_is_answered_with_the_engines_text_and_its_costs(page: Any) -> None:
    choose(page, seed=3, max_tokens=6)
    ask(page, "hi there")
    assert answered(page).inner_text() == words("user: hi there", 3, 6)
    info = page.locator("#log .assistant .info").inner_text()
    assert re.search(r"6 tokens, [\d.]+ tok/s; prompt 14 .* ended by length, seed 3", info)
    assert page.locator("#log .user .text").inner_text() == "hi there"
    ask(page, "and now")
    prompt = f"user: hi there\nassistant: {words('user: hi there', 3, 6)}\nuser: and now"
    assert answered(page, 2).inner_text() in (
        words(prompt, 3, 6),
        words(prompt.replace("\nuser", " \nuser"), 3, 6),
    )


def test_an_answer_streams_and_stops_with_escape_and_with_the_button(page: Any, served: Served) -> None:
    choose(page, max_tokens=3000)
    worker = served.server.worker
    for stop in (lambda: page.keyboard.press("Escape"), page.get_by_role("button", name="Stop").click):
        ask(page, "a long one")
        text = page.locator("#log .assistant .text").last
        sync_api.expect(text).to_contain_text(re.compile(r"(w\d+ ){4}"))
        early = text.inner_text()
        sync_api.expect(text).not_to_have_text(early)
        stop()
        sync_api.expect(page.locator("#log .assistant .info").last).to_contain_text("stopped")
        assert served.wait_until(lambda: worker.idle and not worker.stats.slots)
        assert text.inner_text().startswith(early.strip())
        assert page.get_by_role("button", name="Send").is_visible()


def test_chats_are_kept_opened_again_and_deleted(page: Any) -> None:
    ask(page, "first chat")
    answered(page)
    page.keyboard.press("Alt+n")
    sync_api.expect(page.locator("#log .assistant")).to_have_count(0)
    ask(page, "second chat")
    answered(page)
    page.reload()
    titles = page.locator("#chats li button:first-child")
    sync_api.expect(titles).to_have_text(["second chat", "first chat"])
    titles.nth(1).click()
    assert page.locator("#log .user .text").inner_text() == "first chat"
    page.get_by_role("button", name="Delete first chat").click()
    sync_api.expect(titles).to_have_text(["second chat"])


def test_settings_are_sent_kept_and_given_back_to_the_server(page: Any) -> None:
    sync_api.expect(page.locator("#temperature")).to_have_attribute("placeholder", "0.8")
    choose(page, temperature=0.5, seed=9, max_tokens=2, system="be brief")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "hi")
    body = sent.value.post_data_json
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.5, 9, 2)
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    answered(page)
    page.reload()
    assert page.locator("#seed").input_value() == "9"
    page.get_by_text("Settings", exact=True).click()
    page.get_by_role("button", name="Server's defaults").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Alt+r")
    assert {"messages", "stream", "stream_options"} == sent.value.post_data_json.keys()
    answered(page)


def test_the_live_view_shows_speed_slots_and_cache(page: Any) -> None:
    live = page.get_by_role("status")
    sync_api.expect(live).to_contain_text("0 of 64 slots · 0 waiting · cache 0%")
    choose(page, max_tokens=3000)
    ask(page, "go on")
    sync_api.expect(live).to_contain_text(re.compile(r"[1-9][\d.]* tok/s · 1 of 64 slots"))
    page.keyboard.press("Escape")
    sync_api.expect(live).to_contain_text("0 of 64 slots")
    assert page.title() == "fake"


def test_shift_enter_breaks_the_line_and_everything_is_reached_by_tab(page: Any) -> None:
    box = page.get_by_label("Message", exact=True)
    assert box.evaluate("e => e === document.activeElement")
    box.type("one")
    page.keyboard.press("Shift+Enter")
    box.type("two")
    assert box.input_value() == "one\ntwo"
    page.keyboard.press("Enter")
    answered(page)
    assert page.locator("#log .user .text").inner_text() == "one\ntwo"
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("() => document.activeElement.id || document.activeElement.textContent"))
    assert {"again", "send", "new", "log"} <= set(seen), seen


def test_what_fails_is_shown_and_the_message_can_be_sent_again(browser: Any, served: Served) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(served.url)
    ask(page, "please fail")
    sync_api.expect(page.locator("#log .error")).to_contain_text("logits are not finite")
    sync_api.expect(page.get_by_role("button", name="Again")).to_be_enabled()
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_nothing_sticks_out_and_text_can_be_read(page: Any, scheme: str, width: str) -> None:
    page.emulate_media(color_scheme=scheme)
    if width == "narrow":
        page.set_viewport_size(NARROW)
        page.reload()
    shot(page, f"{scheme}-{width}-empty")
    ask(page, "hi " * 60 + "\n```\ncode that goes on and on " + "and on " * 40 + "\n```\nlast line")
    answered(page)
    choose(page, seed=1)
    shot(page, f"{scheme}-{width}-settings")
    page.get_by_text("Settings", exact=True).click()
    shot(page, f"{scheme}-{width}")
    if width == "narrow":
        page.get_by_text("Chats", exact=True).click()
        shot(page, f"{scheme}-{width}-chats")
    box = page.locator("#chats li button").last.bounding_box()
    assert 0 < box["x"] < box["x"] + box["width"] <= page.viewport_size["width"]
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("() => document.documentElement.scrollHeight <= innerHeight")
    for part in ("#input", "#send", "#again", "#new", "#live"):
        assert page.locator(part).is_visible()


def test_what_a_model_thinks_stands_before_its_answer_and_is_not_sent_back(browser: Any) -> None:
    says = {
        "user: one": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
        "user: one\nassistant: Hello.\nuser: two": "<|channel|>final<|message|>Again.",
    }
    settings = {"defaults": SamplingParams()}
    with serving(lambda: SpeakingEngine(says), settings=settings) as served, browser.new_context() as context:
        page = context.new_page()
        page.goto(served.url)
        ask(page, "one")
        assert answered(page).inner_text() == "Hello."
        assert page.locator("#log .assistant .thought").last.inner_text() == "Hm."
        ask(page, "two")
        assert answered(page, 2).inner_text() == "Again."
        page.reload()
        assert page.locator("#log .assistant .thought").all_inner_texts() == ["Hm.", ""]
