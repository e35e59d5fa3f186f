"""Messages typed at the terminal, edited with prompt_toolkit, which completes slash commands and their arguments."""

from collections.abc import Callable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

from quengine.cli import interrupts
from quengine.cli.chat.commands import COMMANDS, setting_names
from quengine.cli.chat.input import is_open
from quengine.cli.chat.session_file import session_names, state_folder
from quengine.cli.flags import complete_models
from quengine.cli.terminal import note


class CommandCompleter(Completer):
    """Completes the name of a command, then its argument; messages are left alone."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        if not is_command(text):
            return
        name, space, rest = text[1:].partition(" ")
        if not space:
            for known, command in COMMANDS.items():
                if known.startswith(name):
                    shown = f"/{known} {command.argument}"
                    yield Completion(known, -len(name), display=shown, display_meta=command.help)
        elif name in COMMANDS:
            kind = COMMANDS[name].completes
            if kind == "session":
                matching = (each for each in session_names() if each.startswith(rest))
                yield from (Completion(each, -len(rest), display_meta="session") for each in matching)
            if kind == "model":
                yield from (Completion(each, -len(rest)) for each in complete_models(rest))
            if kind in ("path", "session", "model"):
                yield from self._paths.get_completions(Document(rest), complete_event)
            elif kind == "setting" and " " not in rest:
                matching = (each for each in setting_names() if each.startswith(rest))
                yield from (Completion(each, -len(rest)) for each in matching)


def is_command(text: str) -> bool:
    """Whether what is typed is a slash command and no message."""
    return text.startswith("/") and not text.startswith("//") and "\n" not in text


STYLE = Style.from_dict({"bottom-toolbar": "noreverse fg:ansibrightblack"})


class TerminalPrompt:
    """The prompt of a conversation, above a status line: Ctrl-C clears a message, Ctrl-D ends.

    `status` gives the text of the status line.
    """

    def __init__(self, status: Callable[[], str]) -> None:
        # The menu takes lines below the prompt, so it is only there for what has completions.
        completing = Condition(lambda: is_command(get_app().current_buffer.text))
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            key_bindings=_keys(),
            completer=CommandCompleter(),
            complete_while_typing=completing,
            multiline=True,
            prompt_continuation="  ",
            enable_open_in_editor=True,
            bottom_toolbar=lambda: f"  {status()}",
            style=STYLE,
        )

    def lines(self) -> Iterator[str]:
        """What is typed, until Ctrl-D."""
        while (line := self._line()) is not None:
            yield line

    def _line(self) -> str | None:
        with interrupts.left_to_prompt():
            while True:
                try:
                    return self._session.prompt("> ")
                except KeyboardInterrupt:
                    note("Ctrl-D or /exit leaves")
                except EOFError:
                    return None

    def edit(self, text: str) -> str | None:
        """`text` as the user changed it; None where Ctrl-C or Ctrl-D left it."""
        try:
            with interrupts.left_to_prompt():
                return self._session.prompt("> ", default=text)
        except (KeyboardInterrupt, EOFError):
            return None


def _keys() -> KeyBindings:
    """Enter sends, except within three quotation marks; Alt-Enter begins a new line."""
    keys, typing = KeyBindings(), has_focus(DEFAULT_BUFFER)

    @keys.add("escape", "enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        if is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    return keys


def _history() -> History:
    """What was typed before, in a file that only the user can read; without one where it cannot be written."""
    path = Path("chat_history")
    try:
        path = state_folder() / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except (OSError, RuntimeError) as error:  # the latter where there is no home folder
        why = error.strerror if isinstance(error, OSError) else error
        note(f"what you type is not kept for the next time: {path}: {why}")
        return InMemoryHistory()
    return FileHistory(str(path))
