"""`engine pull`: fetches models from the Hugging Face Hub."""

from typing import Annotated

import typer

from quengine.cli.command_table import ExampleCommand
from quengine.cli.flags import complete_models


class Command(ExampleCommand):
    """`engine pull`, whose help ends with the aliases: read when the help is shown, not at every start."""

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        from quengine.models.hub.hub import catalogue

        wide = max(map(len, catalogue()))
        rows = [
            f"{entry.alias:{wide}}  {entry.gigabytes:6.2f} GB  {entry.about}"
            for entry in catalogue().values()
        ]
        return "\n".join([super().get_help(ctx), "Aliases", *(f"  {row}" for row in rows), ""])


def pull(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="Aliases, hf:user/repo:QUANT, hf:user/repo/file.gguf, or addresses of the Hub.",
            autocompletion=complete_models,
        ),
    ],
    offline: Annotated[
        bool, typer.Option("--offline", help="Use only what is here (as HF_HUB_OFFLINE=1 does).")
    ] = False,
    no_mmproj: Annotated[
        bool, typer.Option("--no-mmproj", help="Without the projector of a model that reads images.")
    ] = False,
) -> None:
    """Fetch models from the Hugging Face Hub, or go on with a fetch that was interrupted.

    The files go to the Hugging Face cache, which other programs share; their digests are checked. A
    model's projector (mmproj) comes with it, F16 before BF16 and Q8_0. Prints the path of each model.
    """
    from pathlib import Path

    from quengine.cli.loading import fetch
    from quengine.models.hub.hub import catalogue, packaged_file
    from quengine.models.hub.presets import base_model

    for name in map(base_model, names):
        entry = catalogue().get(name.lower())
        path = packaged_file(entry) if entry is not None else None
        if path is None and Path(name).expanduser().exists():
            path = Path(name).expanduser()
        if path is None:
            path = fetch(name, offline, not no_mmproj)
        typer.echo(path)
