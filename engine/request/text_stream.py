"""The text of a stream of tokens: whole characters, up to a stop string or a line that is indented too little."""

import codecs
from collections.abc import Callable, Sequence

from quengine.errors import EngineError
from quengine.structured.answer_parser import held_back


class TextStream:
    """Joins the bytes of tokens into text.

    The text is that of `bytes.decode(errors="replace")` of all bytes together, however they are cut into tokens: a
    character appears with the token that completes it, and one that the end cuts off becomes U+FFFD in `finish`.
    Text that may be the beginning of a stop string is held back until that is decided. The stop string whose last
    character comes first ends the text; of several that end there, the longest.

    token_bytes: the bytes of a token id, empty for one that shows nothing.
    stop: strings that end the text and are not shown.
    indent: the text ends (`dedented`) after the indentation of a line, other than the first, that begins with fewer
        spaces and tabs than this.
    Raises EngineError for an empty stop string.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = (), indent: int = 0
    ) -> None:
        if "" in stop:
            raise EngineError("a stop string must have at least one character")
        self.stopped: str | None = None
        self.dedented = False
        self._indent = indent
        self._spaces: int | None = None  # of a line that has nothing else yet
        self._token_bytes = token_bytes
        self._stop = sorted(stop, key=len, reverse=True)
        self.is_plain = not self._stop and not indent  # all text is shown at once, and nothing ends it
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._partial = False  # bytes of a character that is not whole yet
        self._held = ""
        self._shown: list[str] = []
        self._read = 0  # pieces of _shown

    @property
    def text(self) -> str:
        """All that `push` and `finish` have returned."""
        return "".join(self._shown)

    def read(self) -> str:
        """The text that was shown since the last call. Another thread may push tokens meanwhile."""
        new = self._shown[self._read :]
        self._read += len(new)
        return "".join(new)

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that it completes, "" after the end."""
        raw = self._token_bytes(token_id)
        if raw.isascii() and not self._partial:
            text = raw.decode("ascii")
            if self.is_plain:
                if text:
                    self._shown.append(text)
                return text
            return "" if self._ended else self._show(text, final=False)
        if self._ended:
            return ""
        text = self._decoder.decode(raw)
        self._partial = bool(self._decoder.getstate()[0])
        return self._show(text, final=False)

    def finish(self) -> str:
        """Ends the text, after the last token; returns what was held back."""
        if self._ended:
            return ""
        return self._show(self._decoder.decode(b"", final=True), final=True)

    @property
    def _ended(self) -> bool:
        return self.stopped is not None or self.dedented

    def _show(self, text: str, final: bool) -> str:
        shown = self._certain(text, final) if self._stop else text
        if self._indent:
            shown = self._indented(shown)
        if shown:
            self._shown.append(shown)
        return shown

    def _indented(self, text: str) -> str:
        """The text, up to the first character of a line that is not indented enough."""
        for at, char in enumerate(text):
            if self._spaces is not None:
                if char in " \t":
                    self._spaces += 1
                    continue
                if self._spaces < self._indent:
                    self.dedented, self.stopped = True, None
                    return text[:at]
            self._spaces = 0 if char == "\n" else None
        return text

    def _certain(self, text: str, final: bool) -> str:
        pending = self._held + text
        end, stop = min(
            ((at + len(stop), stop) for stop in self._stop if (at := pending.find(stop)) >= 0),
            key=lambda match: match[0],
            default=(0, None),
        )
        if stop is not None:
            self.stopped = stop
            certain = end - len(stop)
            self._held = ""
        else:
            certain = len(pending) - (0 if final else held_back(pending, self._stop))
            self._held = pending[certain:]
        return pending[:certain]
