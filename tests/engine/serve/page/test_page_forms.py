"""How the chat page shows what a server sends, hostile or broken as it may be, and that everybody can use it: keyboard,
contrast, narrow screens."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.serve.page.driving import (
    NARROW,
    SIZE,
    act,
    answer_with,
    answered,
    ask,
    choose,
    look,
    menu,
    opened,
    reopened,
    shot,
    stream,
    tab,
    wait_for_text,
)
from tests.engine.serve.serving import Served, serving

pytestmark = pytest.mark.browser
RICH = r"""# Heading

Text with **bold**, `code`, [a link](https://example.com), $5 and $6, $a^2 + b^2$ and \(c\).

```python
def f(x: int) -> str:  # a comment
    return "a long line " * x + "another part of it that goes on beyond the edge of a phone's screen"
```

| left | right |
|:--|--:|
| one | 1 |

$$\sum_{k=1}^n k = \frac{n(n+1)}{2}$$

1. first
   - second \[ \sqrt{x} \]

> quoted
"""
HOSTILE = r"""<script>alert(1)</script><img src=x onerror="alert(2)"><iframe src="javascript:alert(3)"></iframe>

[one](javascript:alert(4)) [two](data:text/html,<script>alert(5)</script>) [three](https://a.example" onclick="alert(6))
![picture](https://evil.example/pixel.png) <svg onload=alert(7)> <style>body{display:none}</style>

```"><script>alert(8)</script>
</code></pre><script>alert(9)</script>
```

$\href{javascript:alert(10)}{x}$ $\htmlClass{a}{b}$ $\def\a{\a\a}\a$ $<img src=x onerror=alert(11)>$ $\includegraphics{https://evil.example/a}$

| <b onmouseover=alert(12)>x</b> |
|---|
| <form action=//evil.example><input></form> |
"""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture
def page(one_tab: Any, served: Served) -> Iterator[Any]:
    one_tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    with reopened(one_tab, served.url) as made:
        yield made


def test_markdown_is_rendered_with_tables_math_and_code(page: Any) -> None:
    answer_with(page, stream(RICH))
    ask(page, "show")
    text = answered(page)
    assert text.locator("h1").inner_text() == "Heading"
    assert text.locator("td[align=right]").inner_text() == "1"
    text.locator(".katex").nth(3).wait_for()
    assert text.locator(".katex").count() == 4 and text.locator(".katex-display").count() == 2
    assert "$5 and $6" in text.locator("p").first.inner_text()
    assert text.locator(".code-bar span").inner_text() == "python"
    assert text.locator(".hljs-keyword").first.inner_text() == "def"
    text.get_by_role("button", name="Copy").click()
    text.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("def f(x: int)") and copied.endswith('screen"\n')
    act(page, "assistant", "Copy")
    page.locator(".notice").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == RICH


def test_hostile_text_does_nothing(page: Any, served: Served) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    answer_with(page, stream(HOSTILE, thought=HOSTILE, probabilities=True))
    ask(page, HOSTILE)
    text = answered(page)
    text.locator(".katex").first.wait_for()
    page.wait_for_timeout(300)
    assert text.locator("script, img, iframe, style, form, input, svg[onload]").count() == 0
    links = text.locator("a").evaluate_all("all => all.map(a => [a.protocol, a.rel, a.onclick])")
    assert all(link == ["https:", "noopener noreferrer", None] for link in links), links
    act(page, "assistant", "Token probabilities")
    page.locator(".token").first.hover()
    page.reload()
    page.locator(".assistant .markdown").wait_for()
    assert all(url.startswith((served.url, "blob:")) for url in requests)


def test_line_ends_break_lines_and_code_tables_and_lists_stay(page: Any) -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    poem = "Roses are red,\nviolets are blue.\n\n- one\n  more\n- two\n"
    answer_with(page, stream(f"{poem}\n{table}\n```\nx\ny\n```\n"))
    ask(page, "one\ntwo")
    text = answered(page)
    assert text.locator("p").first.inner_text() == "Roses are red,\nviolets are blue."
    assert text.locator("li").all_inner_texts() == ["one\nmore", "two"]
    assert text.locator("tr").count() == 2 and text.locator("code").inner_text() == "x\ny\n"
    assert text.locator("br").count() == 2


NOTES = """First[^a] and second[^b], first again[^a], and [^none].

[^a]: A **note**.
[^b]: Another, with `code`.
"""


def test_footnotes_are_numbered_and_reached_both_ways(page: Any) -> None:
    for count in (1, 2):  # each answer has its own
        answer_with(page, stream(NOTES))
        ask(page, "notes")
        text = answered(page, count)
        assert text.locator("p").first.inner_text() == "First1 and second2, first again1, and [^none]."
        notes = text.locator(".notes li")
        assert [note.split(" ↩")[0] for note in notes.all_inner_texts()] == ["A note.", "Another, with code."]
        assert notes.locator("strong").inner_text() == "note"
    address = page.url
    text.get_by_label("Footnote 2").press("Enter")
    assert notes.nth(1).evaluate("e => e === document.activeElement")
    notes.nth(1).get_by_label("Back to the text").press("Enter")
    assert text.get_by_label("Footnote 2").evaluate("e => e === document.activeElement")
    assert page.url == address


DIAGRAM = "```mermaid\nflowchart LR\n  A[Start] --> B{Ready}\n```\n"


def test_diagrams_are_drawn_and_their_code_is_shown_instead(page: Any) -> None:
    pie = '```mermaid\npie title Pets\n  "Dogs" : 3\n  "Cats" : 5\n```\n'
    answer_with(
        page, stream(f"{DIAGRAM}\n{pie}\n```mermaid\nflowchart what\n```\n\n```mermaid\nflowchart TD\n")
    )
    ask(page, "draw")
    text = answered(page)
    wait_for_text(text.locator(".undrawn"), "Not drawn: ")
    images = text.locator("[data-diagram] img")
    images.nth(1).wait_for()
    assert images.count() == 2 and text.locator(".code").count() == 4
    assert images.first.get_attribute("alt") == "Diagram: flowchart LR A[Start] --> B{Ready}"
    assert images.first.evaluate("e => e.decode().then(() => e.naturalWidth > 50 && e.naturalHeight > 20)")
    light = images.first.get_attribute("src")
    assert not text.locator("pre").first.is_visible()
    text.get_by_role("button", name="Code").first.click()
    assert text.locator("pre").first.is_visible() and not images.first.is_visible()
    text.get_by_role("button", name="Diagram", exact=True).click()
    assert images.first.is_visible()
    menu(page, "More", "Dark theme")
    page.wait_for_function("light => document.querySelector('[data-diagram] img').src !== light", arg=light)
    shot(page, "diagrams")


HOSTILE_DIAGRAM = """```mermaid
%%{init: {"securityLevel": "loose", "htmlLabels": true, "themeCSS": "* { background: url(http://203.0.113.1/a) }"}}%%
flowchart LR
  A["<img src=http://203.0.113.1/b onerror=alert(1)><script>alert(2)</script>"] --> B
  click A "javascript:alert(3)"
  click B call alert(4)
```
"""


def test_a_hostile_diagram_does_nothing(browser: Any, served: Served) -> None:
    """What gets past mermaid is blocked by the policy of its frame."""
    asked: list[Any] = []
    with opened(browser, served.url, expected=("Content Security Policy",)) as page:
        page.on("request", lambda request: asked.append(request))
        answer_with(page, stream(HOSTILE_DIAGRAM + DIAGRAM))
        ask(page, "draw")
        answered(page)
        page.wait_for_function(
            "() => { const all = [...document.querySelectorAll('[data-diagram]')];"
            " return all.length == 2 && all.every(e => e.querySelector('img, .undrawn')); }"
        )
        for image in page.locator("[data-diagram] img").all():
            image.click()
            assert "onerror" not in (image.get_attribute("src") or "")
        frame = next(each for each in page.frames if each.url.endswith("diagram.html"))
        assert frame.evaluate("() => self.origin") == "null"
        left = [each for each in asked if not each.url.startswith((served.url, "data:"))]
        assert all(each.failure == "csp" for each in left), [(each.url, each.failure) for each in left]


def test_a_huge_message_is_shown_and_the_page_stays_quick(page: Any) -> None:
    paragraphs = "".join(f"Paragraph {n} with **bold** and `code`.\n\n" for n in range(6000))
    answer_with(page, stream(paragraphs, size=500))
    ask(page, "x" * 200_000)
    assert answered(page).locator("p").count() == 6000
    answer_with(page, stream("word " * 200_000, size=5000))
    ask(page, "more")
    page.locator(".assistant .plain").wait_for()
    waited = page.evaluate(
        "() => new Promise(done => { const from = performance.now();"
        " requestAnimationFrame(() => setTimeout(() => done(performance.now() - from))); })"
    )
    assert waited < 1000


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ("data: {broken\n\n", 200, "an event is not JSON"),
        ('data: {"choices": [{"delta": {"content": "half"}}]}\n\n', 200, "ended before the answer did"),
        ('data: {"error": {"message": "the engine failed"}}\n\n', 200, "the engine failed"),
        ("<html>Bad gateway</html>", 502, "HTTP status 502"),
        ('{"error": {"message": "the queue is full"}}', 429, "the queue is full"),
    ],
)
def test_a_broken_stream_is_said_and_can_be_asked_again(page: Any, body: str, status: int, says: str) -> None:
    answer_with(page, body, status)
    ask(page, "hi")
    page.locator(".error", has_text=says).wait_for()
    answer_with(page, stream("whole"))
    page.get_by_role("button", name="Try again").click()
    assert answered(page).inner_text() == "whole"


def test_probabilities_are_shown_under_the_pointer_and_by_arrow_keys(page: Any) -> None:
    choose(page, probabilities=True)
    answer_with(page, stream("one two three four", probabilities=True, size=4))
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "count")
    assert sent.value.post_data_json["logprobs"] is True
    answered(page)
    act(page, "assistant", "Token probabilities")
    page.locator(".token").nth(1).hover()
    rows = page.locator(".alternatives tr").all_inner_texts()
    assert [re.sub(r"\s+", " ", row).strip() for row in rows] == ["two 49.7%", "another\\n 20.2%"]
    page.locator(".tokens > .plain").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.at").inner_text().strip() == "thre"


def test_everything_is_reached_by_the_keyboard_with_a_focus_that_is_seen(page: Any) -> None:
    box = page.get_by_label("Message", exact=True)
    assert box.evaluate("e => e === document.activeElement")
    box.type("one")
    page.keyboard.press("Shift+Enter")
    box.type("two")
    assert box.input_value() == "one\ntwo"
    page.keyboard.press("Enter")
    answered(page)
    assert page.locator(".user .plain").inner_text() == "one\ntwo"
    seen = set(tab(page, 28))
    wanted = {"new", "Search chats", "Conversation", "Copy", "Edit", "Regenerate", "Continue", "Delete"}
    assert wanted | {"Attach files", "Send", "Settings", "live", "Message", "Model: fake"} <= seen, seen
    assert not look(page, "unnamed")
    page.get_by_role("button", name="Settings", exact=True).press("Enter")
    page.locator("dialog").wait_for()
    tab(page, 30)
    assert page.evaluate(
        "() => document.activeElement.closest('dialog') !== null || document.activeElement === document.body"
    )
    assert not look(page, "unnamed")
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    assert page.evaluate("() => document.activeElement.ariaLabel") == "Settings"
    page.get_by_role("button", name="More", exact=True).press("Enter")
    page.get_by_role("menu").wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    assert page.evaluate("() => document.activeElement.textContent") == "API key"
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.ariaLabel") == "More"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_nothing_sticks_out_and_text_can_be_read(
    one_tab: Any, served: Served, scheme: str, width: str
) -> None:
    size = NARROW if width == "narrow" else SIZE
    with reopened(one_tab, served.url, size, scheme) as page:
        page.get_by_role("status").filter(has_text="tok/s").wait_for()

        def check(name: str) -> None:
            page.wait_for_timeout(250)
            shot(page, f"{scheme}-{width}-{name}")
            assert not look(page, "contrast"), name
            assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), name
            assert page.evaluate("() => document.documentElement.scrollHeight <= innerHeight"), name

        check("empty")
        answer_with(page, stream(RICH, thought="I think.", probabilities=True))
        ask(page, "hi " * 60 + "a" * 300)
        answered(page).locator(".katex").first.wait_for()
        page.locator(".thought summary").click()
        check("chat")
        act(page, "assistant", "Token probabilities")
        check("tokens")
        for name in ("Settings", "Model: fake"):
            page.get_by_role("button", name=name, exact=True).click()
            check(name.partition(":")[0].lower())
            page.keyboard.press("Escape")
        page.locator("#live").click()
        check("live")
        page.keyboard.press("Escape")
        answer_with(page, '{"error": {"message": "the queue is full"}}', 429)
        ask(page, "again")
        page.locator(".error").wait_for()
        check("error")
        if width == "narrow":
            page.get_by_role("button", name="Show the chats").click()
        check("chats")
        box = page.locator(".chats .title").first.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= page.viewport_size["width"]
