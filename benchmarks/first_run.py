"""What the first run ever of a model adds: with no compiled kernels, with them, and, of a pack, with that installed.

    python -m benchmarks.first_run -m m7.gguf [--cores 16] [--pack pack.zip] [engine generate's other flags ...]
    python -m benchmarks.first_run -m m7.gguf --serve 64 [engine serve's other flags ...]

Each run is `engine generate` of four tokens in a process of its own, with a folder for Triton's cache that is new for
the first and for the pack's. It prints seconds of the whole run and to the first token, CPU seconds of it and its
children, processors busy of these, kernels and launchers compiled, and those of them compiled by the process itself and
not by those beside it; one JSON line at the end.

With `--serve` each run is a server of so many requests at once: seconds until it is ready, tokens per second of a first
round of as many streams (128 tokens each, prompts of 128) and the median of their first tokens, kernels compiled.
"""

import argparse
import asyncio
import ctypes
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.serve.serve_throughput import ask, body
from benchmarks.startup import PORT, healthy

PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--cores", type=int, help="processors of the runs (default: all)")
    parser.add_argument("--serve", type=int, metavar="N", help="a server of N requests at once instead")
    parser.add_argument("--pack", type=Path, help="a file that `engine kernels build` wrote")
    given, flags = parser.parse_known_args()
    if given.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    command = ["generate", "-m", given.model, "--raw", "-n", "4", "--temp", "0", *flags, "1 2 3"]
    if given.serve:
        command = ["serve", "-m", given.model, "--parallel", str(given.serve), "--port", str(PORT), *flags]
    run = measured_server if given.serve else measured
    results = {}
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # processes that compile on are waited for and counted
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as packed:
        if Path(given.model).is_file():  # into the page cache
            subprocess.run(["cat", given.model], stdout=subprocess.DEVNULL, check=True)
        results["first"] = run(command, empty)
        results["second"] = run(command, empty)
        if given.pack is not None:
            engine(["kernels", "install", str(given.pack)], packed)
            results["with the pack"] = run(command, packed)
    columns = list(results["first"])
    print("run          ", *(f"{column:>13}" for column in columns))
    for name, found in results.items():
        print(f"{name:13}", *(f"{found[column]:13.2f}".replace(".00", "   ") for column in columns))
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), **results}))
    return 0


def measured(command: list[str], cache: str) -> dict[str, Any]:
    """Seconds of one run, and what was compiled."""
    before, used = compiled(cache), cpu_seconds()
    began = time.perf_counter()
    process = start(["-v", *command], cache)
    log: list[bytes] = []
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=lambda stream: log.extend(stream), args=(process.stderr,))
    reader.start()
    process.stdout.read(1)
    first = time.perf_counter() - began
    process.stdout.read()
    reader.join()
    if process.wait():
        raise SystemExit(b"".join(log).decode())
    seconds = time.perf_counter() - began
    with suppress(ChildProcessError):
        while True:
            os.wait()
    kernels, launchers = (now - then for now, then in zip(compiled(cache), before, strict=True))
    cpu = cpu_seconds() - used
    return {
        "s": seconds,
        "first_token_s": first,
        "cpu_s": cpu,
        "busy": cpu / seconds,
        "kernels": kernels,
        "launchers": launchers,
        "own": len(re.findall(rb"compiled \w+$", b"".join(log), re.MULTILINE)),
    }


def measured_server(command: list[str], cache: str) -> dict[str, Any]:
    """Seconds until a server is ready, and results of a first round of streams."""
    before, began = compiled(cache), time.perf_counter()
    streams, tokens = int(command[command.index("--parallel") + 1]), 128
    process = start(command, cache, subprocess.DEVNULL)
    try:
        healthy()
        ready = time.perf_counter() - began
        kernels = compiled(cache)[0] - before[0]
        given = argparse.Namespace(
            prompt=tokens, tokens=tokens, whole=False, temperature=0.0, plain=False, route="completions"
        )

        bodies = [body(given, 0, stream) for stream in range(streams)]

        async def round_of_streams() -> list[tuple[float, int]]:
            return await asyncio.gather(*(ask(PORT, given.route, sent) for sent in bodies))

        began = time.perf_counter()
        answers = asyncio.run(round_of_streams())
        seconds = time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()
    return {
        "ready_s": ready,
        "kernels": kernels,
        "round_tok_s": streams * tokens / seconds,
        "first_tokens_s": statistics.median(first for first, _ in answers),
        "later_kernels": compiled(cache)[0] - before[0] - kernels,
    }


def compiled(cache: str) -> tuple[int, int]:
    """Kernels and C modules in a cache."""
    return len(list(Path(cache).glob("*/*.cubin"))), len(list(Path(cache).glob("*/*.so")))


def cpu_seconds() -> float:
    """CPU seconds of all child processes that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def start(command: list[str], cache: str, output: int = subprocess.PIPE) -> "subprocess.Popen[bytes]":
    """The engine with a cache of its own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    return subprocess.Popen(
        [sys.executable, "-m", "quengine.cli", *command], env=environment, stdin=subprocess.DEVNULL,
        stdout=output, stderr=output,
    )  # fmt: skip


def engine(command: list[str], cache: str) -> None:
    """The command, to its end."""
    process = start(command, cache)
    _, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"engine {' '.join(command)}: {said.decode()}")


if __name__ == "__main__":
    sys.exit(main())
