"""Compilation of the CPU kernels by numba, into object code.

A kernel is a function `kernel(arguments, task)`: the address of its arguments (arguments.py), and which part of the
work to do. As all kernels have this one signature, the thread team (threads.py) is compiled once, and a
step can be a list of kernels.
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
    """A kernel as object code: function(arguments, task), whose arguments are at an address."""
    code: bytes = _object_code(_lowered(function, types.void, (ArgumentsType(arguments), types.int64)))
    return code


def compile_function(function: Callable[..., Any], result: Any, parameters: int) -> bytes:
    """A function of int64 parameters as object code, whose symbol ENTRY has C's calling convention.

    result: a numba type. The code refers to nothing of Python or numba, so any process of this machine can link it.
    """
    code: bytes = _object_code(_lowered(function, result, (types.int64,) * parameters))
    return code


@global_compiler_lock
def _lowered(function: Callable[..., Any], result: Any, parameters: tuple[Any, ...]) -> Any:
    """The code library of a function, with its entry, before optimization."""
    flags = Flags()
    # numba's own entries report exceptions to Python; ours is all that is wanted.
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
    """ENTRY, which calls the function as numba calls them. No kernel raises; if one did, the process would end."""
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
    library.enable_object_caching()  # numba's term for: let me have the object file
    library.finalize()
    code: bytes = library._get_compiled_object()
    return code
