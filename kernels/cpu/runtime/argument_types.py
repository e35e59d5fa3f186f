"""The arguments of a kernel (arguments.py) as a numba type: an address with named fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_model

from quengine.kernels.cpu.ir.vector_ir import F32, F64, I64, Emitter
from quengine.kernels.cpu.runtime.arguments import ArgumentField, Arguments, fields_of

ArgumentsT = TypeVar("ArgumentsT", bound=Arguments)
_KINDS = {"q": (types.int64, I64), "f": (types.float32, F32), "d": (types.float64, F64)}


class ArgumentsType(types.Type):  # type: ignore[misc]
    """The address of arguments of one class."""

    def __init__(self, arguments: type[Arguments]) -> None:
        self.arguments = arguments
        super().__init__(name=f"{arguments.__module__}.{arguments.__qualname__}")


@register_model(ArgumentsType)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, I64)


def type_of(field: ArgumentField) -> Any:
    """The numba type of a field."""
    return _KINDS[field.kind][0] if isinstance(field.kind, str) else ArgumentsType(field.kind)


@infer_getattr
class _Fields(AttributeTemplate):  # type: ignore[misc]
    key = ArgumentsType

    def generic_resolve(self, kind: Any, name: str) -> Any:
        field = fields_of(kind.arguments).get(name)
        return None if field is None else type_of(field)


@lower_getattr_generic(ArgumentsType)  # type: ignore[untyped-decorator]
def _read(_context: Any, builder: ir.IRBuilder, kind: Any, address: ir.Value, name: str) -> ir.Value:
    e, field = Emitter(builder, has_half=False), fields_of(kind.arguments)[name]
    if isinstance(field.kind, str):
        return e.load(_KINDS[field.kind][1], address, field.offset)
    return e.at(address, field.offset)


@lower_setattr_generic(ArgumentsType)  # type: ignore[untyped-decorator]
def _write(_context: Any, builder: ir.IRBuilder, signature: Any, values: Any, name: str) -> None:
    address, value = values
    Emitter(builder, has_half=False).store(
        value, address, fields_of(signature.args[0].arguments)[name].offset
    )


def _first(_context: Any, _builder: ir.IRBuilder, _signature: Any, values: Any) -> ir.Value:
    return values[0]


def arguments_at(arguments: type[ArgumentsT]) -> Callable[[int], ArgumentsT]:
    """A function that, within kernels, casts an address to arguments of a class."""

    def cast(_typing: Any, address: Any) -> Any:  # noqa: ARG001 (numba reads the parameters of an intrinsic)
        return ArgumentsType(arguments)(types.int64), _first

    made: Callable[[int], ArgumentsT] = intrinsic(cast)
    return made


@intrinsic  # type: ignore[untyped-decorator]
def address_of(_typing: Any, arguments: Any) -> Any:
    """The address of a kernel's arguments."""

    return types.int64(arguments), _first
