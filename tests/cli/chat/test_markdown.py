"""Markdown that comes in pieces looks as the whole does, whatever the pieces and the height of the screen."""

import os
import random
import re
import subprocess
import sys

import pytest

from quengine.cli.chat import markdown
from quengine.cli.chat.markdown import MarkdownView
from tests.cli.chat.screen import Screen

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


LONG = "print(" + ", ".join(f"name_{i}" for i in range(12)) + ")"


def written(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """All that is sent to a terminal of 40 columns when `text` comes in small pieces."""
    sent: list[str] = []

    class Sent:
        def write(self, text: str) -> int:
            sent.append(text)
            return len(text)

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stdout", Sent())
    view = MarkdownView()
    for at in range(0, len(text), 5):
        view._next_drawing = 0.0
        view.write(text[at : at + 5])
    view.close()
    return "".join(sent)


@pytest.mark.parametrize("text", [f"```python\n{LONG}\n```\n\nafter\n", f"before\n\n```\n{LONG}\n```"])
def test_a_long_line_of_code_is_one_line_once_its_block_has_ended(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = written(text, monkeypatch).rpartition("\x1b[J")[0 if text.endswith("after\n") else 2]
    plain = re.sub(r"\x1b\[[\d;]*m", "", last)
    assert LONG in plain


def test_code_has_a_background_to_the_end_of_its_lines() -> None:
    # In a process of its own: rich keeps the codes of a style as those of the first terminal that showed it.
    program = (
        "from quengine.cli.chat.markdown import MarkdownView\n"
        "view = MarkdownView()\nview.write('```python\\nx = 1\\n\\ny = 2\\n```\\n')\nview.close()"
    )
    terminal = {"TERM": "xterm", "COLORTERM": "truecolor", "COLUMNS": "40", "LINES": "24"}
    others = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=others | terminal, stdout=subprocess.PIPE, check=True
    )
    sent = done.stdout.decode()
    lines = [line for line in sent.rpartition("\x1b[J")[2].split("\n") if "48;2;38;38;38" in line]
    widths = [len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in lines]
    assert widths == [39, 39, 39]


def test_long_code_in_a_list_is_wrapped_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(f"- item\n\n  ```\n  {LONG}\n  ```\n", [7], monkeypatch)
    assert max(map(len, lines)) < 40
    assert "".join(line.strip() for line in lines[1:]).replace(" ", "") == LONG.replace(" ", "")
