"""What the first run ever of a model adds: with no compiled kernels, with them, and, of a pack, with that installed.

    python -m benchmarks.first_run -m m7.gguf [--cores 16] [--pack pack.zip] [engine generate's other flags ...]

Each run is `engine generate` of four tokens in a process of its own, with a folder for Triton's cache that is new for
the first and for the pack's. It prints seconds of the whole run, CPU seconds of it and its children, processors busy
of these, kernels and launchers compiled, those of them compiled by the process itself and not by those beside it, and
seconds from the beginning of loading to the first token; one JSON line at the end.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--cores", type=int, help="processors of the runs (default: all)")
    parser.add_argument("--pack", type=Path, help="a file that `engine kernels build` wrote")
    given, flags = parser.parse_known_args()
    if given.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    command = ["generate", "-m", given.model, "--raw", "-n", "4", "--temp", "0", *flags, "1 2 3"]
    results = {}
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as packed:
        if Path(given.model).is_file():  # into the page cache
            subprocess.run(["cat", given.model], stdout=subprocess.DEVNULL, check=True)
        results["first"] = measured(command, empty)
        results["second"] = measured(command, empty)
        if given.pack is not None:
            engine(["kernels", "install", str(given.pack)], packed)
            results["with the pack"] = measured(command, packed)
    print("run                 s   CPU s  busy  kernels  launchers  own  first token")
    for name, run in results.items():
        print(
            f"{name:14} {run['s']:6.2f} {run['cpu_s']:7.1f} {run['cpu_s'] / run['s']:5.1f} {run['kernels']:8} "
            f"{run['launchers']:10} {run['own']:4} {run['first_token_s']:12.2f}"
        )
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), **results}))
    return 0


def measured(command: list[str], cache: str) -> dict[str, Any]:
    """Of one run: seconds, and what was compiled."""
    before, used = compiled(cache), cpu_seconds()
    began = time.perf_counter()
    log = engine(["-v", *command], cache)
    seconds = time.perf_counter() - began
    kernels, launchers = (now - then for now, then in zip(compiled(cache), before, strict=True))
    first = re.search(r"first token after ([0-9.]+) s", log)
    return {
        "s": seconds,
        "cpu_s": cpu_seconds() - used,
        "kernels": kernels,
        "launchers": launchers,
        "own": len(re.findall(r"compiled \w+$", log, re.MULTILINE)),
        "first_token_s": float(first[1]) if first else float("nan"),
    }


def compiled(cache: str) -> tuple[int, int]:
    """Kernels and C modules in a cache."""
    return len(list(Path(cache).glob("*/*.cubin"))), len(list(Path(cache).glob("*/*.so")))


def cpu_seconds() -> float:
    """Of all processes that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def engine(command: list[str], cache: str) -> str:
    """What the command prints."""
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-m", "quengine.cli", *command],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"engine {' '.join(command)}: {done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
