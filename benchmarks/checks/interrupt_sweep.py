"""Sends a signal to every command at every moment of its first seconds: it has to end at once, and quietly.

    python -m benchmarks.checks.interrupt_sweep [--jobs 16] [--step-ms 20] [--seconds 5] [--only serve ...]

Run from the repository root. A command is started anew for each moment, SIGINT and SIGTERM take turns or are those of
`--signals`; it has to end with 130 (143), or by the signal itself, within `--within` seconds, leave nothing on standard
error but what it prints undisturbed, and no process or partial file behind. Prints a line a command, with the first
failures below; exits with 1 if there was one.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from quengine.cli.command_table import COMMANDS
from tests.gguf_builder import ModelSizes
from tests.hf_mutations import write_convertible
from tests.tiny_models import write_tiny

ENGINE = Path(sys.executable).with_name("engine")
NOISE = re.compile(
    r"Traceback|Exception|Interrupt\b|[Ee]rror|terminate called|Abort|Segmentation|Fatal|internal|core dumped"
)
ENDING = 0.15
"""Seconds that a process which has done its work may take to be gone: a signal finds it, and changes nothing."""


@dataclass(frozen=True)
class Command:
    """Arguments with {model}, {folder} and {port} in them; `drains`: once it serves, a signal is its normal end."""

    arguments: str
    drains: bool = False


SWEPT = {
    "help": Command("--help"),
    "generate": Command(
        "generate -m {model} --raw -p a -n 100000 --ignore-eos --context-shift -c 256 --device cpu -t 1"
    ),
    "chat": Command("chat -m {model} --device cpu -t 1"),
    "run": Command("run {model} hello -n 100000 --ignore-eos --context-shift -c 256 --device cpu -t 1"),
    "serve": Command("serve -m {model} --device cpu -t 1 --port {port}", drains=True),
    "ps": Command("ps --url http://127.0.0.1:{stalled}"),
    "stop": Command("stop tiny --url http://127.0.0.1:{stalled}"),
    "list": Command("list --all"),
    "pull": Command("pull hf:user/repo:Q8_0"),
    "show": Command("show {model} --tensors"),
    "convert": Command("convert {checkpoint} -o {folder}/converted.gguf"),
    "quantize": Command(
        "quantize {model} -o {folder}/quantized.gguf --type Q4_K_M --allow-requantize --device cpu"
    ),
    "launch": Command("launch codex -m {model} --device cpu -t 1", drains=True),
    "create": Command("create swept -f {preset}"),
    "cp": Command("cp {model} swept"),
    "rm": Command("rm -y swept"),
    "bench": Command("bench -m {model} -p 64 -n 64 -r 1000 --device cpu -t 1"),
    "bench --synthetic": Command("bench --synthetic llama-3.2-1b -p 64 -n 8 -r 1000 --device cpu -t 1"),
    "parity": Command("parity -m {model} --texts 14 --prompts 50 --b cpu -t 1"),
    "perplexity": Command("perplexity -m {model} -f {text} --device cpu -t 1"),
    "compare": Command("compare {model} {model} -f {text} --device cpu -t 1"),
    "imatrix": Command("imatrix -m {model} -f {text} -o {folder}/imatrix.gguf --device cpu -t 1"),
    "tokenize": Command("tokenize -m {model} hello"),
    "kernels": Command("kernels list"),
    "doctor": Command("doctor"),
}


@dataclass
class Place:
    """What the commands find: a model, a checkpoint, a preset, a text, a port where nothing answers, a folder of their
    own, and in `folder` programs that end at once."""

    folder: Path
    model: Path
    checkpoint: Path
    preset: Path
    text: Path
    stalled: int

    def arguments(self, command: Command, own: Path) -> list[str]:
        values = {
            "model": self.model,
            "checkpoint": self.checkpoint,
            "preset": self.preset,
            "text": self.text,
            "stalled": self.stalled,
            "port": 0,
            "folder": own,
        }
        return [each.format(**values) for each in command.arguments.split()]

    def environment(self, own: Path) -> dict[str, str]:
        """Caches that are kept (kernels are compiled once), and temporary files in a folder of each process."""
        return os.environ | {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "TMPDIR": str(own),
            "XDG_DATA_HOME": str(own),
            "XDG_STATE_HOME": str(own),
            "HF_ENDPOINT": f"http://127.0.0.1:{self.stalled}",
            "HF_HOME": str(own / "hub"),
            "OMP_NUM_THREADS": "1",
        }


@dataclass
class Swept:
    """How the processes of one command have ended."""

    ended: int = 0
    before: int = 0
    starting: int = 0
    slowest: float = 0.0
    failures: list[str] = field(default_factory=list)


@contextmanager
def place() -> Iterator[Place]:
    """A place, which goes with the block."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as stalled:
        folder = Path(name)
        stalled.bind(("127.0.0.1", 0))
        stalled.listen(4096)
        sizes = ModelSizes(embedding=64, feed_forward=128, context=32768)
        preset = folder / "preset.toml"
        model = write_tiny(folder / "tiny.gguf", kind="Q8_0", sizes=sizes)
        preset.write_text(f'model = "{model}"\n')
        agent = folder / "codex"
        agent.write_text("#!/bin/sh\n")
        agent.chmod(0o755)
        text = folder / "text.txt"
        text.write_text("the cat sat on the mat\n" * 20_000)
        checkpoint = write_convertible(folder / "checkpoint")
        yield Place(folder, model, checkpoint, preset, text, stalled.getsockname()[1])


