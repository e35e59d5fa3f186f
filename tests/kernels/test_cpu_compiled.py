"""Compilation of the CPU kernels when there is nowhere to keep the result."""

import ctypes

import numpy as np
import pytest
from numba.core import caching

from quengine.kernels.cpu.compiled import compile_kernel, source_stamp
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
