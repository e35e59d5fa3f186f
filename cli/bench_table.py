"""The rows of `engine bench` on standard output: a Markdown table as it grows, JSON, CSV, or a page with charts."""

import csv
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from quengine.cli.bench_page import bench_page
from quengine.diagnostics import machine
from quengine.diagnostics.bench.bench_row import BenchRow
from quengine.diagnostics.bench.profile import format_profile
from quengine.memory import gib
from quengine.models.parameter_counts import count_text


def write_table(rows: Iterator[BenchRow], output: str) -> None:
    """Write rows as "md", "json" (one list at the end), "jsonl", "csv", or "html" (at the end)."""
    _WRITERS[output](rows)


_Column = tuple[str, int, Callable[[BenchRow], str]]

_COLUMNS: tuple[_Column, ...] = (
    ("model", 28, lambda row: row.model.name),
    ("size", 10, lambda row: gib(row.model.nbytes)),
    ("params", 9, lambda row: count_text(row.model.params)),
    ("type", 13, lambda row: row.model.types),
    ("device", 9, lambda row: _device(row)),
    ("threads", 7, lambda row: str(row.threads)),
    ("test", 20, lambda row: row.name),
    ("t/s", 19, lambda row: f"{row.tok_s:.2f} ± {row.deviation:.2f}"),
    ("GB/s", 7, lambda row: _number(row.gb_s, 1)),
    ("% of bandwidth", 14, lambda row: _number(row.bandwidth_percent, 0)),
    ("peak memory", 11, lambda row: gib(row.peak_bytes)),
)
"""Heading, least width and text of the table's columns; the numbers stand to the right."""

_CUDA_COLUMNS: tuple[_Column, ...] = (
    ("over weights + cache", 20, lambda row: gib(row.peak_over_bytes)),
    ("% of matrix rate", 16, lambda row: _number(row.matrix_percent, 0)),
    ("kernels/step", 12, lambda row: _number(row.kernels_per_step, 0)),
)
"""What only a CUDA device has."""

_EXPERT_COLUMNS: tuple[_Column, ...] = (
    ("active params", 13, lambda row: count_text(row.model.active_params or row.model.params)),
)
"""What only a mixture of experts has: parameters that compute a token."""

_DRAFT_COLUMNS: tuple[_Column, ...] = (
    ("drafted", 7, lambda row: "-" if row.drafts is None else str(row.drafts.drafted)),
    ("accepted", 8, lambda row: "-" if row.drafts is None else str(row.drafts.accepted)),
    ("accept length", 13, lambda row: _number(None if row.drafts is None else row.drafts.accept_length, 2)),
)
"""What became of drafts, of all repetitions, where there are any."""

_LEFT = {"model", "type", "device", "test"}


def _device(row: BenchRow) -> str:
    """The device, and what of the way it computes is not as usual."""
    named = row.device if row.backend in row.device else f"{row.device} {row.backend}"
    if row.ranks > 1:
        named = f"{named} x {row.ranks}" + (" by layer" if row.split == "layer" else "")
    return f"{named} deterministic" if row.deterministic else named


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _write_md(rows: Iterator[BenchRow]) -> None:
    """The table as it grows; what the percentages are of, where experts are, and profiles, below it."""
    shown: list[BenchRow] = []
    kind: tuple[_Column, ...] = ()
    headed: tuple[_Column, ...] = ()
    left_out: list[str] = []
    for row in rows:
        columns = _columns_of(row)
        if columns != kind:  # a model of another kind begins a table of its own
            print("\n" if headed else "", end="")
            kind, headed = columns, _fitting(columns, row, _terminal_width())
            left_out = [name for name, _, _ in columns if name not in {each for each, _, _ in headed}]
            columns = headed
            print(_line(columns, [heading for heading, _, _ in columns]))
            rules = ["-" * (w + 2) if h in _LEFT else "-" * (w + 1) + ":" for h, w, _ in columns]
            print(f"|{'|'.join(rules)}|")
        print(_line(headed, [text(row) for _, _, text in headed]), flush=True)
        shown.append(row)
    if left_out:
        print(
            f"\n{_wrapped('Not shown on so narrow a terminal: ' + ', '.join(left_out) + '; -o json has all.')}"
        )
    if shown and shown[0].device.startswith("cuda"):
        print(f"\n{_wrapped(_yardsticks(shown[0]))}")
    for line in dict.fromkeys(f"{row.model.name}: {row.placement}." for row in shown if row.placement):
        print(f"\n{_wrapped(line)}")
    for row in shown:
        _print_profiles(row)


