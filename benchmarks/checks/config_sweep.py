"""Makes every single change of config.json in tiny models of every type, and compares with `transformers`.

    python -m benchmarks.checks.config_sweep [--jobs 16] [--seeds llama gemma3 ...] [--every 1]

Run from the repository root. Prints a line for each seed: changes, those that compute the same, those refused here or
there, and those that are silently other or failed, which follow one by one. One JSON line ends the report; exits with 1
if there was any of the last two. Some 35 ms a change.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.config_changes import SEEDS, Change, Outcome, changes, compare, known_keys, write_seed

COLUMNS: tuple[Outcome, ...] = ("equal", "refused here", "refused there", "other", "failed")
Finding = tuple[str, Outcome, str]
"""A change, what became of it, and what was said of it."""

MEMORY = 8 << 30
"""Bytes that a process may map: by some sizes `transformers` takes all that a machine has."""


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))


def _run(folder: Path, chosen: list[Change]) -> list[Finding]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        return [(str(change), *compare(folder, change, Path(scratch))) for change in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", nargs="*", default=[], help="those whose names begin so; all if none")
    parser.add_argument("--every", type=int, default=1, help="only every so many changes")
    parser.add_argument("--output", type=Path, help="where every finding is written, a JSON line each")
    options = parser.parse_args()
    names = [name for name in SEEDS if not options.seeds or name.startswith(tuple(options.seeds))]
    began = time.monotonic()
    torch.set_num_threads(1)
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    known = known_keys()
    total: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory() as root,
        ProcessPoolExecutor(options.jobs, get_context("fork"), _limit_memory) as pool,
        (options.output or Path(os.devnull)).open("w") as output,
    ):
        folders = dict(zip(names, pool.map(write_seed, [Path(root)] * len(names), names), strict=True))
        started = {}
        for name, folder in folders.items():
            config = json.loads((folder / "config.json").read_text())
            chosen = list(changes(name, config, known))[:: options.every]
            parts = [chosen[at : at + 50] for at in range(0, len(chosen), 50)]
            started[name] = [pool.submit(_run, folder, part) for part in parts]
        print(f"{'':24}{'changes':>9}" + "".join(f"{column:>15}" for column in COLUMNS))
        for name, parts in started.items():
            found = [finding for part in parts for finding in part.result()]
            counts = Counter(outcome for _, outcome, _ in found)
            total += counts
            line = f"{name:24}{len(found):9}" + "".join(f"{counts[column]:15}" for column in COLUMNS)
            print(line, flush=True)
            for change, outcome, said in found:
                output.write(
                    json.dumps({"seed": name, "change": change, "outcome": outcome, "said": said}) + "\n"
                )
                if outcome in ("other", "failed"):
                    print(f"    {outcome}: {change}: {said}")
    result = {"changes": total.total(), **total, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(result))
    return 1 if total["other"] or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
