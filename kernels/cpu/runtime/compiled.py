"""Compiles the CPU kernels with numba, to object code.

A kernel is a function `kernel(arguments, task)`: the address of its arguments (arguments.py), and the index of a task.
As all kernels have this signature, the thread team (threads.py) is compiled once, and a step can be a list of kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.compiler import Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from quengine.kernels.cpu.runtime.argument_types import ArgumentsType
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.machine_code import ENTRY


def compile_kernel(function: Callable[..., None], arguments: type[Arguments]) -> bytes:
    """The object code of function(arguments, task), whose arguments lie at an address."""
    code: bytes = _object_code(_lowered(function, types.void, (ArgumentsType(arguments), types.int64)))
    return code


def compile_function(function: Callable[..., Any], result: Any, parameters: int) -> bytes:
    """Compiles a function of int64 parameters to object code, whose symbol ENTRY has C's calling convention.

    result: a numba type. The code references neither Python nor numba, so any process of this machine can link it.
    """
    code: bytes = _object_code(_lowered(function, result, (types.int64,) * parameters))
    return code


@global_compiler_lock
def _lowered(function: Callable[..., Any], result: Any, parameters: tuple[Any, ...]) -> Any:
    """The numba code library of a function and its entry, before optimization."""
    flags = Flags()
    # numba's own wrappers report exceptions to Python; only ENTRY is needed.
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    compiled = compile_extra(
        cpu_target.typing_context,
        cpu_target.target_context,
        function,
        parameters,
        result,
        flags,
        {},
    )
    _add_entry(compiled.library, compiled.fndesc)
    return compiled.library


def _add_entry(library: Any, function: Any) -> None:
    """Adds ENTRY, which calls the function by numba's convention. Kernels do not raise; one that did would trap."""
    context = cpu_target.target_context
    module = library.create_ir_module("entry")
    convention = context.call_conv
    callee = ir.Function(
        module, convention.get_function_type(function.restype, function.argtypes), function.llvm_func_name
    )
    arguments = [context.get_value_type(kind) for kind in function.argtypes]
    nothing = function.restype == types.void
    returned = ir.VoidType() if nothing else context.get_value_type(function.restype)
    entry = ir.Function(module, ir.FunctionType(returned, arguments), ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block())
    status, value = convention.call_function(
        builder, callee, function.restype, function.argtypes, entry.args, attrs=("noinline",)
    )
    with builder.if_then(status.is_error, likely=False):
        builder.call(module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), [])), [])
    if nothing:
        builder.ret_void()
    else:
        builder.ret(value)
    library.add_ir_module(module)


@global_compiler_lock
def _object_code(library: Any) -> bytes:
    library.enable_object_caching()  # numba's name for keeping the object file
    library.finalize()
    code: bytes = library._get_compiled_object()
    return code
