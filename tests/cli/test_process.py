"""How the program ends: each way is one line at most, without a traceback, and a documented exit code."""

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quengine.cli import main, process
from quengine.errors import CannotRunError
from quengine.platform import bus_error
from tests import quick_python
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

ENGINE = (sys.executable, "-m", "quengine.cli")
RUN = ["--device", "cpu", "--temp", "0", "-n", "2", "--ignore-eos"]
# The program with one more command, which does what the test says.
PROGRAM = """
import sys
from quengine.cli import main
@main.app.command("try")
def attempt() -> None:
    {body}
sys.argv[1:] = ["try"]
sys.exit(main.main())
"""
KIB = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=256)
    return write_tiny(tmp_path_factory.mktemp("process") / "tiny.gguf", kind="Q8_0", sizes=sizes)


def engine(*arguments: str, **how: Any) -> "subprocess.CompletedProcess[str]":
    return ended([*ENGINE, *arguments], **how)


def attempt(body: str, **how: Any) -> "subprocess.CompletedProcess[str]":
    return ended([sys.executable, "-c", PROGRAM.format(body=body)], **how)


def ended(command: list[str], **how: Any) -> "subprocess.CompletedProcess[str]":
    """The process at its end; buffered as a user's is, with what it wrote. imports: the test is of what it imports."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | how.pop(
        "environment", {}
    )
    run = subprocess.run if how.pop("imports", False) else quick_python.run
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    return run(command, env=environment, text=True, timeout=240, **streams)


def one_line(done: "subprocess.CompletedProcess[str]") -> str:
    (line,) = done.stderr.splitlines()
    return str(line)


def closing(*descriptors: int) -> Callable[[], None]:
    def close() -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    return close


def reader_gone() -> "subprocess.CompletedProcess[str]":
    read, write = os.pipe()
    os.close(read)
    try:
        return engine("list", "--all", stdout=write)
    finally:
        os.close(write)


ENDS: dict[int, Callable[[], "subprocess.CompletedProcess[str]"]] = {
    0: lambda: engine("--version"),
    1: lambda: engine("show", "no-such-model"),
    2: lambda: attempt("from quengine.errors import CannotRunError; raise CannotRunError('no such device')"),
    3: lambda: attempt("{}['blk.0']"),
    130: lambda: attempt("import os, signal; os.kill(os.getpid(), signal.SIGINT)"),
    141: reader_gone,
}


@pytest.mark.parametrize("code", ENDS)
def test_every_exit_code_is_met_without_a_traceback(code: int) -> None:
    done = ENDS[code]()
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == {0: 0, 3: 2, 130: 0, 141: 0}.get(code, 1)


LEAVING = """
import atexit, os, sys, types
from quengine.cli import main
from quengine.cli.__main__ import main as run
atexit._clear()  # a program begins with `run`
class Held:
    def __del__(self, write=os.write) -> None: write(1, b"taken apart")
sys.modules["held"] = types.ModuleType("held")
sys.modules["held"].held = Held()
@main.app.command("try")
def attempt() -> int:
    atexit.register(print, "of a library")
    print("answer")
    return 141
sys.argv[1:] = ["try"]
sys.exit(run())
"""


def test_a_process_leaves_with_all_written_and_nothing_taken_apart() -> None:
    """After the functions of `atexit`."""
    done = ended([sys.executable, "-c", LEAVING], imports=True)
    assert (done.returncode, done.stdout, done.stderr) == (141, "answer\nof a library\n", "")


ENDS_IN_C = """
import atexit, ctypes, sys
from quengine.cli import main
from quengine.cli.__main__ import main as run
atexit._clear()  # a program begins with `run`
if sys.argv[1]:
    atexit.register(print, sys.argv[1])
libc = ctypes.CDLL(None)
@main.app.command("try")
def attempt() -> int:
    libc.__cxa_atexit(ctypes.cast(libc.puts, ctypes.c_void_p), ctypes.c_char_p(b"profile"), None)
    atexit.register(libc.puts, b"log")
    return 141
sys.argv[1:] = ["try"]
sys.exit(run())
"""


@pytest.mark.parametrize(
    ("earlier", "given", "said"),
    [
        ("", {}, ["log"]),
        ("coverage", {}, ["coverage", "log", "profile"]),
        ("", {"CUDA_INJECTION64_PATH": "nsys"}, ["log", "profile"]),
    ],
    ids=("quick", "coverage", "profiler"),
)
def test_who_waits_for_the_end_of_a_process_has_it(
    earlier: str, given: dict[str, str], said: list[str]
) -> None:
    """C's own functions for the end are called for a profiler and for coverage; what C has printed is never lost."""
    done = ended([sys.executable, "-c", ENDS_IN_C, earlier], imports=True, environment=given)
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (141, said, "")


