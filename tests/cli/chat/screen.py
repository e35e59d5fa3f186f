"""A terminal's screen with its scrollback, as far as answers use one."""

import re

_CONTROL = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|[\s\S]")


class Screen:
    """What a terminal of `width` by `height` shows of the text fed to it; styles are left out.

    Characters of one column only. A character behind the last column goes to the next line.
    """

    def __init__(self, width: int = 40, height: int = 10) -> None:
        self.width, self.height = width, height
        self._lines = [""]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for match in _CONTROL.finditer(text):
            kind, count = match[2], 1
            if kind in ("A", "D") and match[1]:
                count = int(match[1])
            if kind is None:
                self._put(match[0])
            elif kind == "A":
                self._row = max(self._row - count, len(self._lines) - self.height, 0)
            elif kind == "D":
                self._column = max(0, self._column - count)
            elif kind in "JK":
                self._lines[self._row] = self._lines[self._row][: self._column]
                if kind == "J":
                    del self._lines[self._row + 1 :]
            else:
                assert kind == "m", match[0]

    @property
    def lines(self) -> list[str]:
        """All lines, those above the screen too, without spaces at their ends."""
        return [line.rstrip() for line in self._lines]

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n" or self._column == self.width:
            self._row, self._column = self._row + 1, 0
            if self._row == len(self._lines):
                self._lines.append("")
            if char != "\n":
                self._put(char)
        else:
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + char + line[self._column + 1 :]
            self._column += 1
