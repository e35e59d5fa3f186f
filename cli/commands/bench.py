"""`engine bench`: tokens per second of models on this machine, with the flags that llama-bench's users know.

The table, and nothing else, goes to standard output; each row as soon as it is measured (`-o json`: at the end).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quengine.cli import interrupts
from quengine.cli.flags import split_names, takes_options
from quengine.cli.progress import ProgressLine
from quengine.diagnostics.bench.bench_plan import LISTS, TESTS, BenchPlan, expand_tests, whole_numbers
from quengine.errors import EngineError
from quengine.options import MODEL_HELP, OUTPUT, Flag
from quengine.platform import collector

if TYPE_CHECKING:
    from quengine.diagnostics.bench.bench_row import BenchRow

OUTPUTS = ("md", "json", "jsonl", "csv", "html")


def _pairs(texts: list[str]) -> tuple[tuple[int, int], ...]:
    pairs = []
    for text in texts:
        numbers = whole_numbers("-pg", [text])
        if len(numbers) != 2:
            raise EngineError(f"-pg {text}: must be two numbers, such as 512,128; repeat the flag for more")
        pairs.append((numbers[0], numbers[1]))
    return tuple(pairs)


@dataclass(frozen=True)
class BenchFlags:
    """The models and the tests of a `BenchPlan` as they are typed, and the form of the output."""

    models: Annotated[
        tuple[str, ...],
        Flag("-m --model", f"{MODEL_HELP[:-1]}; repeatable.", read=split_names, completes="model"),
    ] = ()
    synthetic: Annotated[
        tuple[str, ...],
        Flag(
            "--synthetic",
            "Make such a model: mistral-7b, qwen3-8b, llama-3.2-1b, llama-10m, llama-3-70b, gemma3-4b, olmo2-7b, "
            "phi3-mini, mixtral-8x7b, qwen3-30b-a3b, gpt-oss-20b, tiny; followed by -20l its first 20 layers.",
            read=split_names,
        ),
    ] = ()
    synthetic_dir: Annotated[
        Path | None,
        Flag(
            "--synthetic-dir",
            "Where these are kept. (default: the user's cache, where the oldest make room)",
            metavar="DIR",
        ),
    ] = None
    prompts: Annotated[
        tuple[int, ...],
        Flag(
            "-p --n-prompt",
            f"Prompt tokens. {LISTS} (default: 512)",
            TESTS,
            read=partial(whole_numbers, "-p"),
        ),
    ] = (512,)
    generated: Annotated[
        tuple[int, ...],
        Flag("-n --n-gen", "Generated tokens. (default: 128)", TESTS, read=partial(whole_numbers, "-n")),
    ] = (128,)
    pairs: Annotated[
        tuple[tuple[int, int], ...],
        Flag("-pg", "Both in one test; repeatable.", TESTS, "PP,TG", read=_pairs),
    ] = ()
    depths: Annotated[
        tuple[int, ...],
        Flag(
            "-d --n-depth",
            "Tokens already in the cache. (default: 0)",
            TESTS,
            read=partial(whole_numbers, "-d"),
        ),
    ] = (0,)
    output: Annotated[
        str,
        Flag("-o --output", "md, json, jsonl, csv or html.", OUTPUT, completes="md json jsonl csv html"),
    ] = "md"


@takes_options
def bench(flags: BenchFlags, plan: BenchPlan) -> None:
    """Time prompt processing and token generation."""
    if flags.output not in OUTPUTS:
        raise EngineError(f"-o {flags.output}: must be one of {', '.join(OUTPUTS)}")
    if not flags.models and not flags.synthetic:
        raise EngineError("no model: give -m MODEL or --synthetic mistral-7b")
    tests = expand_tests(flags.prompts, flags.generated, flags.pairs, flags.depths)
    plan = replace(plan, tests=tests)  # checks them before a model is written
    from quengine.cli.bench_table import write_table

    with interrupts.at_once():
        from quengine.diagnostics.bench.bench import run_bench
        from quengine.diagnostics.bench.synthetic_files import synthetic_models

    collector.working()
    progress = ProgressLine()
    with synthetic_models(flags.synthetic, plan, flags.synthetic_dir, _announce, progress) as made:
        plan = replace(plan, models=[*flags.models, *made])
        try:
            write_table(_cleared(run_bench(plan, progress), progress), flags.output)
        finally:
            progress.clear()


def _announce(text: str) -> None:
    print(f"engine: {text}", file=sys.stderr)


def _cleared(rows: "Iterator[BenchRow]", progress: ProgressLine) -> "Iterator[BenchRow]":
    """The rows, with the progress line out of the way when one is printed."""
    for row in rows:
        progress.clear()
        yield row