def test_a_process_that_leaves_writes_what_c_has_printed() -> None:
    body = "import ctypes; ctypes.CDLL(None).puts(b'log'); from quengine.kernels.process_end import leave; leave(3)"
    done = ended([sys.executable, "-c", body])
    assert (done.returncode, done.stdout, done.stderr) == (3, "log\n", "")


def test_a_process_leaves_without_its_outputs_too() -> None:
    body = "from quengine.kernels.process_end import leave; leave(3)"
    assert ended([sys.executable, "-c", body], preexec_fn=closing(1, 2)).returncode == 3


def test_help_lists_exactly_those_exit_codes() -> None:
    listed = re.findall(r"(?:^|; |: )(\d+) ", main.EXIT_CODES)
    assert [int(code) for code in listed] == list(ENDS)
    said = " ".join(re.sub("[│╭╰─]", " ", engine("--help").stdout).split())
    assert main.EXIT_CODES in said


def test_the_installed_script_starts_where_the_module_does() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'engine = "quengine.cli.__main__:main"' in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [["list", "--all"], ["--help"]])
def test_a_full_disk_under_the_output_is_said(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = engine(*arguments, stdout=full)
    assert done.returncode == 2
    assert one_line(done) == "engine: error: cannot write to standard output: No space left on device"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_said_without_buffers_too() -> None:
    with Path("/dev/full").open("w") as full:
        done = engine("list", stdout=full, environment={"PYTHONUNBUFFERED": "1"}, imports=True)
    assert done.returncode == 2
    assert one_line(done) == "engine: error: cannot write to standard output: No space left on device"


def test_a_line_without_buffers_is_out_before_the_process_ends() -> None:
    body = 'print("ready"); sys.stdin.read()'
    command, environment = [sys.executable, "-c", PROGRAM.format(body=body)], {"PYTHONUNBUFFERED": "1"}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | environment, **streams) as running:
        assert running.stdout is not None
        found = select.select([running.stdout], [], [], 60)[0]
        running.communicate()
    assert found and running.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_error_output_that_takes_nothing_leaves_the_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        assert engine("show", "no-such-model", stderr=full).returncode == 1
        assert engine("--version", stderr=full).returncode == 0


def test_a_closed_output_is_said() -> None:
    done = engine("list", preexec_fn=closing(1))
    assert done.returncode == 2
    assert one_line(done) == "engine: error: cannot write to standard output: Bad file descriptor"


def test_a_closed_input_is_said_where_it_is_read(model: Path) -> None:
    done = engine("generate", "-m", str(model), *RUN, "-", preexec_fn=closing(0))
    assert done.returncode == 1
    assert one_line(done) == "engine: error: cannot read the prompt from standard input: Bad file descriptor"


def test_a_closed_error_output_is_no_error() -> None:
    done = engine("list", preexec_fn=closing(2))
    assert done.returncode == 0 and "SIZE" in done.stdout


def test_files_never_take_the_place_of_closed_streams(tmp_path: Path) -> None:
    """What is printed would be written into the file."""
    body = f"file = open({str(tmp_path / 'model')!r}, 'w'); assert file.fileno() > 2; print('x', file=sys.stderr)"
    assert attempt(body, preexec_fn=closing(0, 1, 2)).returncode == 0
    assert (tmp_path / "model").read_text() == ""


