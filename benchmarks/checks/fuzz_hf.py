"""Runs many damaged Hugging Face folders through the reader under a memory limit and a time limit per case.

    python -m benchmarks.checks.fuzz_hf --cases 3000 [--first 0] [--jobs 16]

Run from the repository root, by `--jobs` processes. Prints one JSON line: cases, outcomes, the slowest case, the most
memory, and cases that failed; exits with 1 if any did. A failing case number is enough to make its folder again. Ctrl-C
or SIGTERM ends it early, with the result so far.
"""

import argparse
import json
import logging
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.hf_mutations import Mutator, read_everything, write_files

EXTRA_MEMORY = 1536 << 20
# A case is four readings, each in bounds of processor time; on a busy machine that is as much longer.
SECONDS_A_CASE = 300


class TooSlowError(BaseException):
    """A case took more than SECONDS_A_CASE."""


def _too_slow(_signal: int, _frame: object) -> None:
    raise TooSlowError


def _limit_memory() -> None:
    """From here on the process may map EXTRA_MEMORY bytes more than it has. Its workers have limits of their own."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _cpu_seconds() -> float:
    """Processor time of this process and of the workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _peak_mib(who: int) -> float:
    return round(resource.getrusage(who).ru_maxrss / 1024, 1)


def _run(mutator: Mutator, number: int, folder: Path) -> tuple[str, str]:
    """The outcome of one case, and what went wrong where it is FAILED."""
    try:
        mutator.write(number, folder)
        signal.setitimer(signal.ITIMER_REAL, SECONDS_A_CASE)
        return read_everything(folder), ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "FAILED", f"{type(error).__name__}: {error}"[
            :200
        ] + f" at {Path(where.filename).name}:{where.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _in_processes(first: int, cases: int, jobs: int) -> int:
    """Share the cases between processes of this program, and print what they say together."""
    share = -(-cases // jobs)
    command = [sys.executable, "-m", "benchmarks.checks.fuzz_hf"]
    began = time.monotonic()
    running = [
        subprocess.Popen(
            [*command, "--first", str(start), "--cases", str(min(share, first + cases - start))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for start in range(first, first + cases, share)
    ]
    results = [json.loads(process.communicate()[0]) for process in running]
    whole = {
        "cases": sum(each["cases"] for each in results),
        "first": first,
        "outcomes": dict(sum((Counter(each["outcomes"]) for each in results), Counter[str]())),
        "failures": [failure for each in results for failure in each["failures"]][:20],
        **{
            name: max(each[name] for each in results)
            for name in ("most_cpu_s", "longest_s", "more_memory_mib", "worker_memory_mib")
        },
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(whole))
    return 1 if whole["failures"] or any(process.returncode for process in running) else 0


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--cases", type=int, default=3000)
    arguments.add_argument("--first", type=int, default=0)
    arguments.add_argument("--jobs", type=int, default=1, help="processes")
    options = arguments.parse_args()
    if options.jobs > 1:
        return _in_processes(options.first, options.cases, options.jobs)
    logging.getLogger("quengine").setLevel(logging.ERROR)
    signal.signal(signal.SIGALRM, _too_slow)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcomes: dict[str, int] = {}
    failures: list[dict[str, object]] = []
    slowest, longest = (0.0, -1), 0.0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        mutator = Mutator(Path(scratch) / "seeds")
        folder = Path(scratch) / "case"
        write_files(folder, mutator.seeds[0])
        read_everything(folder)
        shutil.rmtree(folder)
        before = _peak_mib(resource.RUSAGE_SELF)
        _limit_memory()
        for number in range(options.first, options.first + options.cases):
            start, cpu = time.perf_counter(), _cpu_seconds()
            try:
                outcome, problem = _run(mutator, number, folder)
            except KeyboardInterrupt:
                break
            if problem:
                failures.append({"case": number, "error": problem})
                print(json.dumps(failures[-1]), file=sys.stderr, flush=True)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            slowest = max(slowest, (_cpu_seconds() - cpu, number))
            longest = max(longest, time.perf_counter() - start)
    result = {
        "cases": sum(outcomes.values()),
        "first": options.first,
        "outcomes": outcomes,
        "failures": failures[:20],
        "most_cpu_s": round(slowest[0], 2),
        "longest_s": round(longest, 1),
        "slowest_case": slowest[1],
        "more_memory_mib": round(_peak_mib(resource.RUSAGE_SELF) - before, 1),
        "worker_memory_mib": _peak_mib(resource.RUSAGE_CHILDREN),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
