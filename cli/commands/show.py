"""`engine show`: what a model is and what it needs, from its header alone."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from quengine.cli.flags import complete_models
from quengine.options import MODEL_HELP


def show(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False, autocompletion=complete_models),
    ] = None,
    model_option: Annotated[
        str | None,
        typer.Option("-m", "--model", help="The same.", show_default=False, autocompletion=complete_models),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model's sizes, types, memory need, tokenizer and template, and a preset's options.

    Reads the header only.
    """
    import json

    from quengine.cli.show_report import as_object, devices_of, lines_of
    from quengine.cli.terminal import write_line
    from quengine.errors import EngineError
    from quengine.models.hub.hub import resolve_model
    from quengine.models.hub.presets import synthetic_preset
    from quengine.models.model_summary import summarize

    given = [name for name in (model, model_option) if name is not None]
    if len(given) != 1:
        raise EngineError("show takes one model: engine show MODEL")
    preset = synthetic_preset(given[0])
    if preset is not None and not as_json:
        for line in ("preset", *(f"  {each}" for each in _preset_lines(preset)), ""):
            write_line(line)
    summary = summarize(resolve_model(given[0]))
    devices = devices_of(summary)
    if as_json:
        shown = as_object(summary, devices, tensors)
        typer.echo(json.dumps(shown if preset is None else {**shown, "preset": preset}, indent=2))
        return
    for line in lines_of(summary, devices, tensors):
        write_line(line)


def _preset_lines(table: Mapping[str, Any]) -> list[str]:
    """A preset's options for people, a line each; long texts by their first line and length."""
    wide = max(12, *map(len, table))
    return [f"{key:{wide}} {_excerpt(value)}" for key, value in table.items()]


def _excerpt(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return f"{len(value)} messages"
    text = str(value) if not isinstance(value, list) else ", ".join(map(repr, value))
    lines = text.strip().splitlines() or [""]
    more = f" ({len(text)} characters)" if len(lines) > 1 or len(text) > 100 else ""
    return f"{lines[0][:100]}{'...' if more else ''}{more}"
