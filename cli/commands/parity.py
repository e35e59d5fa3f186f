"""`engine parity`: do two ways of running a model, or two files, agree? Says so with numbers and the exit code.

The report goes to standard output, progress to standard error. Exit codes: 0 within the budget, 1 outside
it (or a wrong argument), 2 when a side cannot run on this machine.
"""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quengine.cli import interrupts
from quengine.cli.flags import takes_options
from quengine.cli.progress import ProgressLine
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.models.gguf.whole_file import check_disk
from quengine.options import OUTPUT, Flag, Only, Range
from quengine.platform import collector
from quengine.platform.input_files import read_text

if TYPE_CHECKING:
    from quengine.diagnostics.parity.parity_sides import SidePair
    from quengine.diagnostics.parity.parity_workload import Workload

OUTSIDE_BUDGET = 1
_ANNOUNCED_SECONDS = 10.0


SIDES, TEXTS = "The two sides", "Texts and prompts"


@dataclass(frozen=True)
class ParityFlags:
    """What is compared, on which texts and prompts, and how it is reported."""

    a: Annotated[
        str | None,
        Flag(
            "--a",
            "What the other is measured against: reference, cpu, cuda or cuda:N for --model there (cpu:tp2: "
            "shared by 2 ranks, cpu:layer2: sharing the layers), FILE for another model, FILE@DEVICE for one there. "
            "(default: reference; cpu on a machine with a GPU)",
            SIDES,
            "SIDE",
        ),
    ] = None
    b: Annotated[
        str | None,
        Flag(
            "--b",
            "The side under test, written alike. (default: cpu; cuda on a machine with a GPU)",
            SIDES,
            "SIDE",
        ),
    ] = None
    files: Annotated[
        tuple[Path, ...],
        Flag("-f --file", "A text to compare on instead of the built-in ones; repeatable.", TEXTS),
    ] = ()
    texts: Annotated[
        int | None,
        Range(0),
        Flag("--texts", "How many built-in texts; 15 adds all in one. (default: 14)", TEXTS),
    ] = None
    prompts: Annotated[
        int | None,
        Flag("--prompts", "Built-in prompts to continue greedily, at most 50. (default: 50)", TEXTS),
    ] = None
    tokens: Annotated[
        int | None, Flag("--tokens", "Tokens generated after each prompt. (default: 128)", TEXTS)
    ] = None
    quick: Annotated[
        bool, Flag("--quick", "6 texts and 5 prompts of 32 tokens, where no other flag gives them.", TEXTS)
    ] = False
    locate: Annotated[
        bool,
        Flag(
            "--locate",
            "Show the comparison operation by operation even where all is within its budget.",
            OUTPUT,
        ),
    ] = False
    window: Annotated[
        int, Flag("--window", "Longer texts are cut into windows of this many tokens.", TEXTS)
    ] = 1024
    as_json: Annotated[bool, Flag("--json", "Print one JSON object.", OUTPUT)] = False
    html: Annotated[Path | None, Flag("--html", "Also write a page with charts.", OUTPUT, metavar="FILE")] = (
        None
    )

    def __post_init__(self) -> None:
        if self.files and self.texts is not None:
            raise EngineError("--texts counts built-in texts and --file replaces them; give one of the two")


@takes_options
def parity(
    flags: ParityFlags,
    config: Annotated[EngineConfig, Only("threads", "cache_type", "mmproj", "no_mmproj")],
    model: Annotated[
        str | None,
        Flag(
            "-m --model",
            "The model of the sides that name no file.",
            SIDES,
            show_default=False,
            completes="model",
        ),
    ] = None,
) -> None:
    """Compare the logits and the greedy text of two ways to run a model, or of two files (--a FILE --b FILE)."""
    if model is None and flags.a is None and flags.b is None:
        raise EngineError("nothing to compare: give --model MODEL, or two files with --a FILE --b FILE")
    if flags.html is not None:
        check_disk(flags.html, 0)
    texts = [read_text(path, "cannot read the text from") for path in flags.files]
    for path, text in zip(flags.files, texts, strict=True):
        if not text:
            raise EngineError(f"--file {path}: there is no text in it")
    from quengine.cli.charts import write_page
    from quengine.cli.parity_report import Findings, findings_page, print_findings

    with interrupts.at_once():
        from quengine.diagnostics.parity.parity import compare_sides
        from quengine.diagnostics.parity.parity_files import compare_files
        from quengine.diagnostics.parity.parity_images import image_tokens
        from quengine.diagnostics.parity.parity_locate import locate
        from quengine.diagnostics.parity.parity_sides import loaded_sides, parse_sides

    collector.working()
    side_a, side_b = parse_sides(flags.a, flags.b, model)
    other = None if side_a.model == side_b.model else side_a.model
    files = None if other is None else compare_files(side_a.model, side_b.model)
    workload = _workload(flags, texts, side_b.model, other)
    tokens = [image_tokens(side.model, config) for side in (side_a, side_b)]
    config = replace(config, ctx_size=max(workload.ctx_size, *tokens))
    began, progress = time.perf_counter(), ProgressLine()
    progress(f"loading {side_a.name} and {side_b.name}")
    try:
        with loaded_sides(side_a, side_b, config) as sides:
            unsaid = None in (flags.files or flags.texts, flags.prompts, flags.tokens)
            _announce_duration(sides, workload, unsaid and not flags.quick, progress)
            report = compare_sides(sides.a, sides.b, workload, progress, config.cache_type)
            located = locate(sides.a, sides.b, report, progress)
            progress.clear()
            found = Findings(report, located, files, sides, workload, time.perf_counter() - began)
            # Over a q8_0 cache only the comparison operation by operation is as strict as over f16.
            operations = flags.locate or config.cache_type != "f16" or bool(found.failures)
            print_findings(found, flags.as_json, operations)
            if flags.html is not None:
                write_page(flags.html, findings_page(found))
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


def _announce_duration(
    sides: "SidePair", workload: "Workload", shorter: bool, progress: ProgressLine
) -> None:
    """Say how long the comparison takes, unless it is short, and whether --quick would be `shorter`."""
    from quengine.diagnostics.parity.parity_workload import estimate_seconds

    progress("trying both sides to see how long this takes")
    seconds = estimate_seconds(sides.a, sides.b, workload)
    progress.clear()
    if seconds > _ANNOUNCED_SECONDS:
        much = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        tokens = sum(map(len, workload.windows))
        print(
            f"this takes about {much}: {tokens} tokens of text, {len(workload.prompts)} prompts x "
            f"{workload.tokens} tokens{'; --quick is shorter' if shorter else ''}",
            file=sys.stderr,
        )
