"""The slash commands of `engine chat`: a table of names, what follows them, and functions.

`/set` takes the sampling parameters by the names of their flags, with the flags' checks: any spelling of the flag
without its dashes ("temp", "top_k" or "top-k", "n") or the parameter's own name. `/copy` writes the control sequence
OSC 52 of xterm ("Manipulate Selection Data"), which works over SSH too.
"""

import base64
import re
import shlex
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import Field, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from quengine.cli.chat.input import no_echo
from quengine.cli.chat.models import ChatModels
from quengine.cli.chat.session_file import SessionFile, excerpt, save, session_lines, session_path
from quengine.cli.loading import offer_pull
from quengine.cli.report import print_report
from quengine.cli.terminal import note
from quengine.errors import EngineError, nearest, shown
from quengine.options import flag_of, flagged, spellings, value_type
from quengine.platform.input_files import MAX_INPUT_BYTES, read_text
from quengine.request.chat_session import ChatSession
from quengine.request.sampling_params import SamplingParams
from quengine.structured.tool_calls import Delta

if TYPE_CHECKING:
    from quengine.llm import LLM


def words(command: str, text: str) -> list[str]:
    """The words of `text`, which quotes hold together. Raises EngineError for a quote without its end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise EngineError(f"/{command} {text}: {error}") from None


def one_word(command: str, text: str) -> str:
    """The one file name, or name of a session, in `text`. Raises EngineError for none and for several."""
    given = words(command, text)
    if len(given) != 1:
        raise EngineError(f"/{command} needs one file name (quote one with spaces)")
    return given[0]


def file_name(command: str, text: str) -> Path:
    """The one path in `text`, ~ replaced. Raises EngineError for none and for several."""
    try:
        return Path(one_word(command, text)).expanduser()
    except RuntimeError as error:  # ~ of an unknown user, or without a home folder
        raise EngineError(f"/{command} {text}: {error}") from None


def copy(text: str) -> None:
    """Ask the terminal to take `text` into its clipboard. Raises EngineError off a terminal."""
    if not sys.stdout.isatty():
        raise EngineError("/copy needs a terminal, whose clipboard takes the answer")
    data = base64.b64encode(text.encode(errors="replace")).decode()
    sys.stdout.write(f"\x1b]52;c;{data}\x07")
    sys.stdout.flush()


BYTES_A_TOKEN = 64
"""Of text, as an upper bound for files that may fit the context: larger ones are refused unread."""


@dataclass(frozen=True)
class Attachment:
    """A file's text as the message has it, and its number of tokens."""

    text: str
    tokens: int


def read_attachment(path: Path, llm: "LLM", room: int) -> Attachment:
    """The text of a file, of at most `room` tokens, between fences and under its name.

    Raises:
        EngineError: it is no text file, too large for the context, or cannot be read.
    """
    content = read_text(path, "cannot attach", min(MAX_INPUT_BYTES, llm.ctx_size * BYTES_A_TOKEN))
    longest = max((len(run) for run in re.findall("`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    end = "" if content.endswith("\n") or not content else "\n"
    text = f"{path.name}:\n{fence}\n{content}{end}{fence}"
    tokens = len(llm.encode(text))
    if tokens >= room:
        raise EngineError(
            f"cannot attach {path}: {tokens} tokens, and the context of {llm.ctx_size} has room for {max(0, room)}; "
            f"/reset makes room, --ctx-size N sets a longer context"
        )
    return Attachment(text, tokens)


_BOOLS = {
    "on": True,
    "true": True,
    "yes": True,
    "1": True,
    "off": False,
    "false": False,
    "no": False,
    "0": False,
}


def setting_names() -> list[str]:
    """The name of each parameter as `/set` lists it: its flag's first long one."""
    return [spellings(field)[0] for field in flagged(SamplingParams)]


def settings_lines(params: SamplingParams, name: str | None = None) -> list[str]:
    """Each parameter's name, value and help, or those of one. Raises EngineError for an unknown name."""
    chosen = flagged(SamplingParams) if name is None else [_field(name)]
    wide = max(map(len, setting_names()))
    return [
        f"{spellings(field)[0]:{wide}}  {_value_text(field, getattr(params, field.name)):8}  {flag_of(field).help}"
        for field in chosen
    ]


def changed(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """`params` with one parameter as typed; "" empties a list.

    Raises:
        EngineError: the name is unknown, or the value is not one that the flag takes.
    """
    field = _field(name)
    value = _read(field, text)
    after = replace(params, **{field.name: value})
    return after.with_seed() if field.name == "seed" else after


def _field(name: str) -> Field[Any]:
    known: dict[str, Field[Any]] = {
        each: field for field in reversed(flagged(SamplingParams)) for each in spellings(field)
    }
    wanted = name.lstrip("-").replace("-", "_")
    if wanted not in known:
        raise EngineError(f"no setting {name}{nearest(wanted, known)}; /set lists them")
    return known[wanted]


def _read(field: Field[Any], text: str) -> Any:
    kind, flag = value_type(field), flag_of(field)
    if kind in (tuple, Mapping):
        given = [word for word in words("set", text) if word]
        return flag.read(given) if flag.read is not None else tuple(given)
    try:
        value = _BOOLS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        rule = {bool: "on or off", int: "a whole number", float: "a number"}[kind]
        raise EngineError(f"/set {spellings(field)[0]} {shown(text)}: must be {rule}") from None
    return None if flag.none is not None and value == flag.none else value


def _value_text(field: Field[Any], value: Any) -> str:
    """A value as it would be typed."""
    if value is None:
        return str(flag_of(field).none)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return " ".join(f"{token}{bias:+g}" for token, bias in value.items()) or '""'
    return shlex.join(value).replace("\n", "\\n") or '""' if isinstance(value, tuple) else str(value)


KEYS = (
    'Ctrl-C stops an answer. Alt-Enter, or lines between """ and """, make a message of several lines; '
    "Ctrl-X Ctrl-E opens $EDITOR. A message that begins with / is typed with //."
)

ALSO = {"quit": "exit", "bye": "exit", "clear": "reset", "?": "help"}
"""Other names of commands, most of them those of `ollama run`."""


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
    """One command: what is typed after its name, a line of help, and what it does with it.

    `completes` is what the text after the name is completed with.
    """

    argument: str
    help: str
    run: Callable[[Conversation, str], None]
    completes: Literal["", "path", "session", "setting", "model"] = ""


def run_command(chat: Conversation, line: str) -> None:
    """Run the command that `line`, without its slash, names. Raises EngineError for an unknown one."""
    name, _, rest = line.partition(" ")
    command = COMMANDS.get(ALSO.get(name.strip(), name.strip()))
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


def _image(chat: Conversation, text: str) -> None:
    path = file_name("image", text)
    chat.session.attach(path)
    note(f"{path.name} is sent with the next message")


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
    "image": Command("PATH", "send an image with the next message", _image, "path"),
    "model": Command(
        "[NAME]", "go on with another model or preset; alone it shows the one in use", _model, "model"
    ),
    "copy": Command("", "the last answer to the clipboard", _copy),
    "save": Command("NAME|FILE", "write the conversation to a file", _save, "session"),
    "load": Command("NAME|FILE", "go on with a saved conversation", _load, "session"),
    "sessions": Command("", "the conversations saved by name", _sessions),
    "stats": Command("", "what the last answer cost, and how full the context is", _stats),
    "exit": Command("", "leave (also /quit, /bye and Ctrl-D)", _exit),
}
