"""The report of `engine parity`, for people and as JSON."""

import json
import math
import sys
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from quengine import __version__
from quengine.cli.parity_page import parity_page
from quengine.diagnostics.parity.parity import ParityReport
from quengine.diagnostics.parity.parity_files import FileComparison
from quengine.diagnostics.parity.parity_images import ImageDifferences
from quengine.diagnostics.parity.parity_locate import Location
from quengine.diagnostics.parity.parity_operations import IN_LAYERS
from quengine.diagnostics.parity.parity_routing import RoutingMetrics
from quengine.diagnostics.parity.parity_sides import LLMSide, SidePair
from quengine.diagnostics.parity.parity_workload import Workload

_SHOWN_DIVERGENCES = 20
_SHOWN_TENSORS = 10


@dataclass(frozen=True)
class Findings:
    """All that was compared, and the verdict: it holds when nothing of it is outside its budget.

    files: the stored tensors of the two sides' files, where those are two. seconds: what all of it took.
    """

    report: ParityReport
    located: list[Location]
    files: FileComparison | None
    sides: SidePair
    workload: Workload
    seconds: float

    @property
    def failures(self) -> list[str]:
        """A phrase for each thing that fails the verdict."""
        stored = self.files.failures if self.files else []
        return [*stored, *self.report.failures, *(phrase for at in self.located for phrase in at.failures)]


def print_findings(found: Findings, as_json: bool, operations: bool) -> None:
    """Print the report; with `operations` the one for people, too, shows the comparison operation by operation."""
    if as_json:
        json.dump(_as_json(found), sys.stdout, ensure_ascii=False, allow_nan=False)
        print()
        return
    print(_text(found, operations))


def findings_page(found: Findings) -> str:
    """The report as an HTML document with charts."""
    verdict = _verdict(found).partition(":")[0]
    versions = f"quengine {__version__}, {_side_text(found.sides.a)} and {_side_text(found.sides.b)}"
    return parity_page(found.report, found.located, _text(found, True), f"{verdict}. {versions}.")


def _text(found: Findings, operations: bool) -> str:
    """The report for people."""
    report = found.report
    parts = [
        _header(found),
        *([_files_text(found.files)] if found.files else []),
        _phase_table(report),
        *([_image_lines(report.images)] if report.images else []),
        *([_rounding_lines(report)] if report.rounding else []),
        *([_routing_lines(report)] if report.routing else []),
        _divergence_lines(report, found.sides.b),
        *(_location_table(location) for location in (found.located if operations else ())),
        _verdict(found),
    ]
    return "\n".join(parts)


def _header(found: Findings) -> str:
    report, workload, sides = found.report, found.workload, found.sides
    paths = sides.a.llm.loaded.path, sides.b.llm.loaded.path
    cuts = f" in {len(workload.windows)} windows" if len(workload.windows) > workload.texts else ""
    lines = [
        *([f"model     {paths[1].name}"] if paths[0] == paths[1] else []),
        f"a         {_side_text(sides.a)}",
        f"b         {_side_text(sides.b)}",
        f"compared  {workload.texts} texts{cuts}, {sum(map(len, workload.windows))} tokens, in each phase; "
        f"{report.prompts} prompts with {report.generated} generated tokens",
    ]
    return "\n".join(lines) + "\n"


def _side_text(side: LLMSide) -> str:
    backend = side.decoder.backend
    kind = "the float64 definition" if side.device == "reference" else f"{backend.name} backend"
    return f"{side.name} ({kind}, {side.llm.loaded.threads} threads)"


def _files_text(files: FileComparison) -> str:
    """What is stored in two files: the tensors that differ, one a line, and the settings."""
    if not files.differing and not files.retyped and not files.settings:
        return f"the files' {files.tensors} tensors are the same byte for byte\n"
    lines = [f"the files' {files.tensors} tensors: {len(files.differing)} of the same type have other bytes"]
    lines += [f"  {tensor}" for tensor in files.differing[:_SHOWN_TENSORS]]
    if len(files.differing) > _SHOWN_TENSORS:
        lines.append(f"  and {len(files.differing) - _SHOWN_TENSORS} more; --json has all")
    if files.retyped:
        lines.append(f"  {files.retyped} stored as another type, or in one file only")
    return "\n".join([*lines, *(f"  {setting}" for setting in files.settings)]) + "\n"


