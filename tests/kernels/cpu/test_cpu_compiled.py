"""Compilation of the CPU kernels into object code that needs neither Python nor numba."""

import ctypes
from dataclasses import dataclass
from functools import partial

import numpy as np
from llvmlite.binding.orcjit import JITLibraryBuilder, create_lljit_compiler
from numba import types

from quengine.kernels.cpu.ir.row_ir import store_f32
from quengine.kernels.cpu.runtime import kernel_table
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32, Fp64, size_of
from quengine.kernels.cpu.runtime.code_store import code_store
from quengine.kernels.cpu.runtime.compiled import compile_function, compile_kernel
from quengine.kernels.cpu.runtime.machine_code import ENTRY, link

# Functions of the C library, which any process has.
C_LIBRARY = ("usleep", "sched_yield", "memset", "memcpy")


SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


@dataclass
class Nested(Arguments):
    out: int
    offset: Fp64


@dataclass
class TaskArguments(Arguments):
    scale: Fp32
    more: Nested
    offset: Fp64


def test_a_kernel_has_the_signature_of_all_kernels() -> None:
    def write_task(args: TaskArguments, task: int) -> None:
        store_f32(args.scale * task + args.more.offset, args.more.out + 4 * task)
        args.more.offset = args.offset

    out = np.zeros(3, np.float32)
    arguments = TaskArguments(2.5, Nested(out.ctypes.data, -1.25), 0.5)
    memory = np.frombuffer(bytearray(arguments.to_bytes()), np.int64)
    assert size_of(TaskArguments) == len(arguments.to_bytes()) == 32
    kernel = SIGNATURE(link(compile_kernel(write_task, TaskArguments)))
    kernel(memory.ctypes.data, 2)
    kernel(memory.ctypes.data, 1)
    assert out.tolist() == [0.0, 3.0, 3.75]


def test_a_function_returns_its_result() -> None:
    code = compile_function(lambda a, b, c: a * b + c, types.int64, 3)
    assert ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(link(code))(-7, 6, 2) == -40


def test_kernels_refer_to_the_c_library_alone() -> None:
    # A division and a choice of two, for which numba has exceptions and functions of its own, are in these.
    for function in (
        kernel_table.lead_function,
        kernel_table.watch_function,
        kernel_table.chain_kernel,
        kernel_table.combine_kernel,
        kernel_table.tile_matmul_kernel,
        partial(kernel_table.combine_kernel, True),
        kernel_table.block_kernel,
        kernel_table.sums_kernel,
    ):
        function()
        with kernel_table.only_named() as names:
            function()
        name = kernel_table.file_name(names[0])
        code = code_store().read(name)
        assert code is not None
        library = JITLibraryBuilder().add_object_img(code).export_symbol(ENTRY)
        for symbol in C_LIBRARY:
            library.import_symbol(symbol, 8)
        library.link(create_lljit_compiler(suppress_errors=True), name)  # raises for any other symbol
