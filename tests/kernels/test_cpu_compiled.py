"""Compilation of the CPU kernels when there is nowhere to keep the result."""

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from numba.core import caching

from quengine.kernels.cpu.compiled import _say_once, compile_kernel, source_stamp
from quengine.kernels.cpu.row_ir import get, store_f32


def test_kernels_compile_without_a_folder_to_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for implementation in (caching.CodeLibraryCacheImpl, caching.CompileResultCacheImpl):
        monkeypatch.setattr(implementation, "_locator_classes", [])

    def write_task(context: int, task: int) -> None:
        store_f32(np.float32(task), get(context, 0) + 4 * task)

    out = np.zeros(3, np.float32)
    parameters = np.array([out.ctypes.data], np.int64)
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(compile_kernel(write_task))
    kernel(parameters.ctypes.data, 2)
    assert out.tolist() == [0.0, 0.0, 2.0]


def test_the_stamp_names_the_generators() -> None:
    assert len(source_stamp()) == 16 and source_stamp() == source_stamp()


def test_compiling_is_said_once_and_not_when_kernels_are_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A module of its own, as numba keeps compiled code beside the file that a function is written in.
    source = tmp_path / "some_kernel.py"
    source.write_text(
        "from quengine.kernels.cpu.compiled import compile_kernel\n"
        "from quengine.kernels.cpu.row_ir import get\n\n"
        "def kernel(context, task):\n    get(context, task)\n\n"
        "def make():\n    return compile_kernel(kernel)\n"
    )
    messages = []
    for times in (2, 1):
        _say_once.cache_clear()
        caplog.clear()
        for _ in range(times):
            spec = importlib.util.spec_from_file_location("some_kernel", source)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.make()
        messages.append(
            [record.getMessage() for record in caplog.records if "compiling" in record.getMessage()]
        )
    assert len(messages[0]) == 1 and messages[1] == []
