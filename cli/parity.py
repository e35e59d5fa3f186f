"""`engine parity`: do two ways of running a model agree? Says so with numbers, and with the exit code.

The report goes to standard output, progress to standard error. Exit codes: 0 within the budget, 1 outside
it (or a wrong argument), 2 when a side cannot run on this machine.
"""

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quengine.cli import options
from quengine.cli.progress import ProgressLine
from quengine.errors import EngineError

if TYPE_CHECKING:
    from quengine.parity import LLMSide, ParityReport, SidePair, Workload
    from quengine.parity_metrics import Divergence

OUTSIDE_BUDGET = 1
_SHOWN_DIVERGENCES = 20


def parity(
    model: options.Model,
    a: Annotated[
        str | None,
        typer.Option(
            "--a", help="reference, cpu, cuda or cuda:N. (default: reference; cpu on a machine with a GPU)"
        ),
    ] = None,
    b: Annotated[
        str | None,
        typer.Option("--b", help="The side under test. (default: cpu; cuda on a machine with a GPU)"),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", help="A text to compare on instead of the built-in ones; repeatable."),
    ] = None,
    texts: Annotated[
        int | None,
        typer.Option("--texts", help="How many built-in texts; 15 adds all in one. (default: 14)", min=0),
    ] = None,
    prompts: Annotated[
        int, typer.Option("--prompts", help="Built-in prompts to continue greedily, at most 50.")
    ] = 10,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens generated after each prompt.")] = 48,
    window: Annotated[
        int, typer.Option("--window", help="Longer texts are cut into windows of this many tokens.")
    ] = 1024,
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the logits and the greedy text of two ways to run a model."""
    if file and texts is not None:
        raise EngineError("--texts counts built-in texts and --file replaces them; give one of the two")
    given = [_read_text(path) for path in file] if file else None
    from quengine.parity import (
        SidePair,
        built_in_texts,
        check_sides,
        compare_sides,
        default_sides,
        plan_workload,
    )

    defaults = default_sides()
    a, b = a or defaults[0], b or defaults[1]
    check_sides(a, b)
    progress = ProgressLine()
    workload = plan_workload(
        model,
        built_in_texts(14 if texts is None else texts) if given is None else given,
        prompts,
        tokens,
        window,
    )
    began = time.perf_counter()
    progress(f"loading {model}: {a} and {b}")
    try:
        with SidePair(model, a, b, workload.ctx_size, threads) as sides:
            report = compare_sides(sides.a, sides.b, workload, progress)
            progress.clear()
            _print(report, sides, workload, time.perf_counter() - began, as_json)
    finally:
        progress.clear()
    if not report.within:
        raise typer.Exit(OUTSIDE_BUDGET)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"cannot read the text from {path}: {error}") from error


def _print(
    report: "ParityReport", sides: "SidePair", workload: "Workload", seconds: float, as_json: bool
) -> None:
    if as_json:
        json.dump(_as_json(report, sides, workload, seconds), sys.stdout, ensure_ascii=False, allow_nan=False)
        print()
        return
    print(_header(report, sides, workload))
    print(_phase_table(report))
    print(_divergence_lines(report, sides.b))
    print(_verdict(report, seconds))


def _header(report: "ParityReport", sides: "SidePair", workload: "Workload") -> str:
    loaded = sides.b.llm.loaded
    cuts = f" in {len(workload.windows)} windows" if len(workload.windows) > workload.texts else ""
    lines = [
        f"model     {loaded.path.name}",
        f"a         {_side_text(sides.a)}",
        f"b         {_side_text(sides.b)}",
        f"compared  {workload.texts} texts{cuts}, {sum(map(len, workload.windows))} tokens, in each phase; "
        f"{report.prompts} prompts with {report.generated} generated tokens",
    ]
    return "\n".join(lines) + "\n"


def _side_text(side: "LLMSide") -> str:
    backend = side.decoder.backend
    kind = "the float64 definition" if side.name == "reference" else f"{backend.name} backend"
    return f"{side.name} ({kind}, {side.llm.loaded.threads} threads)"


def _phase_table(report: "ParityReport") -> str:
    errors = ("NMSE median", "NMSE p99", "NMSE max", "K/V p99", "KL mean", "KL p99")
    rows: list[tuple[str, ...]] = [("phase", "positions", *errors, "top-1", "top-5")]
    for name, m in report.phases.items():
        budget = report.budgets[name]
        numbers = (m.nmse_median, m.nmse_p99, m.nmse_max, m.cached_p99, m.kl_mean, m.kl_p99)
        rows.append((name, str(m.positions), *map(_number, numbers), _share(m.top1), _share(m.top5)))
        median, p99 = f"{budget.nmse_median:.0e}", f"{budget.nmse_p99:.0e}"
        rows.append(("  budget", "", median, p99, "", "" if math.isnan(m.cached_p99) else p99, *[""] * 4))
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


def _verdict(report: "ParityReport", seconds: float) -> str:
    if report.within:
        return f"within the budget ({seconds:.0f} s)"
    return "\n".join(
        [f"OUTSIDE the budget ({seconds:.0f} s):", *(f"  {failure}" for failure in report.failures)]
    )


def _as_json(
    report: "ParityReport", sides: "SidePair", workload: "Workload", seconds: float
) -> dict[str, Any]:
    from quengine import __version__

    return {
        "model": str(sides.b.llm.loaded.path),
        "a": report.a,
        "b": report.b,
        "within": report.within,
        "failures": report.failures,
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
