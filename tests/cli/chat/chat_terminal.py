"""The `engine` program on a pseudo-terminal."""

import os
import pty
import select
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.quick_python import QuickPopen

# The terminal that it opens becomes its own, as a leader of a session.
MAIN = """
import os, sys
from quengine.cli.main import main
os.close(os.open(os.ttyname(0), os.O_RDWR))
sys.exit(main())
"""
COMMON = ["--device", "cpu", "--backend", "reference", "-t", "1", "--temp", "0"]
QUERY = b"\x1b[6n"
READY, TAKEN = b"\x1b[?2004h", b"\x1b[?2004l"  # the prompt takes keys; a line was taken


class Terminal:
    """A command on a pseudo-terminal of 80 columns; `cursor` answers its queries for the cursor's row."""

    def __init__(
        self, home: Path, *arguments: str, cursor: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        self.cursor = cursor
        environment = {
            **os.environ,
            "TERM": "xterm",
            "XDG_STATE_HOME": str(home),
            "PYTHONUNBUFFERED": "1",
            **({} if cursor else {"PROMPT_TOOLKIT_NO_CPR": "1"}),
            **(environment or {}),
        }
        command = [sys.executable, "-c", MAIN, *arguments]
        self.process = QuickPopen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.seen = b""
        self.at = 0
        self.answered = 0

    def wait_for(self, text: bytes) -> None:
        """Read until `text` has appeared behind what was waited for before."""
        self._read_until(lambda: text in self.seen[self.at :], repr(text))
        self.at = self.seen.index(text, self.at) + len(text)

    def wait_for_bytes(self, count: int) -> None:
        """Read `count` bytes more than have been waited for."""
        self._read_until(lambda: len(self.seen) >= self.at + count, f"{count} bytes")

    def _read_until(self, come: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 120
        while not come():
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{what} did not come; after it: {self.seen[self.at :][-2000:]!r}"
            self.seen += os.read(self.master, 65536)
            while self.cursor and self.answered < self.seen.count(QUERY):
                self.answered += 1
                self.type(b"\x1b[1;1R")

    def line(self, text: str) -> None:
        """Type a line at the next prompt."""
        self.wait_for(READY)
        self.type(text.encode() + b"\r")
        self.wait_for(TAKEN)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


def chat(model: str, *flags: str) -> list[str]:
    """The arguments of a conversation with a tiny model."""
    return ["chat", "-m", model, *COMMON, "--ignore-eos", *flags]
