"""The loop of `engine chat`: reads messages and slash commands, prints answers.

Answers go to standard output, everything else to standard error, so a conversation can be piped in and out.
"""

import contextlib
import signal
import sys
from collections.abc import Generator, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from quengine.cli.chat.attachment import Attachment
from quengine.cli.chat.commands import run_command
from quengine.cli.chat.notes import note
from quengine.cli.chat.piped import piped_lines
from quengine.cli.chat.session_file import SessionFile, excerpt
from quengine.cli.terminal import AnswerPrinter, write_text
from quengine.errors import EngineError
from quengine.request.chat_session import ChatSession

if TYPE_CHECKING:
    from quengine.cli.chat.prompt import TerminalPrompt
    from quengine.structured.tool_calls import Delta


class Repl:
    """Reads messages and commands until the end of input.

    On a terminal an error is one line and the conversation goes on; piped in, it ends the program. `attachments` go
    with the next message; `session_file`, if any, is written whenever a line changed the conversation.
    """

    def __init__(self, session: ChatSession, session_file: SessionFile | None = None) -> None:
        self.session = session
        self.session_file = session_file
        self.attachments: list[Attachment] = []
        self.leaving = False
        self._prompt = _terminal_prompt() if sys.stdin.isatty() and sys.stdout.isatty() else None

    def run(self) -> None:
        """Talk until /exit or the end of input."""
        if self._prompt is not None:
            llm = self.session.llm
            note(f"{llm.model_config.name}, context {llm.ctx_size} tokens, seed {self.session.params.seed}")
            note("/help lists the commands, Ctrl-D leaves")
        self._resume()
        for line in piped_lines() if self._prompt is None else self._prompt.lines():
            try:
                self._take(line)
                if self.session_file is not None:
                    self.session_file.write()
            except EngineError as error:
                if self._prompt is None:
                    raise
                note(f"error: {error}")
            if self.leaving:
                return

    def answer(self, deltas: "Generator[Delta, None, None]", otherwise: str) -> None:
        """Print an answer as it comes and why it ended; `otherwise` is what is said to become of none."""
        stopped, before = False, self.session.last
        with _one_interrupt(), contextlib.closing(deltas):
            try:
                printer = AnswerPrinter()
                for delta in deltas:
                    printer.write(delta)
            except KeyboardInterrupt:
                stopped = True
        write_text("\n")
        last = self.session.last
        if last is None or last is before or not last.tokens:
            note(f"no answer; {otherwise}")
        elif stopped:
            note("stopped")
        elif last.finish_reason == "length":
            full = self.session.used_tokens >= self.session.llm.ctx_size
            note("the context is full; /reset begins anew" if full else "cut by --max-tokens")

    def edit_last(self) -> str | None:
        """The last message as the user changes it in the prompt; None where it stays.

        Raises:
            EngineError: there is no message, or no terminal.
        """
        messages = [each["content"] for each in self.session.messages if each["role"] == "user"]
        if not messages:
            raise EngineError("the conversation has no message yet")
        if self._prompt is None:
            raise EngineError("/edit opens the message in the prompt of a terminal; elsewhere: /edit TEXT")
        return self._prompt.edit(messages[-1])

    def _resume(self) -> None:
        if self.session_file is None or not self.session_file.resume():
            return
        messages = self.session.messages
        said = [each["content"] for each in messages if each["role"] == "user"]
        latest = f", the last one of yours: {excerpt(said[-1])}" if said else ""
        note(f"resumed {self.session_file.path}: {len(messages)} messages{latest}")

    def _take(self, line: str) -> None:
        if not line.strip():
            return
        if line.startswith("/") and not line.startswith("//"):
            run_command(self, line[1:])
            return
        parts = [*(each.text for each in self.attachments), line.removeprefix("/")]
        self.answer(self.session.deltas("\n\n".join(parts)), "the message is dropped")
        self.attachments.clear()


def _terminal_prompt() -> "TerminalPrompt":
    from quengine.cli.chat.prompt import TerminalPrompt  # a tenth of a second that a pipe does without

    return TerminalPrompt()


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """The first Ctrl-C interrupts what runs inside; further ones are ignored, so that cleaning up can end."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
