"""`engine parity`: do two ways of running a model, or two files, agree? Says so with numbers and the exit code.

The report goes to standard output, progress to standard error. Exit codes: 0 within the budget, 1 outside
it (or a wrong argument), 2 when a side cannot run on this machine.
"""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quengine.cli.flags import takes_options
from quengine.cli.progress import ProgressLine
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.options import Flag, Only, Range, check_ranges
from quengine.platform import collector
from quengine.platform.input_files import read_text

if TYPE_CHECKING:
    from quengine.diagnostics.parity.parity import ParityReport
    from quengine.diagnostics.parity.parity_files import FileComparison
    from quengine.diagnostics.parity.parity_locate import Location
    from quengine.diagnostics.parity.parity_metrics import Divergence
    from quengine.diagnostics.parity.parity_sides import LLMSide, SidePair
    from quengine.diagnostics.parity.parity_workload import Workload

OUTSIDE_BUDGET = 1
_SHOWN_DIVERGENCES = 20
_SHOWN_TENSORS = 10
_WORTH_SAYING = 10.0
"""Seconds from which on a run is announced with how long it takes."""


@dataclass(frozen=True)
class ParityFlags:
    """What is compared, on which texts and prompts, and how it is reported."""

    a: Annotated[
        str | None,
        Flag(
            "--a",
            "What the other is measured against: reference, cpu, cuda or cuda:N for --model there, FILE for another "
            "model, FILE@DEVICE for one there. (default: reference; cpu on a machine with a GPU)",
            metavar="SIDE",
        ),
    ] = None
    b: Annotated[
        str | None,
        Flag(
            "--b",
            "The side under test, written alike. (default: cpu; cuda on a machine with a GPU)",
            metavar="SIDE",
        ),
    ] = None
    files: Annotated[
        tuple[Path, ...],
        Flag("-f --file", "A text to compare on instead of the built-in ones; repeatable."),
    ] = ()
    texts: Annotated[
        int | None,
        Range(0),
        Flag("--texts", "How many built-in texts; 15 adds all in one. (default: 14)"),
    ] = None
    prompts: Annotated[
        int | None, Flag("--prompts", "Built-in prompts to continue greedily, at most 50. (default: 50)")
    ] = None
    tokens: Annotated[int | None, Flag("--tokens", "Tokens generated after each prompt. (default: 128)")] = (
        None
    )
    quick: Annotated[
        bool, Flag("--quick", "6 texts and 5 prompts of 32 tokens, where nothing else is said.")
    ] = False
    locate: Annotated[
        bool,
        Flag("--locate", "Show the comparison operation by operation even where all is within its budget."),
    ] = False
    window: Annotated[int, Flag("--window", "Longer texts are cut into windows of this many tokens.")] = 1024
    as_json: Annotated[bool, Flag("--json", "Print one JSON object.")] = False

    def __post_init__(self) -> None:
        if self.files and self.texts is not None:
            raise EngineError("--texts counts built-in texts and --file replaces them; give one of the two")
        check_ranges(self, "--{name} {value}")


@takes_options
def parity(
    flags: ParityFlags,
    config: Annotated[EngineConfig, Only("threads", "cache_type")],
    model: Annotated[
        str | None, Flag("-m --model", "The model of the sides that name no file.", show_default=False)
    ] = None,
) -> None:
    """Compare the logits and the greedy text of two ways to run a model, or of two files (--a FILE --b FILE)."""
    if model is None and flags.a is None and flags.b is None:
        raise EngineError("nothing to compare: give --model MODEL, or two files with --a FILE --b FILE")
    texts = [read_text(path, "cannot read the text from") for path in flags.files]
    from quengine.diagnostics.parity.parity_files import compare_files
    from quengine.diagnostics.parity.parity_sides import SidePair, parse_sides

    collector.working()
    side_a, side_b = parse_sides(flags.a, flags.b, model)
    other = None if side_a.model == side_b.model else side_a.model
    files = None if other is None else compare_files(side_a.model, side_b.model)
    workload = _workload(flags, texts, side_b.model, other)
    began, progress = time.perf_counter(), ProgressLine()
    progress(f"loading {side_a.name} and {side_b.name}")
    try:
        with SidePair(side_a, side_b, replace(config, ctx_size=workload.ctx_size)) as sides:
            found = _compared(sides, workload, config, files, flags.quick, progress)
            # Over a q8_0 cache only the comparison operation by operation is as strict as over f16.
            operations = flags.locate or config.cache_type != "f16" or bool(found.failures)
            _print(found, sides, workload, time.perf_counter() - began, flags.as_json, operations)
    finally:
        progress.clear()
    if found.failures:
        raise typer.Exit(OUTSIDE_BUDGET)


