"""The slash commands of `engine chat`: a table of names, what follows them, and functions."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal, Protocol

from quengine.cli.chat.answering_keys import no_echo
from quengine.cli.chat.arguments import file_name, one_word
from quengine.cli.chat.attachment import Attachment, read_attachment
from quengine.cli.chat.clipboard import copy
from quengine.cli.chat.models import ChatModels
from quengine.cli.chat.notes import note
from quengine.cli.chat.session_file import SessionFile, excerpt, save, session_lines, session_path
from quengine.cli.chat.settings import changed, settings_lines
from quengine.cli.pulling import offer_pull
from quengine.cli.report import print_report
from quengine.errors import EngineError, nearest
from quengine.request.chat_session import ChatSession
from quengine.structured.tool_calls import Delta

KEYS = (
    'Ctrl-C stops an answer. Alt-Enter, or lines between """ and """, make a message of several lines; '
    "Ctrl-X Ctrl-E opens $EDITOR. A message that begins with / is typed with //."
)

OLLAMA = {"bye": "exit", "clear": "reset", "?": "help"}
"""Commands of `ollama run` that have another name here."""


class Conversation(Protocol):
    """What commands read and change of the conversation that they are typed in; `repl.Repl` says what each is."""

    session: ChatSession
    models: ChatModels
    session_file: SessionFile | None
    attachments: list[Attachment]
    leaving: bool

    def answer(self, deltas: Generator[Delta, None, None], otherwise: str) -> None: ...

    def edit_last(self) -> str | None: ...


@dataclass(frozen=True)
class Command:
    """One command: what is typed behind its name, a line of help, and what it does with it.

    `completes` is what the text behind the name is completed with.
    """

    argument: str
    help: str
    run: Callable[[Conversation, str], None]
    completes: Literal["", "path", "session", "setting", "model"] = ""


def run_command(chat: Conversation, line: str) -> None:
    """Run the command that `line`, without its slash, names. Raises EngineError for an unknown one."""
    name, _, rest = line.partition(" ")
    command = COMMANDS.get(OLLAMA.get(name.strip(), name.strip()))
    if command is None:
        near = nearest(name.strip(), COMMANDS, "/")
        raise EngineError(f"no command /{name.strip()}{near}; /help lists them (// sends a message with /)")
    command.run(chat, rest.strip())


def _help(chat: Conversation, _: str) -> None:
    del chat
    for name, command in COMMANDS.items():
        note(f"{f'/{name} {command.argument}':18} {command.help}")
    note(KEYS)


def _reset(chat: Conversation, _: str) -> None:
    chat.session.reset()
    chat.attachments.clear()
    note("conversation cleared")


def _system(chat: Conversation, text: str) -> None:
    if text:
        chat.session.set_system("" if text in ('""', "''") else text)
    shown = chat.session.system
    note("no system message" if shown is None else f"system message: {shown}")


def _regen(chat: Conversation, _: str) -> None:
    chat.answer(chat.session.retry(), "the last one stays")
    if chat.session.params.greedy:
        note("temp is 0, so the answer is the same; /set temp 0.8 varies it")


def _edit(chat: Conversation, text: str) -> None:
    edited = text or chat.edit_last()
    if edited is None or not edited.strip():
        note("not changed")
        return
    chat.answer(chat.session.retry(edited), "the last one stays")


def _undo(chat: Conversation, _: str) -> None:
    note(f"dropped: {excerpt(chat.session.undo())}")


def _set(chat: Conversation, text: str) -> None:
    name, _, value = text.partition(" ")
    if value.strip():
        chat.session.params = changed(chat.session.params, name, value.strip())
    for line in settings_lines(chat.session.params, name or None):
        note(line)


def _file(chat: Conversation, text: str) -> None:
    llm, path = chat.session.llm, file_name("file", text)
    used = chat.session.used_tokens + sum(each.tokens for each in chat.attachments)
    attached = read_attachment(path, llm, llm.ctx_size - used)
    chat.attachments.append(attached)
    note(f"{path.name}: {attached.tokens} tokens, sent with the next message")


def _image(chat: Conversation, _: str) -> None:
    raise EngineError(
        f"{chat.models.name} reads text only, as every model here does; /file sends a text file"
    )


def _model(chat: Conversation, name: str) -> None:
    if name:
        used = len(chat.session.messages)
        offer_pull(name)
        with no_echo():
            chat.models.change(chat.session, name)
        note(f"the conversation of {used} messages goes on with {name}")
    llm = chat.session.llm
    note(f"{chat.models.name}: {llm.model_config.name}, context {llm.ctx_size} tokens, {llm.loaded.path}")


def _copy(chat: Conversation, _: str) -> None:
    answers = [each["content"] for each in chat.session.messages if each["role"] == "assistant"]
    if not answers:
        raise EngineError("no answer yet")
    copy(answers[-1])
    note(f"{len(answers[-1])} characters sent to the terminal's clipboard")


def _save(chat: Conversation, text: str) -> None:
    kept = chat.session_file.path if chat.session_file is not None and not text else None
    path = kept or session_path(one_word("save", text))
    save(chat.session, path)
    note(f"saved {len(chat.session.messages)} messages to {path}")


def _load(chat: Conversation, text: str) -> None:
    path = session_path(one_word("load", text))
    chat.session.load(path)
    if chat.session_file is not None:  # what is loaded goes on in its own file
        chat.session_file = SessionFile(chat.session, path)
    note(f"loaded {len(chat.session.messages)} messages from {path}")


def _sessions(chat: Conversation, _: str) -> None:
    lines = list(session_lines())
    for line in lines:
        note(line)
    if not lines:
        note("no session is kept; /save NAME keeps this one, --session NAME saves it after each answer")
    elif chat.session_file is not None:
        note(f"this one is kept in {chat.session_file.path}")


def _stats(chat: Conversation, _: str) -> None:
    last, llm, used = chat.session.last, chat.session.llm, chat.session.used_tokens
    if last is None:
        note("no answer yet")
        return
    print_report(last, llm, chat.session.params, whole=True)
    note(f"context    {used} of {llm.ctx_size} tokens used, {100 * used / llm.ctx_size:.0f}%")


def _exit(chat: Conversation, _: str) -> None:
    chat.leaving = True


COMMANDS = {
    "help": Command("", "this list", _help),
    "regen": Command("", "another answer to the last message", _regen),
    "edit": Command("[TEXT]", "change the last message, or replace it with TEXT, and ask again", _edit),
    "undo": Command("", "drop the last message and its answer", _undo),
    "reset": Command("", "clear the conversation (also /clear), keep the system message", _reset),
    "system": Command("[TEXT]", 'set the system message; without TEXT show it, with "" remove it', _system),
    "set": Command(
        "[NAME VALUE]", "change how tokens are chosen; alone it lists the settings", _set, "setting"
    ),
    "file": Command("PATH", "send a text file with the next message", _file, "path"),
    "image": Command("PATH", "refused: models here read text", _image, "path"),
    "model": Command(
        "[NAME]", "go on with another model or preset; alone it shows the one in use", _model, "model"
    ),
    "copy": Command("", "the last answer to the clipboard", _copy),
    "save": Command("NAME|FILE", "write the conversation to a file", _save, "session"),
    "load": Command("NAME|FILE", "go on with a saved conversation", _load, "session"),
    "sessions": Command("", "the conversations saved by name", _sessions),
    "stats": Command("", "what the last answer cost, and how full the context is", _stats),
    "exit": Command("", "leave (also /quit, /bye and Ctrl-D)", _exit),
    "quit": Command("", "leave", _exit),
}
