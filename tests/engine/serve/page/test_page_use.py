"""The chat page as people use it over time: keyboards and touch screens, drafts, two tabs, other people's files, and
windows that change their size."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quengine.request.sampling_params import SamplingParams
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.page.driving import (
    NARROW,
    act,
    answer_with,
    answered,
    ask,
    choose,
    close,
    look,
    menu,
    open_settings,
    opened,
    reopened,
    stream,
    wait_for_text,
)
from tests.engine.serve.serving import Served, serving

pytestmark = pytest.mark.browser
PARTIAL = re.compile(r"(w\d+ ){4}")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(
        lambda: FakeEngine(step_s=0.01), settings={"defaults": SamplingParams(max_tokens=12)}
    ) as running:
        yield running


@pytest.fixture
def page(one_tab: Any, served: Served) -> Iterator[Any]:
    with reopened(one_tab, served.url) as made:
        yield made


def box(page: Any) -> Any:
    return page.get_by_label("Message", exact=True)


def composing(element: Any, key: str, **fields: object) -> None:
    """A key while an input method composes."""
    event = {"key": key, "bubbles": True, "cancelable": True, "isComposing": True, **fields}
    element.evaluate("(e, event) => e.dispatchEvent(new KeyboardEvent('keydown', event))", event)


def test_an_input_methods_enter_and_escape_are_its_own(page: Any) -> None:
    choose(page, max_tokens=3000)
    box(page).fill("にほんご")
    composing(box(page), "Enter")
    composing(
        box(page), "Enter", isComposing=False, keyCode=229
    )  # Safari's, after the end of the composition
    page.wait_for_timeout(100)
    assert not page.locator(".message").count()
    page.keyboard.press("Enter")
    wait_for_text(page.locator(".assistant .markdown"), PARTIAL)
    composing(box(page), "Escape")
    page.wait_for_timeout(100)
    assert page.get_by_role("button", name="Stop").is_visible()
    page.keyboard.press("Escape")
    wait_for_text(page.locator(".assistant"), "Stopped")


def test_enter_breaks_the_line_on_a_touch_screen_and_control_enter_sends(
    browser: Any, served: Served
) -> None:
    with opened(browser, served.url, viewport=NARROW, has_touch=True, is_mobile=True) as page:
        box(page).type("one")
        page.keyboard.press("Enter")
        box(page).type("two")
        assert box(page).input_value() == "one\ntwo" and not page.locator(".message").count()
        page.keyboard.press("Control+Enter")
        wait_for_text(page.locator(".user .plain"), "one\ntwo")


def test_enter_during_an_answer_leaves_the_next_message_as_it_is(page: Any) -> None:
    choose(page, max_tokens=3000)
    ask(page, "a long one")
    wait_for_text(page.locator(".assistant .markdown"), PARTIAL)
    box(page).type("the next")
    page.keyboard.press("Enter")
    assert box(page).input_value() == "the next"
    act(page, "user", "Edit")
    page.get_by_label("Edit the message").fill("changed")
    page.keyboard.press("Control+Enter")
    assert page.get_by_label("Edit the message").input_value() == "changed"
    assert page.get_by_role("button", name="Send", exact=True).first.is_disabled()
    assert page.locator(".user").get_by_role("button", name="Answer again").count() == 0
    page.get_by_role("button", name="Cancel").click()
    assert page.locator(".user").get_by_role("button", name="Answer again").is_disabled()
    page.get_by_role("button", name="Stop").click()
    wait_for_text(page.locator(".assistant"), "Stopped")
    assert box(page).input_value() == "the next"


def test_escape_in_the_search_empties_it_and_stops_no_answer(page: Any) -> None:
    choose(page, max_tokens=3000)
    ask(page, "a long one")
    wait_for_text(page.locator(".assistant .markdown"), PARTIAL)
    search = page.get_by_label("Search chats")
    search.fill("long")
    search.press("Escape")
    assert search.input_value() == "" and page.get_by_role("button", name="Stop").is_visible()
    search.press("Escape")
    wait_for_text(page.locator(".assistant"), "Stopped")


def test_a_draft_stays_with_its_chat_and_that_of_a_new_chat_with_any_new_one(page: Any) -> None:
    ask(page, "first chat")
    answered(page)
    box(page).fill("of the first")
    page.keyboard.press("Alt+n")
    assert box(page).input_value() == ""
    box(page).fill("of a new one")
    page.get_by_role("button", name="first chat", exact=True).click()
    page.locator(".message").first.wait_for()
    assert box(page).input_value() == "of the first"
    page.keyboard.press("Alt+n")
    page.locator(".empty").wait_for()
    assert box(page).input_value() == "of a new one"
    page.keyboard.press("Enter")
    answered(page)
    page.keyboard.press("Alt+n")
    page.locator(".empty").wait_for()
    assert box(page).input_value() == ""


def test_a_notice_is_above_the_dialog_and_settings_come_back(one_tab: Any, served: Served) -> None:
    with reopened(one_tab, served.url, NARROW) as page:
        choose(page, system="be brief", temperature=0.3)
        open_settings(page)
        page.get_by_role("button", name="Use for new chats").click()
        notice = page.locator("dialog .notice")
        top = notice.evaluate(
            "e => { const r = e.getBoundingClientRect();"
            " return e.contains(document.elementFromPoint(r.x + r.width / 2, r.y + r.height / 2)); }"
        )
        assert top and "New chats begin with these" in notice.inner_text()
        page.get_by_role("button", name="Dismiss").click()
        page.get_by_role("button", name="Server's defaults").click()
        page.get_by_role("button", name="Undo").click()
        open_settings(page)
        assert page.locator("#system").input_value() == "be brief"
        assert page.locator("#temperature").input_value() == "0.3"
        close(page)


def test_a_number_out_of_its_range_is_said_in_the_settings(page: Any) -> None:
    open_settings(page)
    for name, wrong, right in (("temperature", "-5", "0.85"), ("top_p", "7", "0.999"), ("top_k", "1.5", "3")):
        field, text = page.locator(f"#{name}"), page.locator(f"#{name}-help")
        usual = text.inner_text()
        field.fill(wrong)
        wait_for_text(text.locator("xpath=self::*[@class='problem']"), re.compile(r"\S"))
        assert field.get_attribute("aria-invalid") == "true" and not look(page, "contrast")
        field.fill(right)
        wait_for_text(text, usual)
        assert field.get_attribute("aria-invalid") == "false"
    page.locator("#temperature").fill("-5")
    close(page)
    open_settings(page)
    assert page.locator("#temperature").get_attribute("aria-invalid") == "true"


USER = {"id": "a", "parent": None, "role": "user", "content": "hi"}
DAMAGED = [
    {"attachments": 5},
    {"attachments": [{"name": "a"}]},
    {"tokens": [{"text": "a"}]},
    {"costs": {}},
    {"thought": {}},
    {"parent": "a"},
]


def test_a_damaged_file_of_chats_is_refused_and_a_whole_one_keeps_its_days(page: Any, tmp_path: Path) -> None:
    path = tmp_path / "chats.json"

    def load(*chats: object) -> None:
        path.write_text(json.dumps({"format": "quengine-chats", "version": 1, "chats": chats}))
        page.get_by_label("File of chats").set_input_files(str(path))

    for wrong in DAMAGED:
        load({"title": "Bad", "leaf": "a", "messages": {"a": USER | wrong}})
        wait_for_text(page.locator(".notice"), "Not imported")
        page.get_by_role("button", name="Dismiss").click()
    path.write_text("[]")
    page.get_by_label("File of chats").set_input_files(str(path))
    wait_for_text(page.locator(".notice"), "Not imported: the file holds no chats of this page")
    assert not page.locator(".chats .title").count()
    settings = {"system": 5, "values": {"seed": 1}}
    load({"title": "Old", "leaf": "gone", "updated": 1e12, "messages": {"a": USER}, "settings": settings})
    wait_for_text(page.locator(".chats h2"), "Earlier")
    assert page.locator(".user .plain").inner_text() == "hi"
    answer_with(page, stream("hello"))
    ask(page, "still at work")
    answered(page)


def test_two_tabs_that_are_answered_in_one_chat_keep_both_answers(page: Any) -> None:
    ask(page, "begin")
    answered(page)
    other = page.context.new_page()
    other.goto(page.url)
    other.get_by_role("button", name="begin", exact=True).click()
    answered(other)
    for tab in (page, other):
        choose(tab, max_tokens=250)
    ask(page, "from here")
    wait_for_text(other.locator(".assistant .markdown").nth(1), PARTIAL)
    ask(other, "from there")  # after what has come of the first tab's answer
    answered(other, 3)
    for tab in (page, other):
        tab.reload()
        answered(tab, 3)
        texts = tab.locator(".assistant .markdown").all_inner_texts()
        assert [len(text.split()) for text in texts] == [12, 250, 250]


def test_another_branch_leaves_what_is_above_it_in_its_place(page: Any) -> None:
    answer_with(page, stream("line\n\n" * 40))
    for count, text in enumerate(("one", "two"), 1):
        ask(page, text)
        answered(page, count)
    first = page.locator(".user").first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("uno")
    page.keyboard.press("Control+Enter")
    wait_for_text(page.locator(".user .branches"), "2/2")
    page.locator("#log").evaluate("e => e.scrollTop = 0")
    page.wait_for_timeout(100)
    for label, text in (("Previous version", "one"), ("Next version", "uno")):
        first.get_by_role("button", name=label).click()
        wait_for_text(first, text)
        page.wait_for_timeout(100)
        assert page.locator("#log").evaluate("e => e.scrollTop") == 0


def test_an_answer_is_followed_unless_the_person_reads_above(page: Any) -> None:
    choose(page, max_tokens=3000)
    ask(page, "a long one")
    log = page.locator("#log")
    below = "e => Math.round(e.scrollHeight - e.scrollTop - e.clientHeight)"
    while log.evaluate("e => e.scrollHeight - e.clientHeight") < 100:
        page.wait_for_timeout(100)
    assert log.evaluate(below) <= 1
    log.evaluate("e => e.scrollTop = 0")
    page.wait_for_timeout(400)
    assert log.evaluate("e => e.scrollTop") == 0
    page.keyboard.press("Escape")
    wait_for_text(page.locator(".assistant"), "Stopped")
    assert log.evaluate("e => e.scrollTop") == 0


def test_a_button_jumps_to_the_end_which_is_followed_from_there(page: Any) -> None:
    choose(page, max_tokens=3000)
    ask(page, "a long one")
    log, jump = page.locator("#log"), page.get_by_role("button", name="Jump to the end")
    page.wait_for_function(
        "() => { const e = document.querySelector('#log'); return e.scrollHeight > e.clientHeight + 200; }"
    )
    assert not jump.count()
    log.evaluate("e => e.scrollTop = 0")
    jump.wait_for()
    jump.press("Enter")
    jump.wait_for(state="detached")
    height = log.evaluate("e => e.scrollHeight")
    page.wait_for_function(
        "height => { const e = document.querySelector('#log');"
        " return e.scrollHeight > height && e.scrollHeight - e.scrollTop - e.clientHeight < 2; }",
        arg=height,
    )
    assert log.evaluate("e => e === document.activeElement")
    page.keyboard.press("Escape")
    wait_for_text(page.locator(".assistant"), "Stopped")


def test_fingers_find_every_control(browser: Any, served: Served) -> None:
    """44 px both ways (WCAG 2.5.5); what stands in running text is exempt."""
    with opened(browser, served.url, viewport=NARROW, has_touch=True, is_mobile=True) as page:
        answer_with(page, stream("Text[^1]\n\n```python\nx = 1\n```\n\n[^1]: Note", thought="Hm."))
        box(page).fill("hi")
        page.keyboard.press("Control+Enter")
        answered(page)
        assert not look(page, "small")
        page.get_by_role("button", name="Show the chats").click()
        page.locator(".sidebar").wait_for()
        assert not look(page, "small")
        page.get_by_role("button", name="More", exact=True).click()
        page.get_by_role("menu").wait_for()
        assert not look(page, "small")
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        open_settings(page)
        assert not look(page, "small")


def test_a_name_is_given_up_with_escape_and_the_focus_goes_back(page: Any) -> None:
    ask(page, "my chat")
    answered(page)
    for key, after in (("Escape", "my chat"), ("Enter", "other")):
        menu(page, "Actions on my chat", "Rename")
        page.get_by_label("Name of the chat").fill("other")
        page.keyboard.press(key)
        page.get_by_label("Name of the chat").wait_for(state="detached")
        assert page.locator(".chats .title").inner_text() == after
        assert page.evaluate("document.activeElement.textContent") == after


def test_the_menu_of_a_chat_at_the_edge_of_the_list_is_seen_whole(page: Any, tmp_path: Path) -> None:
    chats = [{"title": f"chat {n}", "leaf": "a", "messages": {"a": USER}} for n in range(60)]
    (tmp_path / "chats.json").write_text(json.dumps({"format": "quengine-chats", "chats": chats}))
    page.get_by_label("File of chats").set_input_files(str(tmp_path / "chats.json"))
    page.locator(".chats li").nth(59).wait_for()
    edge = page.evaluate(
        "() => { const end = document.querySelector('.chats').getBoundingClientRect().bottom;"
        " return [...document.querySelectorAll('.chats li')]"
        ".findLastIndex(e => e.getBoundingClientRect().bottom < end); }"
    )
    row = page.locator(".chats li").nth(edge)
    row.hover()
    row.locator(".menu > button").click()
    whole = page.evaluate(
        "() => [...document.querySelectorAll('[role=menuitem]')].every(e => { const r = e.getBoundingClientRect();"
        " return e.contains(document.elementFromPoint(r.x + r.width / 2, r.bottom - 2)); })"
    )
    assert whole


def test_text_runs_in_its_own_direction_and_code_from_the_left(page: Any) -> None:
    answer_with(page, stream("مرحبا بالعالم\n\n- نقطة\n\n```python\n# مرحبا\n```\n\nEnglish", size=40))
    ask(page, "مرحبا")
    text = answered(page)
    assert page.locator(".user .plain").evaluate("e => getComputedStyle(e).direction") == "rtl"
    directions = text.evaluate(
        "e => [...e.querySelectorAll('p, ul, code')].map(e => getComputedStyle(e).direction)"
    )
    assert directions == ["rtl", "rtl", "ltr", "ltr"]


def test_tasks_and_thoughts_are_rendered(page: Any) -> None:
    answer_with(page, stream("- [ ] open\n- [x] closed\n- [z] other", thought="**Hm**, `code`."))
    ask(page, "hi")
    assert answered(page).locator("li").all_inner_texts() == ["☐ open", "☑ closed", "[z] other"]
    page.locator(".thought summary").click()
    assert page.locator(".thought strong").inner_text() == "Hm"


def test_a_window_that_gets_narrow_hides_the_chats_and_the_empty_page_begins_at_its_top(page: Any) -> None:
    page.locator(".sidebar").wait_for()
    page.set_viewport_size({"width": 640, "height": 330})
    page.locator(".sidebar").wait_for(state="detached")
    title = page.locator(".empty h1").bounding_box()
    assert title["y"] > page.locator("header").bounding_box()["height"] - 1
    page.set_viewport_size({"width": 1100, "height": 700})
    page.locator(".sidebar").wait_for()


def test_an_answer_that_failed_before_it_began_can_be_tried_again_or_deleted(page: Any) -> None:
    answer_with(page, '{"error": {"message": "the queue is full"}}', 429)
    ask(page, "hi")
    page.locator(".error", has_text="the queue is full").wait_for()
    names = page.locator(".assistant button").evaluate_all("all => all.map(e => e.ariaLabel ?? e.innerText)")
    assert names == ["Try again", "Delete"]


def test_an_answer_that_is_continued_counts_all_its_tokens_and_says_when_none_came(page: Any) -> None:
    answer_with(page, stream("abcdef", size=1))
    ask(page, "hi")
    answered(page)
    answer_with(page, stream("ghi", size=1))
    act(page, "assistant", "Continue")
    wait_for_text(page.locator(".costs summary"), "9 tokens")  # the prompt has as many, beside the summary
    answer_with(page, stream(""))
    act(page, "assistant", "Continue")
    wait_for_text(page.locator(".notice"), "The model adds nothing to this answer")
    assert "9 tokens" in page.locator(".costs summary").inner_text()
    assert page.locator(".assistant .markdown").inner_text() == "abcdefghi"


def test_the_key_is_asked_for_once_and_again_when_it_is_wanted(browser: Any) -> None:
    with serving(settings={"api_keys": ("right",)}) as served, opened(browser, served.url) as page:
        page.locator("dialog").wait_for()
        close(page)
        page.wait_for_timeout(2500)
        assert not page.locator("dialog").count()
        page.locator("#live").click()
        page.locator("dialog input").fill("right")
        page.keyboard.press("Enter")
        wait_for_text(page.locator(".picker"), "fake")


def test_an_answer_draws_its_own_message_and_not_the_hundreds_before_it(page: Any, tmp_path: Path) -> None:
    messages = {
        f"m{n}": {
            "id": f"m{n}",
            "parent": f"m{n - 1}" if n else None,
            "role": "assistant" if n % 2 else "user",
            "time": n,
            "content": "A paragraph with **bold** and `code`.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
        }
        for n in range(500)
    }
    chat = {"title": "long", "leaf": "m499", "messages": messages, "settings": {"values": {"max_tokens": 60}}}
    (tmp_path / "chats.json").write_text(json.dumps({"format": "quengine-chats", "chats": [chat]}))
    page.get_by_label("File of chats").set_input_files(str(tmp_path / "chats.json"))
    page.locator(".message").nth(499).wait_for()
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=json.dumps(short(route))))
    ask(page, "go on")
    wait_for_text(page.locator(".message").nth(501).locator(".markdown"), PARTIAL)
    # Each message that is drawn asks for the values of the chat's messages, to find its versions.
    drawn = page.evaluate(
        "() => new Promise(done => { const values = Object.values; let count = 0;"
        " Object.values = given => { count++; return values(given); };"
        " setTimeout(() => { Object.values = values; done(count); }, 300); })"
    )
    assert drawn < 500
    answered(page)


def short(route: Any) -> dict[str, Any]:
    """The request with its last message alone, as the fake engine's context is small."""
    body: dict[str, Any] = route.request.post_data_json
    return body | {"messages": body["messages"][-1:]}
