"""The process that compiles kernels is started early for a model that is new on this machine, and for no other."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from quengine.kernels.cuda.launch import compiler_process
from quengine.platform import cuda_start, early_compiler
from tests.engine.platform.test_cuda_start import fake_driver


class Process:
    """One that was started, and may be closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Process]:
    """The processes, in place of real ones, with caches of their own."""
    made = list[Process]()

    def start(prelude: str, needed: str) -> Any:
        assert "torch_import" in prelude and find_spec(needed) is not None
        made.append(Process())
        return made[-1]

    monkeypatch.setattr(compiler_process, "start", start)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return made


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def test_it_is_started_until_the_kernels_of_a_model_have_been_looked_for(
    started: list[Process], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    early_compiler.begin(model)
    assert len(started) == 1 and not started[0].closed
    early_compiler.end(looked_for=True)
    assert started[0].closed, "nobody has taken it"
    early_compiler.begin(model)
    assert len(started) == 1
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    early_compiler.begin(model)
    assert len(started) == 2
    early_compiler.end(looked_for=True)


def test_a_file_that_has_changed_is_another_model(started: list[Process], model: str) -> None:
    early_compiler.begin(model)
    early_compiler.end(looked_for=True)
    os.utime(model, ns=(1, 1))
    early_compiler.begin(model)
    assert len(started) == 2
    early_compiler.end(looked_for=True)


def test_a_model_on_another_device_has_had_no_kernels_looked_for(started: list[Process], model: str) -> None:
    for _ in range(2):
        early_compiler.begin(model)
        early_compiler.end(looked_for=False)
    assert [process.closed for process in started] == [True, True]


def test_who_compiles_takes_the_one_that_waits(started: list[Process], model: str) -> None:
    early_compiler.begin(model)
    taken: Any = compiler_process.taken("")
    early_compiler.end(looked_for=True)
    assert taken is started[0] and not taken.closed


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (0, 0)])
def test_it_is_started_where_there_is_a_device(
    started: list[Process], model: str, monkeypatch: pytest.MonkeyPatch, devices: int, count: int
) -> None:
    monkeypatch.setattr(cuda_start, "_driver", lambda: fake_driver(devices, []))
    monkeypatch.setattr(cuda_start, "_read_triton", lambda _: None)
    cuda_start.begin("auto", model)
    cuda_start.wait()
    assert len(started) == count
    early_compiler.end(looked_for=False)


def test_what_is_no_file_begins_nothing(started: list[Process], tmp_path: Path) -> None:
    early_compiler.begin(str(tmp_path / "none.gguf"))
    early_compiler.end(looked_for=True)
    assert not started