def test_an_output_without_the_characters_gets_their_codes_and_json_stays_json() -> None:
    body = "import json; print(json.dumps('é 语 🙂', ensure_ascii=False))"
    done = attempt(body, environment={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout == '"\\u00e9 \\u8bed \\ud83d\\ude42"\n'
    assert json.loads(done.stdout) == "é 语 🙂"
    assert "standard output is in ascii" in one_line(done)


def test_a_lone_surrogate_can_be_printed() -> None:
    done = attempt("print('name-' + chr(0xDC80))", environment={"PYTHONIOENCODING": "utf-8"})
    assert (done.returncode, done.stdout) == (0, "name-\\udc80\n")


def stub(folder: Path, body: str) -> dict[str, str]:
    """An environment in which `import typer`, the first of the slow imports, does something else."""
    (folder / "typer.py").write_text(body)
    return {"PYTHONPATH": str(folder)}


def test_ctrl_c_during_imports_is_quiet(tmp_path: Path) -> None:
    interrupted = stub(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    done = engine("--help", environment=interrupted, imports=True)
    assert done.returncode == -signal.SIGINT  # 130 in a shell
    assert (done.stdout, done.stderr) == ("", "")


def test_ctrl_c_that_the_parent_ignores_stays_ignored(tmp_path: Path) -> None:
    asks = stub(
        tmp_path, "import signal; raise SystemExit(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    )
    done = engine("--help", environment=asks, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert done.returncode == 1


@pytest.mark.parametrize("command", ["generate", "doctor"])
def test_too_many_threads_are_refused_before_any_starts(model: Path, command: str) -> None:
    given = ["-m", str(model), *RUN, "the"] if command == "generate" else []
    done = engine(command, "-t", "100000", *given)
    assert done.returncode == 1
    assert "100000 threads requested; this machine allows 1 to " in one_line(done)


def limited(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def test_a_stack_that_threads_would_overflow_is_refused(model: Path) -> None:
    small = limited(256 * KIB, 256 * KIB)
    done = engine("generate", "-m", str(model), *RUN, "the", preexec_fn=small)
    assert done.returncode == 2
    assert "the limit on stacks is 256 KiB" in one_line(done) and "ulimit -s 8192" in done.stderr
    assert engine("list", preexec_fn=small).returncode == 0
    for command in process.COMPUTING:
        assert "the limit on stacks is 256 KiB" in one_line(engine(command, preexec_fn=small)), command


def test_a_small_stack_is_raised_where_it_may_be(model: Path) -> None:
    done = engine("generate", "-m", str(model), *RUN, "the", preexec_fn=limited(256 * KIB, 8192 * KIB))
    assert done.returncode == 0 and done.stdout


@pytest.mark.parametrize(
    ("limits", "refused"), [((1 << 20, 1 << 20), False), ((1 << 18, 1 << 19), True), ((-1, -1), False)]
)
def test_the_least_stack(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], refused: bool) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    if refused:
        with pytest.raises(CannotRunError, match="512 KiB"):
            process._require_stack()
    else:
        process._require_stack()


@pytest.mark.skipif(sys.platform != "linux", reason="the handler is for Linux")
def test_a_model_truncated_while_it_is_in_use_is_one_line_and_exit_code_2(
    model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    command = [*ENGINE, "chat", "-m", str(copy), *RUN]
    pipe = subprocess.PIPE
    with quick_python.QuickPopen(command, stdin=pipe, stdout=pipe, stderr=pipe) as running:
        assert running.stdin and running.stdout and running.stderr
        try:
            running.stdin.write(b"hello\n")
            running.stdin.flush()
            assert select.select([running.stdout], [], [], 240)[0], "no answer"
            os.truncate(copy, 0)
            said = running.communicate(b"again\n", timeout=240)[1].decode()
        finally:
            running.kill()
    assert running.returncode == 2
    assert said.endswith(bus_error.MESSAGE.decode())
    assert "Traceback" not in said


NO_HOME = """
import os, pwd, sys
def nobody(user): raise KeyError(user)
pwd.getpwuid = nobody
from quengine.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["show", "hf:user/repo"], 2, "this user has no home folder"),
        (["show", "~/model.gguf"], 1, "Could not determine home directory"),
        (["generate", *RUN, "--no-stats", "the", "-m"], 0, ""),
    ],
)
def test_a_user_without_a_home_folder(model: Path, arguments: list[str], code: int, says: str) -> None:
    given = [*arguments, str(model)] if arguments[-1] == "-m" else arguments
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "HF_HOME", "XDG_CACHE_HOME")}
    command = [sys.executable, "-c", NO_HOME, *given]
    done = quick_python.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == code, done.stderr
    assert says in done.stderr and "internal" not in done.stderr


@pytest.mark.parametrize("command", ["show", "pull"])
@pytest.mark.parametrize("name", ["a" * 5000, "hf:user/" + "a" * 5000, "a\0b.gguf"])
def test_names_too_long_or_with_a_zero_byte_are_one_line(
    capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    assert main.run([command, name]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert "internal" not in line and len(line) < 400


@pytest.mark.parametrize("command", ["show", "tokenize", "generate"])
def test_a_fifo_is_no_model(tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for path in (tmp_path, tmp_path / "model.gguf"):
        arguments = [str(path)] if command == "show" else ["-m", str(path), "the"]
        assert main.run([command, *arguments]) == 1
