"""Every library's way to say that memory has run out is one line that says what to lower, and exit code 2."""

import errno
import sys
from pathlib import Path

import pytest

from quengine.cli import main
from quengine.errors import CannotRunError, EngineError
from quengine.platform.failure import failure_of
from quengine.platform.out_of_memory import killed_for_memory, out_of_memory
from tests import quick_python
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


MEMORY = [
    MemoryError(),
    MemoryError("Unable to allocate 8.00 GiB for an array with shape (1073741824,) and data type float64"),
    OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139 GiB, of which 1.5 GiB is free"
    ),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 17179869184 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("std::bad_alloc"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]
OTHERS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("out of memory"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "model.gguf"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", "/dev/stdin"),
    EngineError("no such model"),
    CannotRunError("not enough memory on cuda:0: needs 40 GB"),
    KeyError("alloc_cpu"),
]


@pytest.mark.parametrize("error", MEMORY, ids=repr)
def test_a_lack_of_memory_says_what_to_lower(error: Exception) -> None:
    problem = out_of_memory(error)
    assert problem is not None and problem.exit_code == 2
    assert str(problem).startswith("not enough memory") and "lower -c or --parallel" in str(problem)
    assert failure_of(error).kind == "CannotRunError"


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_what_they_are(error: Exception) -> None:
    assert out_of_memory(error) is None


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't start new thread"), OSError(errno.EAGAIN, "Resource temporarily unavailable")],
)
def test_a_lack_of_threads_says_what_to_lower(error: Exception) -> None:
    assert "lower -t" in str(out_of_memory(error))


def test_the_sizes_are_told() -> None:
    assert "(17179869184 bytes asked for)" in str(out_of_memory(MEMORY[3]))
    assert "(2.00 GiB asked for, 1.5 GiB free)" in str(out_of_memory(MEMORY[2]))


def test_a_process_that_the_system_killed() -> None:
    assert "when memory has run out" in killed_for_memory(-9)
    assert killed_for_memory(-11) == killed_for_memory(1) == ""


# The program with a limit on its address space, set once it has what each library needs to begin.
PROGRAM = """
import mmap, resource, sys, threading
import numpy, torch
from quengine.cli import main
from quengine.cli.loading import load_llm
GIB = 1 << 30
def limit(more):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
@main.app.command("try")
def attempt() -> None:
    limit({more})
    {body}
sys.argv[1:] = ["try"]
sys.exit(main.main())
"""
FORMS = {
    "torch": "torch.empty(64 * GIB)",
    "numpy": "numpy.empty(64 * GIB)",
    "mmap": "mmap.mmap(-1, 64 * GIB)",
    "bytes": "bytearray(64 * GIB)",
    "threads": "[threading.Thread(target=threading.Event().wait, daemon=True).start() for _ in range(9999)]",
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc of Linux")
@pytest.mark.parametrize("form", FORMS)
def test_real_allocations_that_fail_are_one_line_and_exit_code_2(form: str) -> None:
    program = PROGRAM.format(more=256 << 20, body=FORMS[form])
    done = quick_python.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("engine: error: ") and ("lower -c" in line or "lower -t" in line)


@pytest.mark.parametrize("error", [MEMORY[3], MEMORY[0]], ids=["torch", "Python"])
def test_a_model_that_cannot_be_loaded_for_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    from quengine import llm

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(llm, "load_model", fail)
    with pytest.raises(CannotRunError, match=r"not enough memory.*lower -c") as raised:
        llm.LLM("any.gguf")
    assert raised.value.__cause__ is error
    model = write_tiny(tmp_path / "m.gguf", sizes=ModelSizes(context=64))
    assert main.run(["generate", "-m", str(model), "hello"]) == 2
    assert "not enough memory" in capsys.readouterr().err