def _workload(
    flags: ParityFlags, texts: list[str], model: str | Path, other: str | Path | None
) -> "Workload":
    from quengine.diagnostics.parity.parity_workload import FULL, QUICK, built_in_texts, plan_workload

    extent = QUICK if flags.quick else FULL
    if not texts:
        texts = built_in_texts(extent.texts if flags.texts is None else flags.texts)
    prompts = extent.prompts if flags.prompts is None else flags.prompts
    tokens = extent.tokens if flags.tokens is None else flags.tokens
    return plan_workload(model, texts, prompts, tokens, flags.window, other)


def _compared(
    sides: "SidePair",
    workload: "Workload",
    config: EngineConfig,
    files: "FileComparison | None",
    quick: bool,
    progress: ProgressLine,
) -> "Findings":
    """Compare both sides, after saying how long it takes."""
    from quengine.diagnostics.parity.parity import compare_sides
    from quengine.diagnostics.parity.parity_locate import locate
    from quengine.diagnostics.parity.parity_workload import estimate_seconds

    progress("trying both sides to see how long this takes")
    seconds = estimate_seconds(sides.a, sides.b, workload)
    progress.clear()
    if seconds > _WORTH_SAYING:
        print(_duration(seconds, workload, quick), file=sys.stderr)
    report = compare_sides(sides.a, sides.b, workload, progress, config.cache_type)
    located = locate(sides.a, sides.b, report, progress)
    progress.clear()
    return Findings(report, located, files)


@dataclass(frozen=True)
class Findings:
    """All that was compared, and the verdict: it holds when nothing of it is outside its budget.

    files: the stored tensors of the two sides' files, where those are two.
    """

    report: "ParityReport"
    located: "list[Location]"
    files: "FileComparison | None"

    @property
    def failures(self) -> list[str]:
        """A phrase for each thing that fails the verdict."""
        stored = self.files.failures if self.files else []
        return [*stored, *self.report.failures, *(phrase for at in self.located for phrase in at.failures)]


def _duration(seconds: float, workload: "Workload", quick: bool) -> str:
    shorter = "" if quick else "; --quick is shorter"
    much = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return (
        f"this takes about {much}: {sum(map(len, workload.windows))} tokens of text, "
        f"{len(workload.prompts)} prompts x {workload.tokens} tokens{shorter}"
    )


def _print(
    found: Findings, sides: "SidePair", workload: "Workload", seconds: float, as_json: bool, operations: bool
) -> None:
    """`operations`: whether the report for people shows the comparison operation by operation; JSON always has it."""
    if as_json:
        json.dump(_as_json(found, sides, workload, seconds), sys.stdout, ensure_ascii=False, allow_nan=False)
        print()
        return
    print(_header(found.report, sides, workload))
    if found.files:
        print(_files_text(found.files))
    print(_phase_table(found.report))
    print(_divergence_lines(found.report, sides.b))
    for location in found.located if operations else ():
        print(_location_table(location))
    print(_verdict(found, seconds))


def _header(report: "ParityReport", sides: "SidePair", workload: "Workload") -> str:
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


def _files_text(files: "FileComparison") -> str:
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


def _side_text(side: "LLMSide") -> str:
    backend = side.decoder.backend
    kind = "the float64 definition" if side.device == "reference" else f"{backend.name} backend"
    return f"{side.name} ({kind}, {side.llm.loaded.threads} threads)"


def _phase_table(report: "ParityReport") -> str:
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


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}"


def _share(value: float) -> str:
    # Rounded down: 100% must mean all.
    return "-" if math.isnan(value) else f"{math.floor(value * 1e4) / 1e2:.2f}%"


