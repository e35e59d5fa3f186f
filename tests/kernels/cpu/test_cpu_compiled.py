"""Compilation of the CPU kernels into object code that needs neither Python nor numba."""

import ctypes

import numpy as np
from llvmlite.binding.orcjit import JITLibraryBuilder, create_lljit_compiler
from numba import types

from quengine.kernels.cpu.ir.row_ir import get, store_f32
from quengine.kernels.cpu.runtime import kernel_table
from quengine.kernels.cpu.runtime.code_store import code_store
from quengine.kernels.cpu.runtime.compiled import compile_function, compile_kernel
from quengine.kernels.cpu.runtime.machine_code import ENTRY, link

# Functions of the C library, which any process has.
C_LIBRARY = ("usleep", "sched_yield", "memset", "memcpy")


def test_a_kernel_has_the_signature_of_all_kernels() -> None:
    def write_task(context: int, task: int) -> None:
        store_f32(np.float32(task), get(context, 0) + 4 * task)

    out = np.zeros(3, np.float32)
    parameters = np.array([out.ctypes.data], np.int64)
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(link(compile_kernel(write_task)))
    kernel(parameters.ctypes.data, 2)
    assert out.tolist() == [0.0, 0.0, 2.0]


def test_a_function_returns_its_result() -> None:
    code = compile_function(lambda a, b, c: a * b + c, types.int64, 3)
    assert ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(link(code))(-7, 6, 2) == -40


def test_kernels_refer_to_the_c_library_alone() -> None:
    # A division and a choice of two, for which numba has exceptions and functions of its own, are in these.
    for function in (
        kernel_table.lead_function,
        kernel_table.watch_function,
        kernel_table.chain_kernel,
        kernel_table.join_kernel,
        kernel_table.tile_matmul_kernel,
        kernel_table.block_kernel,
        kernel_table.sums_kernel,
    ):
        function()
        name = next(name for name in kept_names() if name.endswith(f"-{function.__name__}"))
        code = code_store().read(name)
        assert code is not None
        library = JITLibraryBuilder().add_object_img(code).export_symbol(ENTRY)
        for symbol in C_LIBRARY:
            library.import_symbol(symbol, 8)
        library.link(create_lljit_compiler(suppress_errors=True), name)  # raises for any other symbol


def kept_names() -> list[str]:
    return [path.name for folder in code_store().folders if folder.is_dir() for path in folder.iterdir()]
