"""CPU and wall time from the start of a command to its end, beside what Python and torch take to start.

    python benchmarks/startup.py [-m MODEL] [-r ROUNDS] [--beside FOLDER] [--only ROW ...] [--json]
    python benchmarks/startup.py --time-line [-m MODEL] [--device cuda] [-r ROUNDS] [--beside FOLDER]

Commands are run in turns; the table has medians. CPU time is that of the process and of those it started, on all
cores: on a shared machine it says more than wall time. The last row is a start without any compiled kernels, once.
`--beside` names a folder with another version of the package (FOLDER/quengine), which is measured in the same turns.

`--time-line` says instead when `engine -v generate` comes to its milestones, in seconds from the start of its process
to the line of the log that says so, and to the first byte of its answer; medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

ENGINE = (sys.executable, "-m", "quengine.cli")
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
    """The cost of a command, which ends by itself or is ended when `ready` returns."""
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


MILESTONES = (
    ("arguments read", "debug: arguments read"),
    ("torch imported", "debug: torch imported"),
    ("header read", "info: model "),
    ("device chosen, its context made", "info: device "),
    ("backend made", "debug: backend made"),
    ("cache made, kernels looked for", "debug: kernels looked for"),
    ("weights on the device", "debug: weights loaded"),
    ("model loaded", "info: loaded in "),
    ("tokenizer made", "info: tokenizer of "),
    ("kernels loaded, step captured", "debug: warmed up"),
)
"""Each with the line of the log that says that it has been passed."""


def time_line(model: str, device: str, environment: dict[str, str]) -> dict[str, float]:
    """Seconds from the start of a process that answers one prompt to each of its milestones."""
    command = (*ENGINE, "-v", "generate", "-m", model, "--raw", "-p", "hi", "-n", "2", "--temp", "0")
    began, seconds = time.perf_counter(), dict[str, float]()
    process = subprocess.Popen(
        (*command, "--device", device),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    def read_answer() -> None:
        assert process.stdout is not None
        if process.stdout.read(1):
            seconds["first token"] = time.perf_counter() - began
        process.stdout.read()

    reader = threading.Thread(target=read_answer)
    reader.start()
    assert process.stderr is not None
    for line in iter(process.stderr.readline, b""):
        for name, text in MILESTONES:
            if line.startswith(f"engine: {text}".encode()):
                seconds.setdefault(name, time.perf_counter() - began)
    reader.join()
    if process.wait():
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    seconds["end of the process"] = time.perf_counter() - began
    return seconds


def print_time_lines(given: argparse.Namespace, versions: dict[str, dict[str, str]]) -> None:
    """The medians of each version, whose processes take turns; the first of each is not counted."""
    found: dict[str, list[dict[str, float]]] = {label: [] for label in versions}
    for number in range(given.rounds + 1):
        for label, environment in versions.items():
            line = time_line(given.model, given.device, environment)
            found[label] += [line] if number else []
    names = [*(name for name, _ in MILESTONES), "first token", "end of the process"]
    medians = {
        label: {n: statistics.median(v) for n in names if (v := [each[n] for each in lines if n in each])}
        for label, lines in found.items()
    }
    if given.json:
        print(json.dumps(medians))
        return
    for name in names:
        figures = (f"{label}{each[name]:6.2f} s" for label, each in medians.items() if name in each)
        print(f"{name:32} {'   '.join(figures)}")


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
    parser.add_argument("--time-line", action="store_true")
    parser.add_argument("--device", default="cpu", help="of the time line")
    given = parser.parse_args()
    # As installed: bytecode is there, or is written by the first round.
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    versions = {"": plain}
    if given.beside:
        versions["beside: "] = plain | {"PYTHONPATH": given.beside}
    if given.time_line:
        print_time_lines(given, versions)
        return
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
