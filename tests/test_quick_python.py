"""Programs that begin in forks are started, run and end as those that `subprocess` starts."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import quick_python
from tests.quick_python import QuickPopen, run

Run = Callable[..., "subprocess.CompletedProcess[str]"]
TOLD = """
import atexit, json, os, signal, sys
atexit.register(print, "at exit")
signals = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)]
print(json.dumps([
    sys.argv, sys.path, os.getcwd(), os.environ.get("GIVEN"), os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(),
    signals, sys.stdin.read(), sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.stdout.line_buffering,
    __name__, len(os.listdir("/proc/self/fd")), os.fstat(int(sys.argv[1])).st_ino,
]))
sys.stderr.write("é")
"""


@pytest.mark.parametrize("options", [(), ("-P",)])
@pytest.mark.parametrize("session", [False, True])
def test_what_a_program_finds_is_what_it_would_find(
    tmp_path: Path, options: tuple[str, ...], session: bool
) -> None:
    read, write = os.pipe()
    found = []
    for start in (subprocess.run, run):
        done = start(
            [sys.executable, *options, "-c", TOLD, str(write), "a b"],
            input="é", capture_output=True, encoding="utf-8", cwd=tmp_path, pass_fds=[write], start_new_session=session,
            env=os.environ | {"GIVEN": "value", "PYTHONPATH": str(tmp_path / "there")}, timeout=240,
        )  # fmt: skip
        first, *rest = done.stdout.splitlines()
        found.append((json.loads(first), rest, done.stderr, done.returncode))
    os.close(read)
    os.close(write)
    assert found[0] == found[1]


ENDS: dict[str, str] = {
    "at its end": "",
    "an error": "1/0",
    "a code": "raise SystemExit(7)",
    "a line": "raise SystemExit('why')",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "at once": "import os; os._exit(3)",
    "a thread goes on": "import threading, time; threading.Timer(0.05, lambda: print('after')).start()",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_it_would(end: str) -> None:
    command = [sys.executable, "-c", f"print('begun', flush=True)\n{ENDS[end]}"]
    wanted, found = (
        each(command, capture_output=True, text=True, timeout=240) for each in (subprocess.run, run)
    )
    assert (wanted.returncode, wanted.stdout) == (found.returncode, found.stdout)
    assert wanted.stderr.splitlines()[-1:] == found.stderr.splitlines()[-1:]


def test_modules_and_files_are_programs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import beside, sys; print(__name__, __file__, sys.argv, sys.path[0], beside.x)"
    )
    (tmp_path / "beside.py").write_text("x = 1")
    for arguments in (["-m", "program", "y"], ["-P", "-m", "json.tool", "--help"], ["program.py", "y"]):
        told: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 240}
        wanted, found = (each([sys.executable, *arguments], **told) for each in (subprocess.run, run))
        assert wanted.stdout == found.stdout and wanted.stdout


def test_it_is_waited_for_and_signalled() -> None:
    with QuickPopen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1) as program:
        assert program.stdout is not None and program.stdout.readline() == b"1\n" and program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.05)
        program.send_signal(signal.SIGTERM)
        assert program.wait(120) == -signal.SIGTERM == program.poll() == program.returncode


def test_threads_that_start_the_first_programs_at_once_are_told_their_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quick_python, "_servers", dict.fromkeys(quick_python._servers))
    command, together = [sys.executable, "-c", "raise SystemExit(7)"], threading.Barrier(3)

    def start(_: int) -> QuickPopen:
        together.wait(60)
        return QuickPopen(command)

    with ThreadPoolExecutor(3) as threads:
        started = list(threads.map(start, range(3)))
    assert [program.wait(120) for program in started] == [7, 7, 7]


def test_torch_is_there_unless_it_was_imported_with_other_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that this process began with: tests before may have changed some, and used others."""
    servers = {
        key: each for key, each in quick_python._servers.items() if ("OMP_NUM_THREADS", "3") not in key
    }
    monkeypatch.setattr(quick_python, "_servers", servers)
    code = "import sys; print('torch' in sys.modules)"
    for variables, there in (
        ({}, "True"),
        ({"OMP_NUM_THREADS": "3"}, "False"),
        ({"OMP_NUM_THREADS": "3"}, "True"),
    ):
        environment = quick_python._BEGAN | variables
        done = run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.stdout.strip() == there
