"""What a long command is doing: one line on standard error that is overwritten, for who watches."""

import sys


class ProgressLine:
    """Shows the latest text on a terminal; off a terminal it stays silent. Leaves an empty line behind."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self.shown:
            # \r goes back to the line's start and \x1b[K erases what the last text left there.
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Erase the line, before something else is printed."""
        self("")
