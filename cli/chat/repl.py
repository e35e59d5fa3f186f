"""The loop of `engine chat`: reads messages and slash commands, prints answers.

Answers go to standard output, everything else to standard error, so a conversation can be piped in and out.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from quengine.cli.chat.answer_view import AnswerView
from quengine.cli.chat.commands import Attachment, run_command
from quengine.cli.chat.input import joined, no_echo, one_interrupt, piped_lines
from quengine.cli.chat.session_file import SessionFile, excerpt
from quengine.cli.progress import PromptMeter
from quengine.cli.terminal import AnswerPrinter, note, write_text
from quengine.errors import EngineError, visible
from quengine.request.chat_session import ChatSession
from quengine.request.content_parts import text_of

if TYPE_CHECKING:
    from quengine.cli.chat.models import ChatModels
    from quengine.cli.chat.prompt import TerminalPrompt
    from quengine.structured.tool_calls import Delta


class Repl:
    """Reads messages and commands until the end of input.

    On a terminal an error is one line and the conversation goes on; piped in, it ends the program. `models` opens those
    that the conversation may change to; `attachments` go with the next message; `session_file`, if any, is written
    whenever a line changed the conversation. Answers on a terminal are rendered as `markdown`.
    """

    def __init__(
        self,
        session: ChatSession,
        models: "ChatModels",
        session_file: SessionFile | None = None,
        markdown: bool = True,
    ) -> None:
        self.session = session
        self.models = models
        self.session_file = session_file
        self._markdown = markdown
        self.attachments: list[Attachment] = []
        self.leaving = False
        self._prompt = _terminal_prompt(self.status) if sys.stdin.isatty() and sys.stdout.isatty() else None

    def run(self) -> None:
        """Talk until /exit or the end of input."""
        if self._prompt is not None:
            llm = self.session.llm
            note(f"{self.models.name}, context {llm.ctx_size} tokens, seed {self.session.params.seed}")
            note("/help lists the commands, Ctrl-D leaves")
        self._resume()
        came = False
        for line in joined(piped_lines() if self._prompt is None else self._prompt.lines()):
            came = came or bool(line.strip())
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
        if self._prompt is None and not came:
            note("no message came from standard input")

    def answer(self, deltas: "Generator[Delta, None, None]", otherwise: str) -> None:
        """Print an answer as it comes and why it ended; `otherwise`: the note where there is none."""
        stopped, before = False, self.session.last
        moves = sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")  # the cursor
        printer = AnswerView(self._markdown) if moves else AnswerPrinter()
        self.session.progress = progress = PromptMeter()
        with one_interrupt(), no_echo(), contextlib.closing(deltas), contextlib.closing(printer):
            try:
                for delta in deltas:
                    progress.clear()
                    printer.write(delta)
            except KeyboardInterrupt:
                stopped = True
            finally:
                progress.clear()
        write_text("\n")
        last = self.session.last
        if last is None or last is before or not last.tokens:
            note(f"no answer; {otherwise}")
        elif stopped:
            note("stopped")
        elif last.finish_reason == "length":
            full = self.session.used_tokens >= self.session.llm.ctx_size
            most = self.session.params.max_tokens
            note(
                "the context is full; /reset begins anew"
                if full
                else f"cut at -n {most}; /set max_tokens N changes it"
            )

    def status(self) -> str:
        """How full the context is, how fast the last answer came, and the model, whose name may not fit."""
        llm, used, last = self.session.llm, self.session.used_tokens, self.session.last
        full = f"{used} of {llm.ctx_size} tokens ({100 * used / llm.ctx_size:.0f}%)"
        parts = [full]
        if last is not None and last.timings.decode_tok_s:
            parts.append(f"{last.timings.decode_tok_s:.1f} tok/s")
        return " · ".join([*parts, visible(self.models.name)])

    def edit_last(self) -> str | None:
        """The last message as the user changes it in the prompt; None where it stays.

        Raises:
            EngineError: there is no message, or no terminal.
        """
        messages = [text_of(each["content"]) for each in self.session.messages if each["role"] == "user"]
        if not messages:
            raise EngineError("the conversation has no message yet")
        if self._prompt is None:
            raise EngineError("/edit opens the message in the prompt of a terminal; elsewhere: /edit TEXT")
        return self._prompt.edit(messages[-1])

    def _resume(self) -> None:
        if self.session_file is None or not self.session_file.resume():
            return
        messages = self.session.messages
        said = [text_of(each["content"]) for each in messages if each["role"] == "user"]
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


def _terminal_prompt(status: Callable[[], str]) -> "TerminalPrompt":
    from quengine.cli.chat.prompt import TerminalPrompt  # a tenth of a second that a pipe does without

    return TerminalPrompt(status)
