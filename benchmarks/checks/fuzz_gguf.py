"""Runs many damaged GGUF files through the reader under a memory limit and a time limit per case.

    python -m benchmarks.checks.fuzz_gguf --cases 1000000 [--first 0] [--jobs 16]

Run from the repository root, by `--jobs` processes. Prints one JSON line: cases, outcomes, the slowest case, and cases
that failed; exits with 1 if any did. A failing case number is enough to make its file again.
"""

import argparse
import json
import logging
import multiprocessing
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.gguf_mutations import Mutator, read_everything

EXTRA_MEMORY = 256 << 20
SECONDS_A_CASE = 5


class TooSlowError(Exception):
    """A case took more than SECONDS_A_CASE."""


@dataclass
class Result:
    """The results of some cases. slowest: its seconds, and the case."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, object]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)


def _too_slow(_signal: int, _frame: object) -> None:
    raise TooSlowError


def _limit_memory() -> None:
    """From here on the process may map EXTRA_MEMORY bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_cases(first: int, cases: int) -> Result:
    """Read cases `first` to `first + cases` in this process, whose memory is limited from then on."""
    logging.getLogger("quengine").setLevel(logging.ERROR)
    signal.signal(signal.SIGALRM, _too_slow)
    mutator = Mutator()
    made = Result()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        path = Path(folder) / "case.gguf"
        path.write_bytes(mutator.seeds[0].assemble())
        read_everything(path)
        _limit_memory()
        for number in range(first, first + cases):
            path.write_bytes(mutator.case(number))
            start = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, SECONDS_A_CASE)
            try:
                outcome = read_everything(path)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcome = "FAILED"
                made.failures.append({"case": number, "error": f"{type(error).__name__}: {error}"[:200]})
            signal.setitimer(signal.ITIMER_REAL, 0)
            made.outcomes[outcome] += 1
            made.slowest = max(made.slowest, (time.perf_counter() - start, number))
    return made


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--cases", type=int, default=10_000)
    arguments.add_argument("--first", type=int, default=0)
    arguments.add_argument("--jobs", type=int, default=1, help="processes")
    options = arguments.parse_args()
    began = time.monotonic()
    share = -(-options.cases // options.jobs)
    starts = range(options.first, options.first + options.cases, share)
    counts = [min(share, options.first + options.cases - start) for start in starts]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(run_cases, starts, counts))
    failures = [each for made in results for each in made.failures]
    slowest = max(made.slowest for made in results)
    result = {
        "cases": options.cases,
        "first": options.first,
        "outcomes": sum((made.outcomes for made in results), Counter[str]()),
        "failures": failures[:20],
        "slowest_ms": round(slowest[0] * 1e3, 2),
        "slowest_case": slowest[1],
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
