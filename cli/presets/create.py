"""`engine create`: makes a preset of a TOML file or of Ollama's Modelfile."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from quengine.errors import EngineError
from quengine.models.hub.hub import ModelNotHereError, resolve_model
from quengine.models.hub.presets import find_preset, preset_path, write_preset
from quengine.options import table_fields
from quengine.platform.input_files import read_text
from quengine.request.preset import GROUPS, PLAIN_KEYS, check_no_adapter, table_options


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What --model and the others will take.")],
    file: Annotated[
        Path, typer.Option("-f", "--file", metavar="FILE", help="A preset in TOML, or a Modelfile.")
    ] = Path("Modelfile"),
) -> None:
    """Make a preset: a model under a name, with a system message, a template, sampling, a context length.

    Its options take the place of the defaults of generate, chat, run and serve; flags come before them. One of
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
    from quengine.models.hub.catalogue import catalogue

    path = preset_path(name)
    if name.lower() in catalogue():
        raise EngineError(f"{name}: that is an alias (`engine list --all`); give the preset another name")
    return path


def read_preset(file: Path) -> tuple[dict[str, Any], list[str]]:
    """A preset's table as it is stored, checked, and lines for the user.

    Raises:
        EngineError: the file cannot be read, or is no preset; an option is wrong; its model's name stands for nothing.
    """
    from quengine.cli.presets.modelfile import is_modelfile, modelfile_table

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
    if (base := find_preset(table["model"])) is not None:
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
    check_no_adapter(table, where)
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


def absolute(model: str, folder: Path) -> str:
    """A model's name for a preset: a path is made absolute, from the folder of the file that names it.

    Links stay: shards are found beside a link, and not beside what it leads to.
    """
    path = Path(model).expanduser()
    here = path if path.is_absolute() else folder / path
    return os.path.normpath(here.absolute()) if here.is_file() or (here / "config.json").is_file() else model
