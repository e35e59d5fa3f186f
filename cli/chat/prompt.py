"""Messages typed at the terminal, edited with prompt_toolkit."""

from collections.abc import Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from quengine.cli.chat.completion import CommandCompleter, is_command
from quengine.cli.chat.notes import note
from quengine.cli.chat.state_folder import state_folder


class TerminalPrompt:
    """The prompt of a conversation: Ctrl-C clears a line, Ctrl-D ends."""

    def __init__(self) -> None:
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        # The menu takes lines below the prompt, so it is only there for what has completions.
        completing = Condition(lambda: is_command(get_app().current_buffer.text))
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            key_bindings=keys,
            completer=CommandCompleter(),
            complete_while_typing=completing,
        )

    def lines(self) -> Iterator[str]:
        """What is typed, until Ctrl-D."""
        while True:
            try:
                yield self._session.prompt("> ")
            except KeyboardInterrupt:
                note("Ctrl-D or /exit leaves")
            except EOFError:
                return

    def edit(self, text: str) -> str | None:
        """`text` as the user changed it; None where Ctrl-C or Ctrl-D left it."""
        try:
            return self._session.prompt("> ", default=text)
        except (KeyboardInterrupt, EOFError):
            return None


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
