"""Messages typed at the terminal, edited with prompt_toolkit."""

from collections.abc import Callable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

from quengine.cli import interrupts
from quengine.cli.chat.completion import CommandCompleter, is_command
from quengine.cli.chat.notes import note
from quengine.cli.chat.quoted_block import is_open
from quengine.cli.chat.session_file import state_folder

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
