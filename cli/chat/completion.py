"""Completion of slash commands and of what follows them, for prompt_toolkit."""

from collections.abc import Iterator

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from quengine.cli.chat.commands import COMMANDS
from quengine.cli.chat.session_file import session_names
from quengine.cli.chat.settings import setting_names
from quengine.cli.flags import complete_models


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
