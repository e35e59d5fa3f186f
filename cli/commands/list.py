"""`engine list`: the models that are here, and the names of those that can be fetched."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from quengine.cli.terminal import write_line
from quengine.errors import EngineError


@dataclass(frozen=True)
class Row:
    """One line: a preset, a model that is here, or with no path one that can be pulled."""

    name: str
    size: int | None
    quant: str
    path: Path | None
    about: str = ""
    is_preset: bool = False
    projector: Path | None = None


def list_models(
    everything: Annotated[bool, typer.Option("-a", "--all", help="Also the aliases not pulled yet.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List the models and presets on this machine: name, size, quantization, path."""
    rows = installed_rows() + preset_rows()
    if everything:
        rows += _catalogue_rows({row.name for row in rows})
    if as_json:
        paths = ("path", "projector")
        shown = [
            {key: value and str(value) if key in paths else value for key, value in vars(row).items()}
            for row in rows
        ]
        typer.echo(json.dumps(shown, indent=2))
        return
    if not rows:
        typer.echo("no models here; `engine list --all` shows what `engine pull` knows by name", err=True)
        return
    wide = max(len(row.name) for row in rows)
    typer.echo(f"{'NAME':{wide}}  {'SIZE':>9}  {'QUANT':8}  PATH")
    for row in rows:
        size = f"{row.size / 1e9:.2f} GB" if row.size is not None else "-"
        write_line(f"{row.name:{wide}}  {size:>9}  {row.quant:8}  {_place(row)}")


def _place(row: Row) -> str:
    """The last column: what a preset is of, else where a model is."""
    images = f" (images: {row.projector.name})" if row.projector is not None else ""
    return row.about if row.is_preset else f"{row.path or f'(not pulled) {row.about}'}{images}"


def installed_rows() -> list[Row]:
    """The models here: those that Python packages ship, then those in the Hugging Face cache."""
    from quengine.models.hub.hub import catalogue, packaged_file
    from quengine.models.hub.hub_cache import installed_models
    from quengine.models.hub.hub_name import quant_of

    rows = []
    for entry in catalogue().values():
        path = packaged_file(entry)
        if path is not None:
            rows.append(Row(entry.alias, path.stat().st_size, quant_of(entry.file), path, entry.about))
    aliases = {(entry.repo, entry.file): entry.alias for entry in catalogue().values()}
    for model in installed_models():
        name = aliases.get((model.repo, model.files[0])) or f"hf:{model.repo}/{model.files[0]}"
        rows.append(Row(name, model.nbytes, model.quant, model.path, projector=model.projector_path))
    return rows


def model_names() -> list[str]:
    """What --model takes, but paths: presets, aliases, and names of other models that are here."""
    from quengine.models.hub.hub import catalogue
    from quengine.models.hub.presets import preset_names

    return list(dict.fromkeys([*preset_names(), *catalogue(), *(row.name for row in installed_rows())]))


def preset_rows() -> list[Row]:
    """The presets, with the size of the file that each is made of, where it is here."""
    from quengine.models.hub.hub import resolve_model
    from quengine.models.hub.hub_name import quant_of
    from quengine.models.hub.presets import preset_names, read_stored

    rows = []
    for name in preset_names():
        about, path, size = "", None, None
        try:
            base = str(read_stored(name)["model"])
            about = f"preset of {base}"
            path = resolve_model(base)
            size = path.stat().st_size if path.is_file() else None
        except EngineError as error:
            about = about or str(error)
        rows.append(Row(name, size, quant_of(path.name) if path else "", path, about, is_preset=True))
    return rows


def _catalogue_rows(here: set[str]) -> list[Row]:
    from quengine.models.hub.hub import catalogue
    from quengine.models.hub.hub_name import quant_of

    absent = [entry for entry in catalogue().values() if entry.alias not in here]
    return [
        Row(entry.alias, round(entry.gigabytes * 1e9), quant_of(entry.file).upper(), None, entry.about)
        for entry in absent
    ]