def _columns_of(row: BenchRow) -> tuple[_Column, ...]:
    """Those that such a row has values for."""
    columns = _COLUMNS + (_CUDA_COLUMNS if row.device.startswith("cuda") else ())
    columns += _EXPERT_COLUMNS if row.model.experts is not None else ()
    return columns + (_DRAFT_COLUMNS if row.drafts is not None else ())


def _fitting(columns: tuple[_Column, ...], row: BenchRow, width: int | None) -> tuple[_Column, ...]:
    """The columns that a terminal of `width` has room for, or of None, no terminal: all of them.

    Those that matter least go; the rest are as narrow as headings and this row are.
    """
    if width is None:
        return columns
    tight = [(name, max(len(name), len(text(row)), _GROWS.get(name, 0)), text) for name, _, text in columns]
    for name in _DISPENSABLE:
        if sum(wide + 3 for _, wide, _ in tight) < width:
            break
        tight = [column for column in tight if column[0] != name]
    room = tight[0][1] - max(0, sum(wide + 3 for _, wide, _ in tight) + 1 - width)
    if room < tight[0][1]:  # the model's name alone is too long
        room = max(room, 8)
        tight[0] = ("model", room, lambda row: row.model.name[: room - 3] + "...")
    return tuple(tight)


_DISPENSABLE = (
    *("over weights + cache", "params", "threads", "kernels/step", "% of matrix rate", "size", "type"),
    *("drafted", "accepted", "GB/s", "peak memory", "active params", "device", "% of bandwidth"),
)
"""What a narrow terminal does without, first the least; `-o json` has all. Model, test and t/s always stay."""

_GROWS = {"t/s": 16, "test": 16, "GB/s": 7}
"""Widths of what is longer in later rows than in the first."""


def _wrapped(text: str) -> str:
    width = _terminal_width()
    return text if width is None else textwrap.fill(text, width, break_on_hyphens=False)


def _terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _line(columns: tuple[_Column, ...], cells: list[str]) -> str:
    padded = (
        cell.ljust(width) if heading in _LEFT else cell.rjust(width)
        for cell, (heading, width, _) in zip(cells, columns, strict=True)
    )
    return f"| {' | '.join(padded)} |"


def _yardsticks(row: BenchRow) -> str:
    """What the percentages are of."""
    parts = [f"copies at {row.bandwidth / 1e9:.0f} GB/s, read and written"]
    if row.matrix_rate is not None:
        size = " x ".join([str(machine.MATRIX_SIZE)] * 3)
        parts.append(f"fp16 matrix products (cuBLAS, {size}) at {row.matrix_rate / 1e12:.0f} TFLOP/s")
    name = machine.describe_machine(row.device)["machine"]["gpu"]["name"]
    return f"Measured on this {name}: {'; '.join(parts)}."


def _print_profiles(row: BenchRow) -> None:
    for profile in row.profile:
        of = f", mean of {profile.steps}" if profile.steps > 1 else ""
        print(f"\n{row.model.name}, {row.test.name}: device time of a {profile.what}{of}\n")
        print("\n".join(format_profile(profile)))


def _described(row: BenchRow) -> dict[str, Any]:
    return row.as_dict(machine.describe_machine(row.device))


def _write_json(rows: Iterator[BenchRow]) -> None:
    print(json.dumps([_described(row) for row in rows], indent=2))


def _write_jsonl(rows: Iterator[BenchRow]) -> None:
    for row in rows:
        print(json.dumps(_described(row)), flush=True)


def _write_csv(rows: Iterator[BenchRow]) -> None:
    writer = None
    for row in rows:
        # A cell that is a list or an object holds it as JSON.
        cells = {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in _described(row).items()}
        if writer is None:
            writer = csv.DictWriter(sys.stdout, cells.keys(), lineterminator="\n")
            writer.writeheader()
        writer.writerow(cells)
        sys.stdout.flush()


def _write_html(rows: Iterator[BenchRow]) -> None:
    found = list(rows)
    headings = tuple(dict.fromkeys(column for row in found for column in _columns_of(row)))
    cells = [[column[2](row) if column in _columns_of(row) else "-" for column in headings] for row in found]
    described = machine.describe_machine(found[0].device)
    sys.stdout.write(bench_page(found, described, [[name for name, _, _ in headings], *cells]))


_WRITERS: dict[str, Callable[[Iterator[BenchRow]], None]] = {
    "md": _write_md,
    "json": _write_json,
    "jsonl": _write_jsonl,
    "csv": _write_csv,
    "html": _write_html,
}
