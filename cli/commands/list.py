"""`engine list`: the models that are here, and the names of those that can be fetched."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from quengine.cli.terminal import write_line


@dataclass(frozen=True)
class Row:
    """One line: a model that is here, or with no path one that can be pulled."""

    name: str
    size: int | None
    quant: str
    path: Path | None
    about: str = ""


def list_models(
    everything: Annotated[bool, typer.Option("-a", "--all", help="Also the aliases not pulled yet.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List the models on this machine: name, size, quantization, path."""
    rows = installed_rows()
    if everything:
        rows += _catalogue_rows({row.name for row in rows})
    if as_json:
        typer.echo(json.dumps([{**vars(row), "path": row.path and str(row.path)} for row in rows], indent=2))
        return
    if not rows:
        typer.echo("no models here; `engine list --all` shows what `engine pull` knows by name", err=True)
        return
    wide = max(len(row.name) for row in rows)
    typer.echo(f"{'NAME':{wide}}  {'SIZE':>9}  {'QUANT':8}  PATH")
    for row in rows:
        size = f"{row.size / 1e9:.2f} GB" if row.size is not None else "-"
        write_line(f"{row.name:{wide}}  {size:>9}  {row.quant:8}  {row.path or f'(not pulled) {row.about}'}")


def installed_rows() -> list[Row]:
    """The models here: those that Python packages ship, then those in the Hugging Face cache."""
    from quengine.models.hub.catalogue import catalogue
    from quengine.models.hub.hub import packaged_file
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
        rows.append(Row(name, model.nbytes, model.quant, model.path))
    return rows


def _catalogue_rows(here: set[str]) -> list[Row]:
    from quengine.models.hub.catalogue import catalogue
    from quengine.models.hub.hub_name import quant_of

    absent = [entry for entry in catalogue().values() if entry.alias not in here]
    return [Row(entry.alias, None, quant_of(entry.file).upper(), None, entry.about) for entry in absent]