def _divergence_lines(report: "ParityReport", side: "LLMSide") -> str:
    if not report.prompts:
        return "free-running greedy: not run\n"
    lines = [
        f"free-running greedy: {report.identical_prompts} of {report.prompts} texts identical, "
        f"{len(report.divergences)} choices differ"
    ]
    # The wide ones are what the user must see.
    for d in sorted(report.divergences, key=lambda d: d.near_tie)[:_SHOWN_DIVERGENCES]:
        where = f"prompt {d.prompt + 1}, token {d.index}{'' if d.first else ' (after an earlier difference)'}"
        lines.append(
            f"  {where}: {report.a} {_token_text(side, d.token_a)}, "
            f"{report.b} {_token_text(side, d.token_b)}; top-2 margin {d.margin:.2g}, "
            f"largest logit difference {d.max_difference:.2g}: {'a near-tie' if d.near_tie else 'TOO WIDE'}"
        )
    if len(report.divergences) > _SHOWN_DIVERGENCES:
        lines.append(f"  and {len(report.divergences) - _SHOWN_DIVERGENCES} more; --json has all")
    return "\n".join(lines) + "\n"


def _token_text(side: "LLMSide", token: int) -> str:
    return f"{token} {side.llm.tokenizer.decode([token], skip_special=False, continuation=True)!r}"


def _location_table(location: "Location") -> str:
    """A row a layer, a column an operation; what is past its budget is marked."""
    from quengine.diagnostics.parity.parity_operations import LAYER_OPERATIONS

    tokens = location.end - location.start
    what = f"{tokens} tokens from position {location.start}" if tokens > 1 else f"position {location.start}"
    lines = [f"{location.phase}, operation by operation on the same inputs, {what}: largest NMSE"]
    outside = [found for found in location.operations if found.layer is None]
    lines += [f"  {found.operation:14}{_marked(found.nmse, found.within)}" for found in outside[:1]]
    lines.append("  layer" + "".join(f"{name:>18}" for name in LAYER_OPERATIONS) + f"{'keys, values':>18}")
    layers = [found for found in location.operations if found.layer is not None]
    for first in range(0, len(layers), len(LAYER_OPERATIONS)):
        row = layers[first : first + len(LAYER_OPERATIONS)]
        cells = [f"{_marked(found.nmse, found.nmse <= found.budget):>18}" for found in row]
        cells += [f"{_marked(f.cached, f.within):>18}" for f in row if f.cached is not None]
        lines.append(f"  {row[0].layer:5}" + "".join(cells))
    lines += [f"  {found.operation:14}{_marked(found.nmse, found.within)}" for found in outside[1:]]
    first_wrong = location.first
    if first_wrong is None:
        lines.append("  every operation is within its budget")
    else:
        lines.append(f"  first past its budget of {first_wrong.budget:.0e}: {first_wrong.place}")
    return "\n".join(lines) + "\n"


def _marked(value: float, within: bool) -> str:
    return f"{value:.1e}{' ' if within else '*'}"


def _verdict(found: Findings, seconds: float) -> str:
    failures = found.failures
    if not failures:
        return f"within the budget ({seconds:.0f} s)"
    if found.report.failures and not any(location.first for location in found.located):
        failures.append(
            "no single operation is past its budget: look at what is around them (cache, sampling, a captured step)"
        )
    return "\n".join([f"OUTSIDE the budget ({seconds:.0f} s):", *(f"  {failure}" for failure in failures)])


def _location_json(location: "Location") -> dict[str, Any]:
    return {
        "phase": location.phase,
        "start": location.start,
        "end": location.end,
        "first": location.first and location.first.place,
        "operations": [{**_finite(asdict(o)), "within": o.within} for o in location.operations],
    }


def _as_json(found: Findings, sides: "SidePair", workload: "Workload", seconds: float) -> dict[str, Any]:
    from quengine import __version__

    report = found.report
    return {
        "model": str(sides.b.llm.loaded.path),
        "model_a": str(sides.a.llm.loaded.path),
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
        "prompts": report.prompts,
        "generated": report.generated,
        "identical_prompts": report.identical_prompts,
        "divergences": [_divergence_json(d, sides.b) for d in report.divergences],
        "threads": sides.b.llm.loaded.threads,
        "seconds": seconds,
        "version": __version__,
        "located": list(map(_location_json, found.located)),
    }


def _divergence_json(divergence: "Divergence", side: "LLMSide") -> dict[str, Any]:
    text_a, text_b = (
        side.llm.tokenizer.decode([token], skip_special=False, continuation=True)
        for token in (divergence.token_a, divergence.token_b)
    )
    return {
        **_finite(asdict(divergence)),
        "text_a": text_a,
        "text_b": text_b,
        "near_tie": divergence.near_tie,
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
