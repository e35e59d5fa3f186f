"""Markdown that comes in pieces looks as the whole does, whatever the pieces and the height of the screen."""

import random
import sys

import pytest

from quengine.cli.display import markdown
from quengine.cli.display.markdown import MarkdownView
from tests.cli.display.screen import Screen

TEXT = """# A title

Some **bold** words and `code`, which are more than one line has room for.
A second line with <b>tags</b> and [a link](http://x.y).

1. one
2. two
   - nested

3. three

```python
def f(x):
    return x
```

| a | b |
|---|---|
| 1 | 22 |

> quoted
"""


class Output:
    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def write(self, text: str) -> int:
        self.screen.feed(text)
        return len(text)

    def flush(self) -> None: ...


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(markdown, "DRAWING", -1.0)


def shown(text: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch, height: int = 10) -> list[str]:
    """The lines that remain when `text` comes in pieces of these sizes, again and again."""
    monkeypatch.setenv("LINES", str(height))
    screen, at, turn = Screen(40, height), 0, 0
    monkeypatch.setattr(sys, "stdout", Output(screen))
    view = MarkdownView()
    while at < len(text):
        size = sizes[turn % len(sizes)]
        view._next_drawing = 0.0
        view.write(text[at : at + size])
        at, turn = at + size, turn + 1
    view.close()
    return screen.lines


def test_marks_become_styles_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(TEXT, [len(TEXT)], monkeypatch)
    text = "\n".join(lines)
    assert lines[0] == "A title" and "**" not in text and "`" not in text
    assert "A second line with <b>tags</b> and a" in lines
    assert "(http://x.y)" in text and " • nested" in text and "    return x" in lines
    assert lines[-1] == "▌ quoted"
    assert max(map(len, lines)) < 40
    assert not [line for line in lines if line.endswith(("mor", "ha"))]


@pytest.mark.parametrize("height", [4, 10, 100])
def test_pieces_look_as_the_whole(height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shown(TEXT, [len(TEXT)], monkeypatch)
    chance = random.Random(height)
    for sizes in ([1], [3], [chance.randint(1, 30) for _ in range(50)]):
        assert shown(TEXT, sizes, monkeypatch, height) == whole


def test_a_block_higher_than_the_screen_is_whole_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(f"line {i}" for i in range(30))
    lines = shown(f"before\n\n```\n{code}\n```\nafter", [4], monkeypatch, height=6)
    assert lines == ["before", "", *code.split("\n"), "", "after"]


@pytest.mark.parametrize("text", ["", "\n\n", "[x]: http://y", "**open", "```", "\\[x\\]", "- ", "|a|\n|-"])
def test_unfinished_marks_are_no_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(text, [1], monkeypatch) == shown(text, [9], monkeypatch)
