"""Ctrl-C, SIGTERM and SIGHUP end the program quietly, whatever it is doing when they come."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

# The program with one more command, which does what the test says.
PROGRAM = """
import contextlib, os, signal, sys, threading
from quengine.cli import main
def strike(number=signal.SIGINT): os.kill(os.getpid(), number)
@main.app.command("try")
def attempt() -> None:
{body}
sys.argv[1:] = ["try"]
from quengine.cli.__main__ import main as run
sys.exit(run())
"""
FOR_EVER = "threading.Event().wait(600)"
SWALLOW = "with contextlib.suppress(BaseException): strike({number})"


def program(body: str) -> list[str]:
    """The program's command line, with the body of its command."""
    return [sys.executable, "-c", PROGRAM.format(body="\n".join(f"    {line}" for line in body.splitlines()))]


def ended(
    command: list[str], before: Callable[[], object] | None = None
) -> "subprocess.CompletedProcess[str]":
    def as_from_a_shell() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs have it ignored
        if before is not None:
            before()

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, preexec_fn=as_from_a_shell
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_the_command(number: signal.Signals) -> None:
    in_peace = "from quengine.cli import interrupts\ninterrupts.GRACE_SECONDS = 120.0\n"
    done = ended(program(f"{in_peace}try:\n    strike({number:d})\nfinally:\n    print('unwound')"))
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "unwound\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_library_swallows_ends_the_program_though_it_goes_on(number: signal.Signals) -> None:
    done = ended(
        program(f"print('before')\n{SWALLOW.format(number=int(number))}\n{FOR_EVER}\nprint('after')")
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "before\n", "")


@pytest.mark.parametrize("then", ["pass", "raise RuntimeError('initialised twice')", "raise SystemExit(0)"])
def test_a_swallowed_interrupt_is_one_however_the_command_ends(then: str) -> None:
    """torch clears the error of an interrupted import of numpy, and the next import fails with another."""
    done = ended(program(f"{SWALLOW.format(number=2)}\n{then}"))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_inside_an_import_ends_the_program(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(
        "import contextlib, os, signal, threading\n"
        f"with contextlib.suppress(BaseException): os.kill(os.getpid(), signal.SIGINT)\n{FOR_EVER}"
    )
    done = ended(program(f"sys.path.insert(0, {str(tmp_path)!r})\nprint('before')\nimport swallows"))
    assert (done.returncode, done.stdout, done.stderr) == (130, "before\n", "")


def test_an_interrupt_inside_a_finalizer_is_neither_printed_nor_lost() -> None:
    body = "class Dropped:\n    def __del__(self) -> None: strike()\nDropped()\n" + FOR_EVER
    done = ended(program(body))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_while_native_code_runs_ends_the_program() -> None:
    """Python's handler would wait for its end."""
    body = "import hashlib\nthreading.Timer(0.01, strike).start()\nhashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
    done = ended(program(body))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_second_interrupt_does_not_wait() -> None:
    body = f"try:\n    strike()\nfinally:\n    {SWALLOW.format(number=2)}\n    os.write(1, b'after')"
    done = ended(program(body))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_that_another_handler_has_is_its_own() -> None:
    body = (
        "noted = threading.Event()\n"
        "signal.signal(signal.SIGINT, lambda *_: noted.set())\n"
        "strike()\n"
        "assert noted.wait(60)\n"
        "from quengine.cli import interrupts\n"
        "threading.Event().wait(2 * interrupts.GRACE_SECONDS)\n"
        "print('went on')"
    )
    done = ended(program(body))
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_a_prompt_answers_ctrl_c_itself() -> None:
    body = (
        "from quengine.cli import interrupts\n"
        "with interrupts.left_to_prompt():\n"
        f"    {SWALLOW.format(number=2)}\n"
        "    threading.Event().wait(2 * interrupts.GRACE_SECONDS)\n"
        "print('went on', flush=True)\n"
        f"{SWALLOW.format(number=2)}\n{FOR_EVER}"
    )
    done = ended(program(body))
    assert (done.returncode, done.stdout, done.stderr) == (130, "went on\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_the_parent_ignores_stays_ignored(number: signal.Signals) -> None:
    done = ended(
        program(f"strike({number:d})\nprint('went on')"), lambda: signal.signal(number, signal.SIG_IGN)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=256)
    return write_tiny(tmp_path_factory.mktemp("interrupts") / "tiny.gguf", kind="Q8_0", sizes=sizes)


GENERATE = "generate --raw -p a -n 100000 --ignore-eos --context-shift --no-stats"


@pytest.mark.parametrize(
    ("command_line", "moment"),
    [
        (GENERATE, "debug: arguments read"),
        (GENERATE, "debug: torch imported"),
        (GENERATE, "info: tokenizer of"),
        ("imatrix -f {folder}/text.txt -o {folder}/made.gguf -c 64", "debug: torch imported"),
        ("imatrix -f {folder}/text.txt -o {folder}/made.gguf -c 64", "info: tokenizer of"),
    ],
)
def test_a_start_is_interrupted_quietly(model: Path, tmp_path: Path, command_line: str, moment: str) -> None:
    """While torch is imported the signal itself ends the process. The whole sweep is
    benchmarks/checks/interrupt_sweep.py."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 100_000)
    arguments = [each.format(folder=tmp_path) for each in command_line.split()]
    command = [sys.executable, "-m", "quengine.cli", "-v", *arguments, "-m", str(model), "--device", "cpu"]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if moment in line:
                process.send_signal(signal.SIGINT)
                break
        else:
            raise AssertionError(f"it has not said {moment!r}")
        said = process.communicate(timeout=120)[1]
    wanted = (130, -signal.SIGINT) if moment == "debug: arguments read" else (130,)
    assert process.returncode in wanted, said
    assert [each.name for each in tmp_path.iterdir()] == ["text.txt"]
    assert all(line.startswith(("engine: info: ", "engine: debug: ")) for line in said.splitlines()), said
