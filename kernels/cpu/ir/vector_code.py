"""Turns functions that emit LLVM instructions into numba intrinsics for kernels to call."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quengine.kernels.cpu.ir.vector_ir import Emitter
from quengine.kernels.cpu.runtime.argument_types import ArgumentsType
from quengine.kernels.cpu.runtime.target import host_tile


def emitter(context: Any, builder: ir.IRBuilder) -> Emitter:
    triple, _, features = context.codegen().magic_tuple()
    has_half = "+f16c" in features or triple.startswith(("aarch64", "arm64"))
    return Emitter(builder, has_half, host_tile().byte_dot_lanes)


def vector_code(function: Callable[..., Any] | None = None, *, result: Any = types.void, **kinds: Any) -> Any:
    """Makes `function(e, ...)`, which emits instructions and returns their result, callable from kernels, without e.

    Parameters annotated `str` or `int` are compile-time constants. All others are int64, or the numba types given by
    name in `kinds`; a kernel's arguments may be passed where an address is expected.
    """
    if function is None:
        return lambda named: vector_code(named, result=result, **kinds)
    emit, parameters = function, list(signature(function).parameters.values())[1:]
    constant = [parameter.annotation in ("str", "int") for parameter in parameters]

    def kind_of(given: Any, name: str, is_constant: bool) -> Any:
        if is_constant or isinstance(given, ArgumentsType):
            return given
        return kinds.get(name, types.int64)

    def typed(_typing: Any, *given: Any) -> Any:
        if not all(isinstance(kind, types.Literal) for kind, is_ in zip(given, constant, strict=True) if is_):
            return None  # numba tries again with literal types
        named = zip(given, parameters, constant, strict=True)
        chosen = result(*[kind_of(kind, parameter.name, is_) for kind, parameter, is_ in named])

        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
            arguments = [
                kind.literal_value if is_ else value
                for kind, value, is_ in zip(given, values, constant, strict=True)
            ]
            emitted = emit(emitter(context, builder), *arguments)
            if chosen.return_type == types.void:
                return context.get_dummy_value()
            if isinstance(emitted, tuple):
                return context.make_tuple(builder, chosen.return_type, emitted)
            return emitted

        return chosen, codegen

    typed.__name__ = emit.__name__
    own = signature(typed)
    typed.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[next(iter(own.parameters.values())), *parameters]
    )
    return intrinsic(prefer_literal=True)(typed)
