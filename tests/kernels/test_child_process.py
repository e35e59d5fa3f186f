"""A process of ours: started with what it needs, ended with the one that started it, its end told."""

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from quengine.kernels import child_process
from quengine.kernels.child_process import ChildProcess

ANY: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder()

BEGIN = """
import os, sys, threading
import msgspec
from quengine.kernels.child_process import end_with_parent, parent_channel
channel = parent_channel(msgspec.msgpack.Decoder())
end_with_parent()
"""
ECHO = (
    BEGIN
    + """
from contextlib import suppress
with suppress(EOFError):
    while True:
        channel.send(channel.receive())
"""
)
HANG = BEGIN + "channel.send('begun'); threading.Event().wait()"


@pytest.fixture(autouse=True)
def _as_started_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "subprocess", subprocess)


def started(program: str, *arguments: str, **given: object) -> ChildProcess[object]:
    return ChildProcess(("-c", program), ANY, arguments, quiet=True, **given)  # type: ignore[arg-type]


def test_a_program_has_its_arguments_descriptors_and_variables_and_no_working_folder_to_import_from() -> None:
    program = BEGIN + (
        "os.write(int(sys.argv[2]), b'x'); print('dropped')\n"
        "found = os.environ['NAME'], os.environ['HOME'], '' in sys.path, os.getsid(0) == os.getpid()\n"
        "channel.send([sys.argv[2:], *found])"
    )
    read_end, write_end = os.pipe()
    child = started(program, str(write_end), "-v", descriptors=[write_end], environment={"NAME": "value"})
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert child.channel.receive() == [[str(write_end), "-v"], "value", os.environ["HOME"], False, True]
        assert pipe.read() == b"x", "it has ended, and nobody else has the other end"
    assert child.wait() == 0 and child.ending == "has ended (0)" and child.close() == 0


def test_a_program_answers_and_ends_when_its_channel_is_closed() -> None:
    child = started(ECHO)
    child.channel.send({"a": [1, 2]})
    assert child.channel.receive() == {"a": [1, 2]} and child.code is None
    assert child.close(120) == 0


def test_a_program_that_does_not_end_is_killed() -> None:
    child = started(HANG)
    assert child.channel.receive() == "begun"
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert child.close(0.01) == -9 and child.ending == "was ended by signal 9"


def test_a_program_that_waits_for_something_else_ends_when_it_is_to() -> None:
    child = started(HANG)
    assert child.channel.receive() == "begun"
    child.channel.close()  # which only what receives would notice
    assert child.wait(0.2) is None
    child.end()
    assert child.wait(120) == 0


def test_what_is_to_be_done_before_the_end_is_done_also_where_a_program_waits(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    keep = "from quengine.kernels.process_end import BEFORE_END\nBEFORE_END.update([lambda: 1 / 0, "
    child = started(f"import os\n{keep}lambda: os.rmdir({str(folder)!r})]){HANG}")
    assert child.channel.receive() == "begun" and folder.exists()
    child.end()
    assert child.wait(120) == 0 and not folder.exists()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(1)", "pass"])
def test_a_program_ends_with_the_process_that_has_started_it(end: str) -> None:
    parent = textwrap.dedent(
        f"""
        import os, sys
        import msgspec
        from quengine.kernels.child_process import ChildProcess
        child = ChildProcess(("-c", sys.argv[1]), msgspec.msgpack.Decoder())
        child.channel.receive()
        print(child.pid, flush=True)
        {end}
        """
    )
    ended = subprocess.run(
        [sys.executable, "-c", parent, HANG], stdout=subprocess.PIPE, text=True, timeout=120
    )
    pid = int(ended.stdout)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(120)


def test_a_program_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        started(ECHO)
