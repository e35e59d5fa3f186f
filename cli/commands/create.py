"""`engine create`: makes a preset of a TOML file or of Ollama's Modelfile.

A Modelfile (docs/modelfile.md and parser/parser.go of Ollama) becomes the table that a TOML file has.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from quengine.errors import EngineError
from quengine.models.hub.hub import ModelNotHereError, resolve_model
from quengine.models.hub.hub_name import own_name
from quengine.models.hub.presets import preset_path, synthetic_preset, write_preset
from quengine.models.lora.adapter import near, parse_lora
from quengine.options import flagged, spellings, table_fields, value_type
from quengine.platform.input_files import read_text
from quengine.request.go_template import UnknownFormError, jinja_of
from quengine.request.preset import GROUPS, PLAIN_KEYS, table_options

_INSTRUCTION = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+")
_VALUE = re.compile(r'"""(.*?)"""|"(.*?)"[ \t]*(?=\n|$)|([^\n]*)', re.DOTALL)
_OPTIONS = {
    "num_ctx": "ctx_size",
    "num_predict": "max_tokens",
    "num_thread": "threads",
    "use_mmap": "mmap",
}
"""Parameters that have another name here."""


def is_modelfile(text: str) -> bool:
    """Whether a text begins, after comments, as a Modelfile does and no TOML file."""
    first = next((line.strip() for line in text.splitlines() if line.strip() and line.strip()[0] != "#"), "")
    return bool(re.match(r"[A-Za-z]+[ \t]+[^=\s]", first))


def modelfile_table(text: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """The table of a Modelfile's preset, and lines for the user about what is left out.

    Raises:
        EngineError: an instruction is unknown or not supported, or FROM is missing.
    """
    table: dict[str, Any] = {}
    notes: list[str] = []
    for number, name, value in _instructions(text, where):
        at = f"{where}, line {number}"
        if name == "FROM":
            table["model"] = own_name(value)
        elif name == "PARAMETER":
            _take_parameter(table, notes, value, at)
        elif name == "TEMPLATE":
            _take_template(table, notes, value)
        elif name == "SYSTEM":
            table["system"] = value
        elif name == "MESSAGE":
            role, _, content = value.partition(" ")
            table.setdefault("messages", []).append({"role": role, "content": content})
        elif name == "LICENSE":
            table["license"] = f"{table['license']}\n\n{value}" if "license" in table else value
        elif name == "ADAPTER":
            table.setdefault("lora", []).append(value)
        elif name in ("RENDERER", "PARSER", "REQUIRES", "DRAFT"):
            notes.append(f"{name} {value}: not used")
        else:
            raise EngineError(f"{at}: no instruction {name}")
    if "model" not in table:
        raise EngineError(f"{where}: no FROM, which names the model")
    return {"model": table.pop("model"), **table}, notes


def _instructions(text: str, where: str) -> Iterator[tuple[int, str, str]]:
    """The number of its line, the name and the value of each instruction."""
    at = 0
    while at < len(text):
        if (blank := re.compile(r"[ \t]*(#[^\n]*)?(\n|$)").match(text, at)) is not None and blank[0]:
            at = blank.end()
            continue
        number = text.count("\n", 0, at) + 1
        begun = _INSTRUCTION.match(text, at)
        if begun is None:
            line = text[at:].splitlines()[0]
            raise EngineError(f"{where}, line {number}: {line[:60]!r} is no instruction with a value")
        at, name = begun.end(), begun[1].upper()
        head = re.compile(r"\w+[ \t]+").match(text, at) if name in ("PARAMETER", "MESSAGE") else None
        given = _VALUE.match(text, at if head is None else head.end())
        assert given is not None
        value = next(part for part in given.groups() if part is not None)
        if given[3] is not None and value.startswith('"""'):
            raise EngineError(f'{where}, line {number}: {name} begins with """ and does not end')
        value = value if given[1] else value.strip()
        yield number, name, value if head is None else f"{head[0].strip()} {value}"
        at = given.end()


def _take_parameter(table: dict[str, Any], notes: list[str], text: str, at: str) -> None:
    """One PARAMETER; those without an option here, or an effect, are noted."""
    name, _, value = text.partition(" ")
    name = _OPTIONS.get(name.lower(), name.lower())
    known = {each: field for group in GROUPS for field in flagged(group) for each in spellings(field)}
    if name == "num_gpu" and value == "0":
        table["device"] = "cpu"
    elif name not in known:
        notes.append(f"PARAMETER {name} {value}: no such option here, left out")
    elif value_type(known[name]) is tuple:
        table.setdefault(name, []).append(value)
    else:
        kind = value_type(known[name])
        try:
            table[name] = value.lower() == "true" if kind is bool else kind(value)
        except (TypeError, ValueError):
            raise EngineError(f"{at}: PARAMETER {name} {value}: must be a number") from None
        if name == "max_tokens" and table[name] < 0:  # Ollama's -2, to fill the context, is -1 here
            table[name] = -1


