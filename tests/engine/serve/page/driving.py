"""What a person does on the chat page, and what its tests look at."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NARROW = {"width": 390, "height": 780}
LOOKS = Path(__file__).with_name("looks.js").read_text("utf-8")
EXPECTED = ("status of 4", "status of 5")
"""Lines that Chromium's console has for every answer with an error status."""


SIZE = {"width": 1100, "height": 760}


def new_tab(browser: Any, **options: Any) -> Any:
    """A tab of a new visitor."""
    page = browser.new_context(**{"viewport": SIZE, **options}).new_page()
    page.set_default_timeout(60_000)
    return page


@contextmanager
def opened(browser: Any, url: str, expected: tuple[str, ...] = (), **options: Any) -> Iterator[Any]:
    """The page as a new visitor sees it; what its console says is wrong fails the test, but for lines of `expected`."""
    page = new_tab(browser, **options)
    with _watched(page, expected):
        page.goto(url)
        page.locator("#input").wait_for()
        yield page
        page.context.close()


@contextmanager
def reopened(
    tab: Any, url: str, viewport: dict[str, int] = SIZE, color_scheme: str = "light"
) -> Iterator[Any]:
    """The same in a tab that has shown the page before. It keeps the process and compiled scripts, which are most of
    what a new one costs, and nothing of what a page can keep."""
    tab.goto(f"{url}/page/icon.svg")  # of the page's origin, and no script runs there
    tab.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    tab.context.clear_cookies()
    session = tab.context.new_cdp_session(tab)
    session.send("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"})
    session.detach()
    tab.set_viewport_size(viewport)
    tab.emulate_media(color_scheme=color_scheme)
    tab.mouse.move(0, 0)
    with _watched(tab, ()):
        tab.goto(url)
        tab.locator("#input").wait_for()
        try:
            yield tab
        finally:
            for other in tab.context.pages:
                if other != tab:
                    other.close()
            tab.unroute_all(behavior="ignoreErrors")
            tab.goto("about:blank")


@contextmanager
def _watched(page: Any, expected: tuple[str, ...]) -> Iterator[None]:
    problems: list[str] = []
    listeners = {
        "pageerror": lambda error: problems.append(str(error)),
        "console": lambda line: problems.append(line.text) if line.type == "error" else None,
        "dialog": lambda dialog: problems.append(f"a dialog: {dialog.message}"),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    try:
        yield
    finally:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    unexpected = [line for line in problems if not any(part in line for part in (*EXPECTED, *expected))]
    assert not unexpected, unexpected


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answered(page: Any, count: int = 1) -> Any:
    """The newest answer, once `count` answers are whole."""
    page.locator(".assistant .costs").nth(count - 1).wait_for(state="attached")
    return page.locator(".assistant .markdown").last


def act(page: Any, message: str, action: str) -> None:
    """Press a button of the last message of a role."""
    last = page.locator(f".message.{message}").last
    last.hover()
    last.get_by_role("button", name=action, exact=True).click()


def choose(page: Any, **settings: object) -> None:
    """Fill in settings of the open chat."""
    open_settings(page)
    for name, value in settings.items():
        if isinstance(value, bool):
            page.locator(f"#{name}").set_checked(value)
        else:
            page.locator(f"#{name}").fill(str(value))
    close(page)


def open_settings(page: Any) -> None:
    page.get_by_role("button", name="Settings", exact=True).click()
    page.locator("dialog").wait_for()


def close(page: Any) -> None:
    """Close the dialog that is open."""
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")


def wait_for_text(element: Any, text: str | re.Pattern[str]) -> None:
    element.filter(has_text=text).first.wait_for()


def menu(page: Any, label: str, entry: str) -> None:
    page.get_by_role("button", name=label, exact=True).click()
    page.get_by_role("menuitem", name=entry).or_(page.get_by_role("menuitemradio", name=entry)).click()


def attach(page: Any, *paths: Path) -> None:
    page.get_by_label("Files", exact=True).set_input_files([str(path) for path in paths])


def shot(page: Any, name: str) -> None:
    """A picture of the page, where QUENGINE_SCREENSHOTS names a folder."""
    folder = os.environ.get("QUENGINE_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def stream(text: str, *, thought: str = "", probabilities: bool = False, size: int = 7) -> str:
    """A whole answer of the server as server-sent events, `size` characters a token."""
    chunks: list[dict[str, Any]] = [
        {"delta": {"reasoning_content": part}, "finish_reason": None} for part in _parts(thought, size)
    ]
    for part in _parts(text, size):
        chunks.append({"delta": {"content": part}, "finish_reason": None})
        if probabilities:
            top = [{"token": part, "logprob": -0.7}, {"token": "another\n", "logprob": -1.6}]
            chunks[-1]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    events: list[Any] = [{"choices": [chunk]} for chunk in (*chunks, {"delta": {}, "finish_reason": "stop"})]
    timings = {"predicted_per_second": 50.0, "prompt_ms": 100.0, "cache_n": 0}
    usage = {"prompt_tokens": 9, "completion_tokens": len(chunks)}
    events.append({"choices": [], "usage": usage, "timings": timings, "seed": 1})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def _parts(text: str, size: int) -> Sequence[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def answer_with(page: Any, body: str, status: int = 200) -> None:
    """Have chat completions answered with this from now on, in place of the server."""
    page.unroute("**/v1/chat/completions")
    kind = "text/event-stream" if status == 200 else "application/json"
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=status, content_type=kind, body=body)
    )


def pdf(text: str) -> bytes:
    """A PDF of one line."""
    drawn = f"BT /F1 18 Tf 72 720 Td ({text}) Tj ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    made, offsets = "%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        offsets.append(len(made))
        made += f"{number} 0 obj\n{each}\nendobj\n"
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    made += f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer << /Size {size} /Root 1 0 R >>\n"
    made += f"startxref\n{made.index('xref')}\n%%EOF\n"
    return made.encode()


def look(page: Any, name: str) -> Any:
    """What a function of looks.js finds."""
    return page.evaluate(f"() => {{ {LOOKS} return {name}(); }}")


def tab(page: Any, times: int, key: str = "Tab") -> list[str]:
    """The names of what the key reaches, each with a focus that is seen."""
    names = []
    for _ in range(times):
        page.keyboard.press(key)
        now = look(page, "focus")
        assert now["seen"], now
        names.append(re.sub(r"\s+", " ", now["name"]))
    return names
