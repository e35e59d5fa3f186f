"""Tools on the chat page: switched on per chat, allowed before they change something, called until an answer comes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quengine.serve.tool_options import BUILT_IN, ToolsOptions
from tests.engine.serve.page.driving import (
    NARROW,
    act,
    answer_with,
    answered,
    ask,
    close,
    look,
    opened,
    reopened,
    shot,
    stream,
    tab,
    wait_for_text,
)
from tests.engine.serve.serving import Served, serving

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page tools")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(settings={"tools": ToolsOptions(BUILT_IN, folder, as_root=True)}) as running:
        yield running


@pytest.fixture
def page(one_tab: Any, served: Served) -> Iterator[Any]:
    with reopened(one_tab, served.url) as made:
        yield made


def calls(*given: tuple[str, dict[str, Any]], text: str = "") -> str:
    """A whole answer that calls tools, the arguments in two parts."""
    chunks: list[dict[str, Any]] = [{"delta": {"content": text}, "finish_reason": None}]
    for index, (name, arguments) in enumerate(given):
        spelled = json.dumps(arguments)
        head = {"index": index, "id": f"call-{name}-{index}", "type": "function"}
        parts = [{**head, "function": {"name": name, "arguments": spelled[:5]}}]
        parts += [{"index": index, "function": {"arguments": spelled[5:]}}]
        chunks += [{"delta": {"tool_calls": [part]}, "finish_reason": None} for part in parts]
    events: list[Any] = [{"choices": [chunk]} for chunk in chunks]
    events.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 9}})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def answer_in_turn(page: Any, *bodies: str) -> list[dict[str, Any]]:
    """Have each next completion answered with the next body; the requests, as they come."""
    asked: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        body = bodies[min(len(asked), len(bodies)) - 1]
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", answer)
    return asked


def switch_on(page: Any, *names: str) -> None:
    page.locator("#tools").click()
    for name in names:
        page.locator(f"#tool-{name}").set_checked(True)
    close(page)


def call(page: Any, name: str) -> Any:
    return page.locator(".call", has=page.locator("strong", has_text=name)).last


def test_a_reading_tool_is_called_and_its_result_goes_back_to_the_model(page: Any, folder: Path) -> None:
    (folder / "notes.txt").write_text("remember the milk")
    switch_on(page, "read_file")
    asked = answer_in_turn(
        page, calls(("read_file", {"path": "notes.txt"}), text="Let me look."), stream("Milk!")
    )
    ask(page, "what must I remember?")
    wait_for_text(page.locator(".assistant .markdown"), "Milk!")
    assert [each["function"]["name"] for each in asked[0]["tools"]] == ["read_file"]
    user, called, result = asked[1]["messages"]
    assert user["role"] == "user" and called["content"] == "Let me look."
    assert called["tool_calls"][0]["function"] == {"name": "read_file", "arguments": '{"path": "notes.txt"}'}
    assert result == {"role": "tool", "tool_call_id": "call-read_file-0", "content": "remember the milk"}
    made = call(page, "read_file")
    assert not made.locator("pre").first.is_visible()
    made.locator("summary").click()
    assert made.locator("pre").all_inner_texts() == ['{\n  "path": "notes.txt"\n}', "remember the milk"]
    shot(page, "tools-called")
    page.reload()
    wait_for_text(page.locator(".call"), "done")
    asked = answer_in_turn(page, stream("Again."))
    ask(page, "and now")
    wait_for_text(page.locator(".assistant .markdown"), "Again.")
    assert [each["role"] for each in asked[0]["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]


def test_what_changes_something_runs_only_when_it_is_allowed(page: Any, folder: Path) -> None:
    switch_on(page, "write_file", "exec_shell_command")
    write = calls(("write_file", {"path": "made.txt", "content": "new"}))
    answer_in_turn(page, write, stream("First."), write, stream("Second."), write, stream("Third."), write)
    ask(page, "write it")
    page.get_by_role("group", name="May write_file run?").wait_for()
    shot(page, "tools-asked")
    assert not (folder / "made.txt").exists()
    page.get_by_role("button", name="Do not allow").click()
    wait_for_text(page.locator(".assistant .markdown"), "First.")
    assert not (folder / "made.txt").exists()
    wait_for_text(call(page, "write_file"), "failed")

    ask(page, "please")
    page.get_by_role("button", name="Allow once").click()
    wait_for_text(page.locator(".assistant .markdown"), "Second.")
    assert (folder / "made.txt").read_text() == "new"
    (folder / "made.txt").unlink()
    ask(page, "again")
    page.get_by_role("button", name="Always in this chat").click()
    wait_for_text(page.locator(".assistant .markdown"), "Third.")
    (folder / "made.txt").unlink()

    answer_in_turn(page, write, stream("Fourth."), calls(("exec_shell_command", {"command": "touch x"})))
    ask(page, "once more")  # is not asked for now
    wait_for_text(page.locator(".assistant .markdown"), "Fourth.")
    assert (folder / "made.txt").exists()
    ask(page, "run")  # another tool is
    page.get_by_role("group", name="May exec_shell_command run?").wait_for()
    page.get_by_role("button", name="Stop").click()
    wait_for_text(page.locator(".assistant").last, "Stopped")
    assert not (folder / "x").exists()
    page.keyboard.press("Alt+n")
    switch_on(page, "write_file")
    answer_in_turn(page, write)
    ask(page, "in another chat")  # it is asked for again
    page.get_by_role("group", name="May write_file run?").wait_for()


def test_what_is_to_be_allowed_is_shown_whole_and_without_hidden_characters(page: Any) -> None:
    switch_on(page, "exec_shell_command")
    command = "echo " + "x" * 30_000 + "; rm \u202e\u200bgnp.exe"
    answer_in_turn(page, calls(("exec_shell_command", {"command": command})))
    ask(page, "run")
    page.get_by_role("button", name="Allow once").wait_for()
    shown = call(page, "exec_shell_command").locator("pre").inner_text()
    assert "x" * 30_000 + "; rm \\u{202e}\\u{200b}gnp.exe" in shown


def test_a_stopped_call_is_made_when_the_answer_goes_on(page: Any, folder: Path) -> None:
    (folder / "later.txt").write_text("late")
    switch_on(page, "exec_shell_command")
    answer_in_turn(page, calls(("exec_shell_command", {"command": "cat later.txt"})), stream("There."))
    ask(page, "look")
    page.get_by_role("button", name="Allow once").wait_for()
    page.reload()
    answer_in_turn(page, stream("There."))
    wait_for_text(page.locator(".call"), "not made")
    act(page, "assistant", "Continue")
    page.get_by_role("button", name="Allow once").click()
    wait_for_text(page.locator(".assistant .markdown"), "There.")
    call(page, "exec_shell_command").locator("summary").click()
    assert "late\n[exit code: 0]" in call(page, "exec_shell_command").inner_text()


def test_wrong_calls_are_told_to_the_model(page: Any) -> None:
    switch_on(page, "read_file")
    both = calls(("read_file", {"path": "../../etc/passwd"}), ("write_file", {"path": "x", "content": "y"}))
    asked = answer_in_turn(page, both, stream("Sorry."))
    ask(page, "try")
    wait_for_text(page.locator(".assistant .markdown"), "Sorry.")
    outside, unknown = (json.loads(each["content"])["error"] for each in asked[1]["messages"][2:])
    assert "outside of" in outside and unknown == "There is no tool write_file in this chat."
    assert call(page, "write_file").get_attribute("class") == "call failed"


def test_tools_are_chosen_per_chat_and_none_is_on_at_first(page: Any) -> None:
    asked = answer_in_turn(page, stream("Hello."))
    ask(page, "hi")
    wait_for_text(page.locator(".assistant .markdown"), "Hello.")
    assert "tools" not in asked[0]
    page.locator("#tools").click()
    dialog = page.locator("dialog")
    assert dialog.get_by_role("switch").count() == len(BUILT_IN)
    assert "Asks first." in dialog.locator("#tool-write_file-help").inner_text()
    assert "Asks first." not in dialog.locator("#tool-read_file-help").inner_text()
    shot(page, "tools-dialog")
    dialog.get_by_role("button", name="All on").click()
    close(page)
    assert page.locator("#tools").inner_text().strip() == str(len(BUILT_IN))
    ask(page, "again")
    wait_for_text(page.locator(".assistant .markdown"), "Hello.")
    answered(page, 2)
    assert len(asked[1]["tools"]) == len(BUILT_IN)
    page.keyboard.press("Alt+n")
    assert page.locator("#tools").inner_text().strip() == ""


def test_the_question_is_answered_by_keyboard_on_a_phone_and_looks_right(
    one_tab: Any, served: Served
) -> None:
    for colors in ("light", "dark"):
        with reopened(one_tab, served.url, NARROW, colors) as page:
            switch_on(page, "exec_shell_command")
            answer_in_turn(
                page, calls(("exec_shell_command", {"command": "echo " + "long " * 60})), stream("Done.")
            )
            ask(page, "run it")
            page.get_by_role("button", name="Allow once").wait_for()
            shot(page, f"tools-phone-{colors}")
            assert not look(page, "contrast") and not look(page, "unnamed")
            assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
            page.locator(".call pre").first.focus()
            assert tab(page, 3) == ["Allow once", "Always in this chat", "Do not allow"]
            page.keyboard.press("Enter")
            wait_for_text(page.locator(".assistant .markdown"), "Done.")


def test_a_server_without_tools_shows_none(browser: Any) -> None:
    with serving() as served, opened(browser, served.url) as page:
        answer_with(page, stream("Hello."))
        ask(page, "hi")
        wait_for_text(page.locator(".assistant .markdown"), "Hello.")
        assert not page.locator("#tools").count()