def _take_template(table: dict[str, Any], notes: list[str], text: str) -> None:
    try:
        table["template"] = jinja_of(text)
    except UnknownFormError as unknown:
        notes.append(f"TEMPLATE has {unknown}, which is not translated: the model's own template is used")


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The preset's name, which --model then takes.")],
    file: Annotated[
        Path, typer.Option("-f", "--file", metavar="FILE", help="A preset in TOML, or a Modelfile.")
    ] = Path("Modelfile"),
) -> None:
    """Make a preset: a model under a name, with a system message, a template, sampling, a context length.

    Its options replace the defaults of generate, chat, run and serve; flags override its options. A preset of
    that name is replaced.
    """
    path = check_name(name)
    table, notes = read_preset(file)
    replaced = path.exists()
    write_preset(name, table)
    for note in notes:
        typer.echo(f"engine: {note}", err=True)
    typer.echo(f"{'replaced' if replaced else 'made'} {name}, of {table['model']}: {path}", err=True)


def check_name(name: str) -> Path:
    """Where the preset will be. Raises EngineError for a name that no preset can have, or that a model has."""
    from quengine.models.hub.hub import catalogue

    path = preset_path(name)
    if name.lower() in catalogue():
        raise EngineError(f"{name}: that is an alias (`engine list --all`); give the preset another name")
    return path


def read_preset(file: Path) -> tuple[dict[str, Any], list[str]]:
    """A preset's table as it is stored, checked, and lines for the user.

    Raises:
        EngineError: the file cannot be read, or is no preset; an option is wrong; its model's name stands for nothing.
    """

    text, notes = read_text(file, "cannot read the preset from"), list[str]()
    if is_modelfile(text):
        table, notes = modelfile_table(text, str(file))
    else:
        try:
            table = tomllib.loads(text)
        except ValueError as error:
            raise EngineError(f"{file}: neither TOML nor a Modelfile: {error}") from None
    if not isinstance(table.get("model"), str):
        raise EngineError(f'{file}: it names no model: model = "smollm2-135m"')
    table = _with_template(_named_by_fields(table, str(file)), file)
    for key in ("model", "draft_model"):
        if isinstance(table.get(key), str):
            table[key] = absolute(table[key], file.absolute().parent)
    if "lora" in table:
        table["lora"] = _adapters(table["lora"], file)
    if (base := synthetic_preset(table["model"])) is not None:
        table = {**base, **table, "model": base["model"]}
    table_options(table, str(file))
    try:
        resolve_model(table["model"])
    except ModelNotHereError:
        notes.append(f"{table['model']} is not on this machine; fetch it with: engine pull {table['model']}")
    return table, notes


def _named_by_fields(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table with each option under its field's name, so that one of a preset it is made of is replaced by it."""
    plain = {key: value for key, value in table.items() if key in PLAIN_KEYS}
    options = table_fields({k: v for k, v in table.items() if k not in plain}, GROUPS, where)
    return {**plain, **{name: value for name, (_, _, value) in options.items()}}


def _with_template(table: dict[str, Any], file: Path) -> dict[str, Any]:
    """The table with a template's text in place of its file."""
    from quengine.request.chat_options import ChatOptions

    given = table.pop("template_file", None)
    if given is None:
        return table
    if not isinstance(given, str):
        raise EngineError(f"{file}: template_file must be a file's name")
    return {**table, "template": ChatOptions(template_file=file.parent / Path(given).expanduser()).source()}


def _adapters(given: Any, file: Path) -> list[str]:
    """The adapters of a preset, with absolute paths. Raises EngineError where one is none, or is not there."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise EngineError(f'{file}: lora: must be FILE[:SCALE], or a list of them, as ["style.gguf:0.5"]')
    found = [near(text, file.absolute().parent) for text in texts]
    for path, _ in map(parse_lora, found):
        if not path.exists():
            raise EngineError(f"{file}: no adapter {path}: there is no such file or folder")
    return found


def absolute(model: str, folder: Path) -> str:
    """A model's name for a preset: a path is made absolute, from the folder of the file that names it.

    Links stay: shards are found beside a link, and not beside what it leads to.
    """
    path = Path(model).expanduser()
    here = path if path.is_absolute() else folder / path
    return os.path.normpath(here.absolute()) if here.is_file() or (here / "config.json").is_file() else model