def _phase_table(report: ParityReport) -> str:
    errors = ("NMSE median", "NMSE p99", "NMSE max", "K/V p99", "KL mean", "KL p99")
    rows: list[tuple[str, ...]] = [("phase", "positions", *errors, "top-1", "top-5")]
    for name, m in report.phases.items():
        budget = report.budgets[name]
        numbers = (m.nmse_median, m.nmse_p99, m.nmse_max, m.cached_p99, m.kl_mean, m.kl_p99)
        rows.append((name, str(m.positions), *map(_number, numbers), _share(m.top1), _share(m.top5)))
        median, p99, most = (
            f"{limit:.0e}" for limit in (budget.nmse_median, budget.nmse_p99, budget.nmse_max)
        )
        rows.append(("  budget", "", median, p99, most, "" if math.isnan(m.cached_p99) else p99, *[""] * 4))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _image_lines(images: ImageDifferences) -> str:
    """How far the encoders of images are apart."""
    budget = images.budget
    pixels = "prepared alike to the bit" if not images.unlike else f"{len(images.unlike)} prepared otherwise"
    return (
        f"images: {images.pictures} pictures, {pixels}; {images.rows} rows of features: NMSE median "
        f"{_number(images.nmse_median)}, p99 {_number(images.nmse_p99)}, max {_number(images.nmse_max)}; budget "
        f"{budget.median:.0e}, {budget.p99:.0e}, {budget.most:.0e}\n"
    )


def _rounding_lines(report: ParityReport) -> str:
    """What rounding does to side a, of the phases whose budgets follow from it."""
    heading = f"rounding: what one rounding of every operation's input does to {report.a}; the budget follows from it"
    lines = [
        f"  {name:8} NMSE median {m.nmse_median:.1e}, p99 {m.nmse_p99:.1e}, K/V p99 {_number(m.cached_p99)}"
        for name, m in report.rounding.items()
    ]
    return "\n".join([heading, *lines]) + "\n"


def _routing_lines(report: ParityReport) -> str:
    """Of a mixture of experts, the free choices of side b beside those of side a."""
    heading = "routing: positions x layers where b by itself would choose other experts than a"
    lines = [f"  {name:8} {_routing_text(metrics)}" for name, metrics in report.routing.items()]
    return "\n".join([heading, *lines]) + "\n"


def _routing_text(metrics: RoutingMetrics) -> str:
    share = (
        f"{metrics.differing} of {metrics.places} ({100 * metrics.differing / max(1, metrics.places):.2g}%)"
    )
    if not metrics.differing:
        return share
    return (
        f"{share}; widest margin {metrics.margin:.2g} logits (layer {metrics.layer}, position {metrics.position}), "
        f"{metrics.relative:.2g} of their standard deviation, clear over {metrics.bound:.2g}"
        f"{': TOO WIDE' if metrics.failures else ''}"
    )


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}"


def _share(value: float) -> str:
    # Rounded down: 100% must mean all.
    return "-" if math.isnan(value) else f"{math.floor(value * 1e4) / 1e2:.2f}%"


def _divergence_lines(report: ParityReport, side: LLMSide) -> str:
    if not report.prompts:
        return "free-running greedy: not run\n"
    lines = [
        f"free-running greedy: {report.identical_prompts} of {report.prompts} texts identical, "
        f"{len(report.divergences)} choices differ"
    ]
    # The wide ones are what the user must see.
    for d in sorted(report.divergences, key=lambda d: d.near_tie)[:_SHOWN_DIVERGENCES]:
        where = f"prompt {d.prompt + 1}, token {d.index}{'' if d.first else ' (after an earlier difference)'}"
        chosen = ", ".join(
            f"{name} {token} {_token_text(side, token)!r}"
            for name, token in ((report.a, d.token_a), (report.b, d.token_b))
        )
        lines.append(
            f"  {where}: {chosen}; top-2 margin {d.margin:.2g}, "
            f"largest logit difference {d.max_difference:.2g}: {'a near-tie' if d.near_tie else 'TOO WIDE'}"
        )
    if len(report.divergences) > _SHOWN_DIVERGENCES:
        lines.append(f"  and {len(report.divergences) - _SHOWN_DIVERGENCES} more; --json has all")
    return "\n".join(lines) + "\n"


