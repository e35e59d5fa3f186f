"""Markdown rendered while it comes, by rich.

Blocks that have ended (all but the last of those whose lines are complete) are printed for good. The block that is
being written is drawn again and again; of one that is higher than the screen the end is shown until it is finished.
"""

import sys
import time
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax
from rich.theme import Theme

if TYPE_CHECKING:
    from markdown_it.token import Token

_THEME = Theme({"markdown.code": "cyan"})
DRAWING = 0.06
"""Seconds between two drawings, at least; also ten times what the latest took, so that the model has the processor."""

# HTML is text to be read here, and an image is its address.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("image")


class MarkdownView:
    """Shows the text that `write` is given. `close` ends it, with the cursor behind the last character."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, force_terminal=True, highlight=False, theme=_THEME)
        self._pending = ""  # text of blocks that may still change
        self._drawn = 0  # lines on the screen that belong to it
        self._next_drawing = 0.0

    def write(self, text: str) -> None:
        """Take a piece of text, without control characters but tab and newline."""
        self._pending += text
        now = time.monotonic()
        if now >= self._next_drawing:
            self._draw()
            took = time.monotonic() - now
            self._next_drawing = now + max(DRAWING, 10 * took)

    def close(self) -> None:
        """Print what is left."""
        lines = self._lines(self._pending)
        self._pending = ""
        self._replace("\n".join(lines), 0)

    def _draw(self) -> None:
        """Print the blocks that have ended, and draw the last one below them."""
        cut = _last_block(self._pending)
        done = self._lines(self._pending[:cut])
        self._pending = self._pending[cut:]
        drawn = self._lines(self._pending)[1 - self._console.height :]
        above = "\n".join(done) + "\n\n" if done else ""
        self._replace(above + "\n".join(drawn), len(drawn))

    def _lines(self, text: str) -> list[str]:
        """`text` rendered, without empty lines around it."""
        with self._console.capture() as capture:
            self._console.print(AnswerMarkdown(text), end="", width=max(20, self._console.width - 1))
        shown = capture.get().strip("\n")
        return [line.rstrip() for line in shown.split("\n")] if shown.strip() else []

    def _replace(self, text: str, drawn: int) -> None:
        """Write `text` in the place of what was drawn; its last `drawn` lines will be replaced in turn."""
        up = f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else ""
        erase = f"\r{up}\x1b[J" if self._drawn else ""
        sys.stdout.write(erase + text)
        sys.stdout.flush()
        self._drawn = drawn


class _Heading(Heading):
    """Headings begin at the left."""

    LEVEL_ALIGN = {}  # noqa: RUF012


class _Code(CodeBlock):
    """Code without a margin and in the terminal's colours, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme="ansi_dark", word_wrap=True, background_color="default")


class AnswerMarkdown(Markdown):
    """Markdown as models write it: line ends are kept, addresses of links are shown."""

    elements = {  # noqa: RUF012
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


def _last_block(text: str) -> int:
    """Where the last block among the complete lines begins: what is before it does not change any more."""
    complete = text[: text.rfind("\n") + 1]
    starts = [start for token in _PARSER.parse(complete) if (start := _start(token)) is not None]
    if len(starts) < 2:
        return 0
    return sum(len(line) + 1 for line in complete.split("\n")[: starts[-1]])


def _start(token: "Token") -> int | None:
    """The first line of a block of the document itself; None for tokens within one."""
    return token.map[0] if token.level == 0 and token.nesting >= 0 and token.map else None