def strike(where: Place, command: Command, number: int, after: float, within: float) -> tuple[str, float]:
    """What is wrong with how a command ends by a signal that comes `after` seconds, and how long that took.

    "": nothing; "before": it had ended; "python": Python itself was still starting, which nothing of ours can change.
    """
    with tempfile.TemporaryDirectory(dir=where.folder, ignore_cleanup_errors=True) as own:
        began = time.monotonic()
        process = subprocess.Popen(
            [str(ENGINE), *where.arguments(command, Path(own))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=where.environment(Path(own)),
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, began + after - time.monotonic()))
                return "before", 0.0
            process.send_signal(number)
            sent = time.monotonic()
            try:
                said = process.communicate(timeout=10 * within)[1].decode(errors="replace")
            except subprocess.TimeoutExpired:
                return f"still runs after {10 * within:.0f} s", 10 * within
            took = time.monotonic() - sent
            return fault(process.returncode, number, said, took, within, command.drains, Path(own)), took
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stderr):
                if stream is not None:
                    stream.close()


def fault(code: int, number: int, said: str, took: float, within: float, drains: bool, own: Path) -> str:
    """What is wrong, or ""."""
    if (
        number == signal.SIGINT
        and "/quengine/" not in said
        and re.search(r"Traceback|^KeyboardInterrupt$", said)
    ):
        return "python"
    if code == 0 and (drains or took <= ENDING):
        pass
    elif code not in (128 + number, -number):
        return f"exit code {code}: {said[-300:]!r}"
    if noise := NOISE.search(said):
        return f"{noise.group()!r} on standard error: {said[-600:]!r}"
    if left := [str(each.relative_to(own)) for each in own.rglob("*") if each.name.endswith(".partial")]:
        return f"left {', '.join(left)}"
    return "" if took <= within else f"took {took:.2f} s"


def sweep(
    where: Place, command: Command, moments: list[float], numbers: list[int], given: argparse.Namespace
) -> Swept:
    """Strike one command at all moments, with each signal in turn."""
    swept = Swept()

    def one(turn: int) -> tuple[float, int, str, float]:
        after, number = moments[turn], numbers[turn % len(numbers)]
        return after, number, *strike(where, command, number, after, given.within)

    chunk = 4 * given.jobs
    with ThreadPoolExecutor(given.jobs) as pool:
        for first in range(0, len(moments), chunk):
            results = list(pool.map(one, range(first, min(first + chunk, len(moments)))))
            for after, number, wrong, took in results:
                if wrong == "before":
                    swept.before += 1
                    continue
                if wrong == "python":
                    swept.starting += 1
                    continue
                swept.ended += 1
                swept.slowest = max(swept.slowest, took)
                if wrong:
                    name = signal.Signals(number).name
                    swept.failures.append(f"{name} after {1000 * after:.0f} ms: {wrong}")
            if all(wrong == "before" for _, _, wrong, _ in results):
                break
    return swept


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--from-ms", type=float, default=0)
    parser.add_argument("--seconds", type=float, default=5, help="the last moment")
    parser.add_argument("--within", type=float, default=1, help="seconds that the end may take")
    parser.add_argument("--signals", nargs="+", default=["INT", "TERM"], choices=["INT", "TERM", "HUP"])
    parser.add_argument("--only", nargs="+", default=[], choices=SWEPT)
    given = parser.parse_args()
    if missing := set(COMMANDS) - set(SWEPT):
        parser.error(f"no command line for {', '.join(sorted(missing))}")
    numbers = [int(signal.Signals[f"SIG{each}"]) for each in given.signals]
    steps = int((1000 * given.seconds - given.from_ms) / given.step_ms)
    moments = [(given.from_ms + given.step_ms * step) / 1000 for step in range(steps + 1) for _ in numbers]
    failed = False
    say: Callable[[str], None] = lambda text: print(text, flush=True)  # noqa: E731
    with place() as where:
        warm = Command("generate -m {model} --raw -p a -n 2 --device cpu -t 1")
        with tempfile.TemporaryDirectory() as own:  # compiles what later runs find
            subprocess.run(
                [str(ENGINE), *where.arguments(warm, Path(own))],
                check=True,
                capture_output=True,
                env=where.environment(Path(own)),
            )
        for name in given.only or SWEPT:
            swept = sweep(where, SWEPT[name], moments, numbers, given)
            failed |= bool(swept.failures)
            verdict = f"{len(swept.failures)} FAILED" if swept.failures else "quiet"
            say(
                f"{name:20} {swept.ended:5} interrupted, {swept.starting} while Python itself was starting, "
                f"{swept.before} had ended; slowest "
                f"{swept.slowest:.2f} s; {verdict}"
            )
            for line in swept.failures[:10]:
                say(f"    {line}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
