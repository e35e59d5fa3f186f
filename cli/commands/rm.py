"""`engine rm`: deletes models that `engine pull` fetched, and presets."""

from typing import TYPE_CHECKING, Annotated

import typer

from quengine.cli.flags import complete_models
from quengine.cli.terminal import confirm_deletion
from quengine.errors import EngineError

if TYPE_CHECKING:
    from quengine.models.hub.hub_cache import InstalledModel


def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Names as `engine list` shows them.", autocompletion=complete_models
        ),
    ],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Delete models from the Hugging Face cache, and presets, after asking.

    The model that a preset is made of stays.
    """
    from quengine.models.hub.hub_cache import remove_model
    from quengine.models.hub.presets import preset_names, preset_path

    presets = [name for name in dict.fromkeys(names) if name in preset_names()]
    models = {name: _find(name) for name in names if name not in presets}
    for name in presets:
        typer.echo(f"{name}: a preset, {preset_path(name)}", err=True)
    for name, model in models.items():
        images = f", with {model.projector} where no other model has it" if model.projector else ""
        files = f"{', '.join(model.files)} ({model.nbytes / 1e9:.2f} GB) in {model.path.parent}{images}"
        typer.echo(f"{name}: {files}", err=True)
    if not yes and not confirm_deletion("Delete?", "engine rm -y ..."):
        return
    for name in presets:
        preset_path(name).unlink()
        typer.echo(f"{name}: deleted", err=True)
    for name, model in models.items():
        typer.echo(f"{name}: {remove_model(model) / 1e9:.2f} GB freed", err=True)


def _find(name: str) -> "InstalledModel":
    from quengine.models.hub.hub import catalogue, hub_name, packaged_file
    from quengine.models.hub.hub_cache import find_installed

    entry = catalogue().get(name.lower())
    found = find_installed(hub_name(name))
    if found is not None:
        return found
    if entry is not None and entry.package is not None and packaged_file(entry) is not None:
        raise EngineError(f"{name}: part of a Python package; remove it with: pip uninstall {entry.package}")
    raise EngineError(f"{name}: not on this machine; `engine list` shows what is")
