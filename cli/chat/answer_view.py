"""An answer's parts on a terminal: reasoning dimmed, then the text, as markdown or wrapped at words.

Wrapped text comes in pieces: a word whose pieces do not fit the line is taken back and begun on the next.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.cells import cell_len

from quengine.cli.terminal import DIM, PLAIN
from quengine.errors import visible
from quengine.structured.tool_calls import ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from quengine.cli.chat.markdown import MarkdownView
    from quengine.structured.tool_calls import Delta

_PIECES = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Where the cursor is in a line of `width` columns; `write` gives what to send to the terminal.

    The last column stays empty: a terminal that has written there does not say on which line its cursor is.
    """

    def __init__(self, width: int) -> None:
        self._limit = max(1, width - 1)
        self._column = 0
        self._word = ""  # the word before the cursor, as far as it came

    def write(self, text: str) -> str:
        """The text with line breaks, and with the sequences that erase the beginning of a word that moves."""
        return "".join(self._placed(piece) for piece in _pieces(text))

    def _placed(self, piece: str) -> str:
        if piece == "\n":
            self._column, self._word = 0, ""
            return piece
        if piece.isspace():
            self._word = ""
            wide = sum(8 if char == "\t" else 1 for char in piece)
            if self._column + wide > self._limit:  # a break takes the place of the spaces
                self._column = 0
                return "\n"
            self._column += wide
            return piece.replace("\t", " " * 8)
        return self._word_placed(piece)

    def _word_placed(self, piece: str) -> str:
        wide = cell_len(piece)
        if wide > 1 and len(piece) == 1:
            self._word = ""  # a line may break before an ideograph
        began = cell_len(self._word)
        if self._column + wide <= self._limit:
            self._word += piece
            self._column += wide
            return piece
        if began + wide > self._limit:  # longer than a line: broken where the line ends
            room = self._limit - self._column
            head = _head(piece, room)
            self._column, self._word = 0, ""
            return head + "\n" + self.write(piece[len(head) :])
        back = f"\x1b[{began}D\x1b[K" if began else ""
        moved, self._word = self._word, self._word + piece
        self._column = cell_len(self._word)
        return f"{back}\n{moved}{piece}"


def _pieces(text: str) -> Iterator[str]:
    """Line ends, runs of spaces, words; each wide character is a word of its own."""
    for piece in _PIECES.findall(text):
        if piece.isspace() or cell_len(piece) == len(piece):
            yield piece
        else:
            yield from re.findall(r"[ -\u10ff]+|.", piece)


def _head(text: str, room: int) -> str:
    """As much of the beginning as `room` columns take; at least a character where the line is empty."""
    end = 0
    while end < len(text) and cell_len(text[: end + 1]) <= room:
        end += 1
    return text[:end]


class AnswerView:
    """Shows an answer as it comes; `close` ends it, with the cursor after the last character."""

    def __init__(self, markdown: bool) -> None:
        self._markdown = markdown
        self._wrap: WordWrap | None = None  # of the reasoning or the plain text being written
        self._view: MarkdownView | None = None  # of the markdown being written
        self._thinking = False

    def write(self, delta: "Delta") -> None:
        if isinstance(delta, ReasoningDelta):
            self._begin(thinking=True)
            self._write_wrapped(delta.text, DIM, PLAIN)
        elif isinstance(delta, TextDelta):
            self._begin(thinking=False)
            if self._markdown:
                self._markdown_view().write(visible(delta.text))
            else:
                self._write_wrapped(delta.text)

    def close(self) -> None:
        """Show what was held back. Nothing may be written afterwards."""
        if self._view is not None:
            self._view.close()
            self._view = None

    def _begin(self, thinking: bool) -> None:
        """An empty line where the text follows the reasoning, or the other way round."""
        if thinking == self._thinking:
            return
        shown = self._wrap is not None or self._view is not None
        self.close()
        self._wrap = None
        self._thinking = thinking
        if shown:
            sys.stdout.write("\n\n")

    def _write_wrapped(self, text: str, before: str = "", after: str = "") -> None:
        if self._wrap is None:
            self._wrap = WordWrap(shutil.get_terminal_size().columns)
        sys.stdout.write(f"{before}{self._wrap.write(visible(text))}{after}")
        sys.stdout.flush()

    def _markdown_view(self) -> "MarkdownView":
        if self._view is None:
            from quengine.cli.chat.markdown import MarkdownView

            self._view = MarkdownView()
        return self._view
