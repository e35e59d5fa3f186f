"""An answer's parts on a terminal: reasoning dimmed, then the text, as markdown or as it is."""

import shutil
import sys
from typing import TYPE_CHECKING

from quengine.cli.display.word_wrap import WordWrap
from quengine.errors import visible
from quengine.structured.tool_calls import ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from quengine.cli.display.markdown import MarkdownView
    from quengine.structured.tool_calls import Delta

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class AnswerView:
    """Shows an answer as it comes; `close` ends it, with the cursor behind the last character."""

    def __init__(self, markdown: bool) -> None:
        self._markdown = markdown
        self._wrap: WordWrap | None = None  # of the reasoning or the plain text being written
        self._view: MarkdownView | None = None  # of the markdown being written
        self._thinking = False

    def write(self, delta: "Delta") -> None:
        if isinstance(delta, ReasoningDelta):
            self._begin(thinking=True)
            self._write_wrapped(delta.text, _DIM, _PLAIN)
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
            from quengine.cli.display.markdown import MarkdownView

            self._view = MarkdownView()
        return self._view
