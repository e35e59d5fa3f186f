"""`engine cp`: another name for a preset or a model."""

from typing import Annotated

import typer

from quengine.cli.commands.create import absolute, check_name
from quengine.cli.flags import complete_models
from quengine.errors import EngineError
from quengine.models.hub.hub import ModelNotHereError, resolve_model
from quengine.models.hub.presets import synthetic_preset, write_preset


def copy(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A preset, or a model.", autocompletion=complete_models)
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new preset.")],
) -> None:
    """Copy a preset under another NAME, or make a preset without options of a model."""
    from contextlib import suppress
    from pathlib import Path

    path = check_name(name)
    if path.exists():
        raise EngineError(f"{name}: there is a preset of that name; remove it with: engine rm {name}")
    table = synthetic_preset(source)
    if table is None:
        with suppress(ModelNotHereError):  # its name is right
            resolve_model(source)
        table = {"model": absolute(source, Path.cwd())}
    write_preset(name, table)
    typer.echo(f"made {name}, of {table['model']}: {path}", err=True)
