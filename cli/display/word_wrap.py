"""Text wrapped at words while it comes: a word whose pieces do not fit the line is taken back and begun on the next."""

import re
from collections.abc import Iterator

from rich.cells import cell_len

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