def _token_text(side: LLMSide, token: int) -> str:
    return side.llm.tokenizer.decode([token], skip_special=False, continuation=True)


def _location_table(location: Location) -> str:
    """A row a layer, a column an operation; what is past its budget is marked."""
    tokens = location.end - location.start
    what = f"{tokens} tokens from position {location.start}" if tokens > 1 else f"position {location.start}"
    lines = [f"{location.phase}, operation by operation on the same inputs, {what}: largest NMSE"]
    outside = [found for found in location.operations if found.layer is None]
    lines += [f"  {found.operation:14}{_marked(found.nmse, found.within)}" for found in outside[:1]]
    layers = [found for found in location.operations if found.layer is not None]
    there = {found.operation for found in layers}
    columns = [name for name in IN_LAYERS if name in there]
    lines.append("  layer" + "".join(f"{name:>18}" for name in columns) + f"{'keys, values':>18}")
    for layer, row in groupby(layers, key=lambda found: found.layer):
        of = {found.operation: found for found in row}
        cells = ["" if n not in of else _marked(of[n].nmse, of[n].nmse <= of[n].budget) for n in columns]
        cells += [_marked(found.cached, found.within) for found in of.values() if found.cached is not None]
        lines.append(f"  {layer:5}" + "".join(f"{cell:>18}" for cell in cells))
    lines += [f"  {found.operation:14}{_marked(found.nmse, found.within)}" for found in outside[1:]]
    first_wrong = location.first
    if first_wrong is None:
        lines.append("  every operation is within its budget")
    else:
        lines.append(f"  first past its budget of {first_wrong.budget:.0e}: {first_wrong.place}")
    return "\n".join(lines) + "\n"


def _marked(value: float, within: bool) -> str:
    return f"{value:.1e}{' ' if within else '*'}"


def _verdict(found: Findings) -> str:
    failures = found.failures
    if not failures:
        return f"within the budget ({found.seconds:.0f} s)"
    if found.report.failures and not any(location.first for location in found.located):
        failures.append(
            "no single operation is past its budget: look at what is around them (cache, sampling, a captured step)"
        )
    return "\n".join(
        [f"OUTSIDE the budget ({found.seconds:.0f} s):", *(f"  {phrase}" for phrase in failures)]
    )


def _as_json(found: Findings) -> dict[str, Any]:
    report, workload, b = found.report, found.workload, found.sides.b
    return {
        "model": str(b.llm.loaded.path),
        "model_a": str(found.sides.a.llm.loaded.path),
        "a": report.a,
        "b": report.b,
        "within": not found.failures,
        "failures": found.failures,
        "files": found.files and asdict(found.files),
        "texts": workload.texts,
        "windows": len(workload.windows),
        "phases": {
            name: {**_finite(asdict(metrics)), "budget": asdict(report.budgets[name])}
            for name, metrics in report.phases.items()
        },
        "images": report.images and _finite(asdict(report.images)),
        "rounding": {name: _finite(asdict(metrics)) for name, metrics in report.rounding.items()},
        "routing": {
            name: {**_finite(asdict(metrics)), "within": not metrics.failures}
            for name, metrics in report.routing.items()
        },
        "prompts": report.prompts,
        "generated": report.generated,
        "identical_prompts": report.identical_prompts,
        "divergences": [
            {
                **_finite(asdict(d)),
                "text_a": _token_text(b, d.token_a),
                "text_b": _token_text(b, d.token_b),
                "near_tie": d.near_tie,
            }
            for d in report.divergences
        ],
        "threads": b.llm.loaded.threads,
        "seconds": found.seconds,
        "version": __version__,
        "located": [
            {
                "phase": location.phase,
                "start": location.start,
                "end": location.end,
                "first": location.first and location.first.place,
                "operations": [{**_finite(asdict(o)), "within": o.within} for o in location.operations],
            }
            for location in found.located
        ],
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
