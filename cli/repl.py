"""The loop of `engine chat`: reads messages and slash commands, prints answers.

Answers go to standard output, everything else to standard error, so a conversation can be piped in and out.
"""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from quengine.cli.report import print_report
from quengine.cli.terminal import AnswerPrinter, write_text
from quengine.errors import EngineError
from quengine.request.chat_session import ChatSession

if TYPE_CHECKING:
    from prompt_toolkit.history import History

HELP = """\
  /help          this list
  /reset         clear the conversation, keep the system message
  /system TEXT   set the system message; without TEXT show it, with "" remove it
  /save FILE     write the conversation to a file
  /load FILE     go on with a saved conversation
  /stats         what the last answer cost, and how full the context is
  /exit          leave (also /quit and Ctrl-D)
  Ctrl-C stops an answer. Alt-Enter starts a new line. A message that begins with / is typed with //."""


class Repl:
    """Reads messages and commands until the end of input.

    On a terminal an error is one line and the conversation goes on; piped in, it ends the program.
    """

    def __init__(self, session: ChatSession) -> None:
        self.session = session
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "reset": self._reset,
            "system": self._system,
            "save": self._save,
            "load": self._load,
            "stats": self._stats,
        }

    def run(self) -> None:
        """Talk until /exit or the end of input."""
        if self.interactive:
            llm = self.session.llm
            _note(f"{llm.model_config.name}, context {llm.ctx_size} tokens, seed {self.session.params.seed}")
            _note("/help lists the commands, Ctrl-D leaves")
        lines = _terminal_lines() if self.interactive else _piped_lines()
        for line in lines:
            if line.split(maxsplit=1)[:1] in (["/exit"], ["/quit"]):
                return
            try:
                self._take(line)
            except EngineError as error:
                if not self.interactive:
                    raise
                _note(f"error: {error}")

    def _take(self, line: str) -> None:
        if not line.strip():
            return
        if line.startswith("/") and not line.startswith("//"):
            name, _, rest = line[1:].partition(" ")
            command = self.commands.get(name.strip())
            if command is None:
                raise EngineError(f"no command /{name.strip()}; /help lists them (// sends a message with /)")
            command(rest.strip())
        else:
            self._answer(line.removeprefix("/"))

    def _answer(self, text: str) -> None:
        stopped = False
        with _one_interrupt(), contextlib.closing(self.session.deltas(text)) as deltas:
            try:
                printer = AnswerPrinter()
                for delta in deltas:
                    printer.write(delta)
            except KeyboardInterrupt:
                stopped = True
        write_text("\n")
        self._explain_end(stopped)

    def _explain_end(self, stopped: bool) -> None:
        """Why the answer ended, where it was not the model that ended it."""
        session = self.session
        if not session.messages or session.messages[-1]["role"] != "assistant":
            _note("no answer; the message is dropped")
        elif stopped:
            _note("stopped")
        elif session.last is not None and session.last.finish_reason == "length":
            full = session.used_tokens >= session.llm.ctx_size
            _note("the context is full; /reset begins anew" if full else "cut by --max-tokens")

    def _help(self, _: str) -> None:
        print(HELP, file=sys.stderr)

    def _reset(self, _: str) -> None:
        self.session.reset()
        _note("conversation cleared")

    def _system(self, text: str) -> None:
        if text:
            self.session.set_system("" if text in ('""', "''") else text)
        shown = self.session.system
        _note("no system message" if shown is None else f"system message: {shown}")

    def _save(self, text: str) -> None:
        path = _path("save", text)
        self.session.save(path)
        _note(f"saved {len(self.session.messages)} messages to {path}")

    def _load(self, text: str) -> None:
        path = _path("load", text)
        self.session.load(path)
        _note(f"loaded {len(self.session.messages)} messages from {path}")

    def _stats(self, _: str) -> None:
        last, llm, used = self.session.last, self.session.llm, self.session.used_tokens
        if last is None:
            _note("no answer yet")
            return
        print_report(last, llm)
        _note(f"context    {used} of {llm.ctx_size} tokens used, {100 * used / llm.ctx_size:.0f}%")


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


def _note(text: str) -> None:
    print(f"  {text}", file=sys.stderr)


def _path(command: str, text: str) -> Path:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise EngineError(f"/{command} {text}: {error}") from None
    if len(words) != 1:
        raise EngineError(f"/{command} needs one file name (quote one with spaces)")
    try:
        return Path(words[0]).expanduser()
    except RuntimeError as error:  # ~ of an unknown user, or without a home folder
        raise EngineError(f"/{command} {text}: {error}") from None


def _piped_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.object[error.start]:#04x}"
        raise EngineError(f"cannot read standard input: not {error.encoding}, {wrong}") from None
    except OSError as error:
        raise EngineError(f"cannot read standard input: {error.strerror or error}") from None


def _terminal_lines() -> Iterator[str]:
    """Lines typed at the terminal, edited with prompt_toolkit; Ctrl-C clears a line, Ctrl-D ends."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    prompt: PromptSession[str] = PromptSession(history=_history(), key_bindings=keys)
    while True:
        try:
            yield prompt.prompt("> ")
        except KeyboardInterrupt:
            _note("Ctrl-D or /exit leaves")
        except EOFError:
            return


def _history() -> "History":
    """What was typed before, in a file that only the user can read; without one where it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    path = state / "quengine" / "chat_history"
    try:
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except (OSError, RuntimeError) as error:  # the latter where there is no home folder
        why = error.strerror if isinstance(error, OSError) else error
        _note(f"what you type is not kept for the next time: {path}: {why}")
        return InMemoryHistory()
    return FileHistory(str(path))
