"""CPU and wall time from the start of a command to its end, beside what Python and torch take to start.

    python benchmarks/startup.py [-m MODEL] [-r ROUNDS] [--beside FOLDER] [--only ROW ...] [--json]

Commands are run in turns; the table has medians. CPU time is that of the process and of those it started, on all
cores: on a shared machine it says more than wall time. The last row is a start without any compiled kernels, once.
`--beside` names a folder with another version of the package (FOLDER/quengine), which is measured in the same turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

ENGINE = (sys.executable, "-c", "from quengine.cli.main import main; raise SystemExit(main())")
PORT = 18733
FIRST = "engine generate, first start"


@dataclass(frozen=True)
class Cost:
    """Seconds of one start."""

    cpu: float
    wall: float


def cost(
    command: tuple[str, ...], environment: dict[str, str], ready: Callable[[], None] | None = None
) -> Cost:
    """Of a command that ends by itself, or that is ended when `ready` returns."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if ready is not None:
        ready()
        wall = time.perf_counter() - began
        process.terminate()
    assert process.stderr is not None
    said = process.stderr.read().decode(errors="replace")
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if ready is None:
        wall = time.perf_counter() - began
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {said}")
    return Cost(used.ru_utime + used.ru_stime, wall)


def healthy() -> None:
    """Returns when the server on PORT answers."""
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    raise SystemExit("the server does not answer")


def rows(model: str) -> dict[str, tuple[tuple[str, ...], Callable[[], None] | None]]:
    generate = (*ENGINE, "generate", "-m", model, "-p", "hi", "-n", "1", "--device", "cpu")
    return {
        "python -c pass": ((sys.executable, "-c", "pass"), None),
        "python -c 'import torch'": ((sys.executable, "-c", "import torch"), None),
        "engine --help": ((*ENGINE, "--help"), None),
        "engine list": ((*ENGINE, "list"), None),
        "engine show": ((*ENGINE, "show", model), None),
        "engine tokenize": ((*ENGINE, "tokenize", "-m", model, "hi"), None),
        "engine generate -n 1": (generate, None),
        "engine chat, input at its end": ((*ENGINE, "chat", "-m", model, "--device", "cpu"), None),
        "engine serve until /health": (
            (*ENGINE, "serve", "-m", model, "--device", "cpu", "--port", str(PORT)),
            healthy,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("-r", "--rounds", type=int, default=7)
    parser.add_argument("--beside", metavar="FOLDER", help="PYTHONPATH of another version")
    parser.add_argument("--only", nargs="+", default=[""], help="only rows whose name has one of these in it")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    # As installed: bytecode is there, or is written by the first round.
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    versions = {"": plain}
    if given.beside:
        versions["beside: "] = plain | {"PYTHONPATH": given.beside}
    commands = {
        (name, label): (command, environment, ready)
        for name, (command, ready) in rows(given.model).items()
        for label, environment in versions.items()
        if (label == "" or command[:3] == ENGINE) and any(part in name for part in given.only)
    }
    for command in commands.values():
        cost(*command)  # writes bytecode, compiles kernels, brings files into memory
    found: dict[tuple[str, str], list[Cost]] = {key: [] for key in commands}
    for _ in range(given.rounds):
        for key, command in commands.items():
            found[key].append(cost(*command))
    medians = {
        label + name: Cost(statistics.median(c.cpu for c in costs), statistics.median(c.wall for c in costs))
        for (name, label), costs in found.items()
    }
    command, ready = rows(given.model)["engine generate -n 1"]
    for label, environment in versions.items():
        if any(part in FIRST for part in given.only):
            with tempfile.TemporaryDirectory() as folder:
                medians[label + FIRST] = cost(command, environment | {"NUMBA_CACHE_DIR": folder}, ready)
    if given.json:
        print(json.dumps({name: {"cpu_s": c.cpu, "wall_s": c.wall} for name, c in medians.items()}))
        return
    width = max(map(len, medians))
    print(f"{'':{width}}    CPU s   wall s")
    for name, took in medians.items():
        print(f"{name:{width}} {took.cpu:8.2f} {took.wall:8.2f}")


if __name__ == "__main__":
    main()
