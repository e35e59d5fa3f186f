"""The page of `engine bench -o html`: a chart of speeds, one of the machine's limits, and all rows as a table."""

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from quengine.cli.charts import Bar, Cell, Chart, Row, page
from quengine.diagnostics.bench.bench_row import BenchRow

_KINDS: Mapping[str, Callable[[BenchRow], bool]] = {
    "Prompts": lambda row: row.test.generate == 0,
    "One sequence": lambda row: row.test.prompt == 0 and row.batch == 1,
    "Several sequences": lambda row: row.test.prompt == 0 and row.batch > 1,
    "Prompt and answer": lambda row: row.test.prompt > 0 and row.test.generate > 0,
}
"""Columns of the chart of speeds, and which rows stand in each."""


def bench_page(rows: Sequence[BenchRow], machine: Mapping[str, Any], table: Sequence[Sequence[str]]) -> str:
    """An HTML document. machine: as `describe_machine` has it. table: headings, then the cells of each row."""
    found, versions = machine["machine"], machine["versions"]
    gpu = f", {found['gpu']['name']}" if found["gpu"] else ""
    about = f"{found['cpu']}{gpu}; " + ", ".join(f"{name} {each}" for name, each in versions.items())
    charts = [_speeds(rows)]
    if any(row.bandwidth_percent is not None or row.matrix_percent is not None for row in rows):
        charts.append(_limits(rows))
    head, *body = (
        "".join(f"<t{kind}>{escape(cell)}</t{kind}>" for cell in cells)
        for kind, cells in zip(("h", *"d" * (len(table) - 1)), table, strict=True)
    )
    shown = f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"
    kept = json.dumps([row.as_dict() for row in rows]).replace("<", "\\u003c")
    data = f'<script type="application/json" id="rows">{kept}</script>'
    return page("Speed on this machine", f"{about}. Measured {machine['time']}.", charts, table=shown + data)


def _speeds(rows: Sequence[BenchRow]) -> Chart:
    """Bars of a column on one scale, so that models can be compared."""
    kinds = {name: holds for name, holds in _KINDS.items() if any(map(holds, rows))}
    most = {name: max(row.tok_s for row in rows if holds(row)) for name, holds in kinds.items()}

    def cell(group: Sequence[BenchRow], name: str) -> Cell | None:
        bars = [
            Bar(row.tok_s / most[name], f"{row.tok_s:,.0f}  {row.name}") for row in group if kinds[name](row)
        ]
        return Cell(bars) if bars else None

    return _of_models("Tokens a second", "", tuple(kinds), rows, cell)


def _limits(rows: Sequence[BenchRow]) -> Chart:
    """How near the tests come to what the memory and the matrix units give."""
    values: Mapping[str, Callable[[BenchRow], float | None]] = {
        "Of the memory's rate": lambda row: row.bandwidth_percent,
        "Of the matrix units' rate": lambda row: row.matrix_percent,
    }
    columns = {name: of for name, of in values.items() if any(of(row) is not None for row in rows)}

    def cell(group: Sequence[BenchRow], name: str) -> Cell | None:
        shares = [(row, columns[name](row)) for row in group]
        bars = [
            Bar(min(1.0, share / 100), f"{share:.0f}%  {row.name}", mark=1.0)
            for row, share in shares
            if share is not None
        ]
        return Cell(bars) if bars else None

    measured = "Copies run" if rows[0].device.startswith("cuda") else "Reads of memory run"
    about = f"{measured} at {rows[0].bandwidth / 1e9:,.0f} GB/s here; the line is 100%"
    return _of_models("Of what this machine gives", about, tuple(columns), rows, cell)


def _of_models(
    title: str,
    about: str,
    columns: Sequence[str],
    rows: Sequence[BenchRow],
    cell: Callable[[Sequence[BenchRow], str], Cell | None],
) -> Chart:
    """A row for each model and device, in the order of the rows."""
    groups = groupby(rows, key=lambda row: (row.model.name, f"{row.model.types}, {row.device}"))
    made = [(names, list(group)) for names, group in groups]
    lines = [
        Row(name if len(name) <= 20 else f"{name[:17]}...", kind, [cell(group, column) for column in columns])
        for (name, kind), group in made
    ]
    return Chart(title, about, columns, lines)
