"""The slash commands of `engine chat`: a table of names, what follows them, and functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quengine.cli.chat.answering_keys import no_echo
from quengine.cli.chat.arguments import file_name, one_word
from quengine.cli.chat.attachment import read_attachment
from quengine.cli.chat.clipboard import copy
from quengine.cli.chat.notes import note
from quengine.cli.chat.session_file import SessionFile, excerpt, save, session_lines, session_path
from quengine.cli.chat.settings import changed, settings_lines
from quengine.cli.pulling import offer_pull
from quengine.cli.report import print_report
from quengine.errors import EngineError, nearest

if TYPE_CHECKING:
    from quengine.cli.chat.repl import Repl

KEYS = (
    'Ctrl-C stops an answer. Alt-Enter, or lines between """ and """, make a message of several lines; '
    "Ctrl-X Ctrl-E opens $EDITOR. A message that begins with / is typed with //."
)

OLLAMA = {"bye": "exit", "clear": "reset", "?": "help"}
"""Commands of `ollama run` that have another name here."""


@dataclass(frozen=True)
class Command:
    """One command: what is typed behind its name, a line of help, and what it does with it.

    `completes` is what the text behind the name is completed with.
    """

    argument: str
    help: str
    run: "Callable[[Repl, str], None]"
    completes: Literal["", "path", "session", "setting", "model"] = ""


def run_command(repl: "Repl", line: str) -> None:
    """Run the command that `line`, without its slash, names. Raises EngineError for an unknown one."""
    name, _, rest = line.partition(" ")
    command = COMMANDS.get(OLLAMA.get(name.strip(), name.strip()))
    if command is None:
        near = nearest(name.strip(), COMMANDS, "/")
        raise EngineError(f"no command /{name.strip()}{near}; /help lists them (// sends a message with /)")
    command.run(repl, rest.strip())


def _help(repl: "Repl", _: str) -> None:
    del repl
    for name, command in COMMANDS.items():
        note(f"{f'/{name} {command.argument}':18} {command.help}")
    note(KEYS)


def _reset(repl: "Repl", _: str) -> None:
    repl.session.reset()
    repl.attachments.clear()
    note("conversation cleared")


def _system(repl: "Repl", text: str) -> None:
    if text:
        repl.session.set_system("" if text in ('""', "''") else text)
    shown = repl.session.system
    note("no system message" if shown is None else f"system message: {shown}")


def _regen(repl: "Repl", _: str) -> None:
    repl.answer(repl.session.retry(), "the last one stays")
    if repl.session.params.greedy:
        note("temp is 0, so the answer is the same; /set temp 0.8 varies it")


def _edit(repl: "Repl", text: str) -> None:
    edited = text or repl.edit_last()
    if edited is None or not edited.strip():
        note("not changed")
        return
    repl.answer(repl.session.retry(edited), "the last one stays")


def _undo(repl: "Repl", _: str) -> None:
    note(f"dropped: {excerpt(repl.session.undo())}")


def _set(repl: "Repl", text: str) -> None:
    name, _, value = text.partition(" ")
    if value.strip():
        repl.session.params = changed(repl.session.params, name, value.strip())
    for line in settings_lines(repl.session.params, name or None):
        note(line)


def _file(repl: "Repl", text: str) -> None:
    llm, path = repl.session.llm, file_name("file", text)
    used = repl.session.used_tokens + sum(each.tokens for each in repl.attachments)
    attached = read_attachment(path, llm, llm.ctx_size - used)
    repl.attachments.append(attached)
    note(f"{path.name}: {attached.tokens} tokens, sent with the next message")


def _image(repl: "Repl", _: str) -> None:
    raise EngineError(
        f"{repl.models.name} reads text only, as every model here does; /file sends a text file"
    )


def _model(repl: "Repl", name: str) -> None:
    if name:
        used = len(repl.session.messages)
        offer_pull(name)
        with no_echo():
            repl.models.change(repl.session, name)
        note(f"the conversation of {used} messages goes on with {name}")
    llm = repl.session.llm
    note(f"{repl.models.name}: {llm.model_config.name}, context {llm.ctx_size} tokens, {llm.loaded.path}")


def _copy(repl: "Repl", _: str) -> None:
    answers = [each["content"] for each in repl.session.messages if each["role"] == "assistant"]
    if not answers:
        raise EngineError("no answer yet")
    copy(answers[-1])
    note(f"{len(answers[-1])} characters sent to the terminal's clipboard")


def _save(repl: "Repl", text: str) -> None:
    kept = repl.session_file.path if repl.session_file is not None and not text else None
    path = kept or session_path(one_word("save", text))
    save(repl.session, path)
    note(f"saved {len(repl.session.messages)} messages to {path}")


def _load(repl: "Repl", text: str) -> None:
    path = session_path(one_word("load", text))
    repl.session.load(path)
    if repl.session_file is not None:  # what is loaded goes on in its own file
        repl.session_file = SessionFile(repl.session, path)
    note(f"loaded {len(repl.session.messages)} messages from {path}")


def _sessions(repl: "Repl", _: str) -> None:
    lines = list(session_lines())
    for line in lines:
        note(line)
    if not lines:
        note("no session is kept; /save NAME keeps this one, --session NAME saves it after each answer")
    elif repl.session_file is not None:
        note(f"this one is kept in {repl.session_file.path}")


def _stats(repl: "Repl", _: str) -> None:
    last, llm, used = repl.session.last, repl.session.llm, repl.session.used_tokens
    if last is None:
        note("no answer yet")
        return
    print_report(last, llm, repl.session.params, whole=True)
    note(f"context    {used} of {llm.ctx_size} tokens used, {100 * used / llm.ctx_size:.0f}%")


def _exit(repl: "Repl", _: str) -> None:
    repl.leaving = True


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
