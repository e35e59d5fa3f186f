"""Markdown rendered while it comes, by rich.

Blocks that have ended (all but the last of those whose lines are complete) are printed for good. The block that is
being written is drawn again and again; of one that is higher than the screen the end is shown until it is finished.
"""

import sys
import time
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax
from rich.theme import Theme

if TYPE_CHECKING:
    from markdown_it.token import Token

_THEME = Theme({"markdown.code": "cyan"})
CODE_BACKGROUND = "#262626"
"""Dark in light terminals too: the colours of code are those for a dark one."""

DRAWING = 0.06
"""Seconds between two drawings, at least; also ten times what the latest took, so that the model has the processor."""

# HTML is text to be read here, and an image is its address.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("image")


class MarkdownView:
    """Shows the text that `write` is given. `close` ends it, with the cursor after the last character."""

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
        lines = self._lines(self._pending, ended=True)
        self._pending = ""
        self._replace("\n".join(lines), 0)

    def _draw(self) -> None:
        """Print the blocks that have ended, and draw the last one below them."""
        cut = _last_block(self._pending)
        done = self._lines(self._pending[:cut], ended=True)
        self._pending = self._pending[cut:]
        drawn = self._lines(self._pending)[1 - self._console.height :]
        above = "\n".join(done) + "\n\n" if done else ""
        self._replace(above + "\n".join(drawn), len(drawn))

    def _lines(self, text: str, ended: bool = False) -> list[str]:
        """`text` rendered, without empty lines around it; code of blocks that have `ended` is as wide as it is."""
        width = max(20, self._console.width - 1)
        with self._console.capture() as capture:
            self._console.print(
                AnswerMarkdown(text, width if ended else None), end="", width=width, crop=False
            )
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
    """Code without a margin, on a background of its own, so that it stands out and can be copied.

    A line that is longer than the terminal is left to it: what it wraps, it copies as one line. Only while a block is
    still drawn anew, and within lists and quotes, are long lines broken here.
    """

    @classmethod
    def create(cls, markdown: Markdown, token: "Token") -> "_Code":
        name = token.info.partition(" ")[0] or "text"
        return cls(name, markdown.whole_lines_at if isinstance(markdown, AnswerMarkdown) else None)

    def __init__(self, lexer_name: str, whole_lines_at: int | None) -> None:
        super().__init__(lexer_name, "ansi_dark")
        self.whole_lines_at = whole_lines_at

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip().expandtabs(4)
        longest = max(map(cell_len, code.split("\n")))
        whole = options.max_width == self.whole_lines_at
        if whole:
            options = options.update(width=max(longest, options.max_width))
        syntax = Syntax(
            code, self.lexer_name, theme=self.theme, word_wrap=not whole, background_color=CODE_BACKGROUND
        )
        yield from console.render(syntax, options)


class AnswerMarkdown(Markdown):
    """Markdown as models write it: line ends are kept, addresses of links are shown.

    whole_lines_at: the width at which code has its lines unbroken, that of the page and not of a list; None: at none.
    """

    elements = {  # noqa: RUF012
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, text: str, whole_lines_at: int | None = None) -> None:
        super().__init__("", hyperlinks=False)
        self.whole_lines_at = whole_lines_at
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
