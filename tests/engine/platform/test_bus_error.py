"""A page of a mapped file that cannot be read ends the process with one line; other signals go where they went."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quengine.platform import bus_error

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the handler is for Linux")

PROGRAM = """
import mmap, os, signal, sys, threading
from pathlib import Path
{install}
path = Path(sys.argv[1])
path.write_bytes(bytes(100_000))
with path.open("r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    file.truncate(0)
def touch():
    return mapped[50_000]
{act}
print("went on")
"""
INSTALL = "from quengine.platform.bus_error import install; install(); install()"
IN_A_THREAD = "thread = threading.Thread(target=touch); thread.start(); thread.join()"
SENT = "os.kill(os.getpid(), signal.SIGBUS)"


def ends(tmp_path: Path, act: str, install: str = INSTALL, *options: str) -> tuple[int, str, str]:
    code = PROGRAM.format(install=install, act=act)
    command = [sys.executable, *options, "-c", code, str(tmp_path / "mapped")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("act", ["touch()", IN_A_THREAD])
def test_a_truncated_mapping_is_one_line_and_exit_code_2(tmp_path: Path, act: str) -> None:
    assert ends(tmp_path, act) == (2, "", bus_error.MESSAGE.decode())
    assert bus_error.MESSAGE.count(b"\n") == 1


def test_a_signal_that_was_sent_ends_the_process_as_before(tmp_path: Path) -> None:
    assert ends(tmp_path, SENT) == (-signal.SIGBUS, "", "")


def test_a_handler_that_was_there_before_gets_the_other_signals(tmp_path: Path) -> None:
    code, _, said = ends(tmp_path, SENT, INSTALL, "-X", "faulthandler")
    assert code == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in said


def test_importing_the_library_changes_no_handler(tmp_path: Path) -> None:
    code, _, said = ends(tmp_path, "touch()", "import quengine; quengine.LLM")
    assert (code, said) == (-signal.SIGBUS, "")
