"""Operators of Triton's interpreter on operands of one type: numpy computes them at once, and broadcasts as it goes.

The interpreter looks at both operands, finds their common type and shape, and fills both to that shape, in ten calls
for an addition. An operator here does what is left where the types are the same, or the other operand is a number that
its type takes; for all else it calls the interpreter's.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

_tensor, _constexpr, _Handle = tl.tensor, tl.constexpr, interpreter.TensorHandle
Operator = Callable[..., Any]
"""Of a tensor and the other operand, which may be a number or a constant expression."""
_Compute = Callable[[Any, Any], NDArray[Any]]

_FLOATS = frozenset(["fp32", "fp64"])
_RANGES = {
    f"{sign}int{bits}": (0 if sign else -(1 << bits - 1), (1 << bits if sign else 1 << bits - 1) - 1)
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
"""Of the integers' types: the smallest and the largest number."""
_NUMBERS, _BITS = frozenset([*_FLOATS, *_RANGES]), frozenset(["int1", *_RANGES])


def _c_remainder(left: Any, right: Any) -> NDArray[Any]:
    remainder: NDArray[Any] = np.fmod(left, right)
    return remainder


def _c_quotient(left: Any, right: Any) -> NDArray[Any]:
    quotient: NDArray[Any] = (left - np.fmod(left, right)) // right
    return quotient


# Name -> what computes it, the types that it takes, whether it is a comparison.
_KINDS: dict[str, tuple[_Compute, frozenset[str], bool]] = {
    "add": (np.add, _NUMBERS, False),
    "sub": (np.subtract, _NUMBERS, False),
    "mul": (np.multiply, _NUMBERS, False),
    "truediv": (np.divide, _FLOATS, False),
    "floordiv": (_c_quotient, frozenset(_RANGES), False),
    "mod": (_c_remainder, _NUMBERS, False),
    "and": (np.bitwise_and, _BITS, False),
    "or": (np.bitwise_or, _BITS, False),
    "xor": (np.bitwise_xor, _BITS, False),
    "lshift": (np.left_shift, frozenset(_RANGES), False),
    "rshift": (np.right_shift, frozenset(_RANGES), False),
    "lt": (np.less, _NUMBERS, True),
    "le": (np.less_equal, _NUMBERS, True),
    "gt": (np.greater, _NUMBERS, True),
    "ge": (np.greater_equal, _NUMBERS, True),
    "eq": (np.equal, _NUMBERS, True),
    "ne": (np.not_equal, _NUMBERS, True),
}
_SHIFTS = frozenset(["lshift", "rshift"])
_WIDENED = {("int32", "int64"): tl.int64, ("int64", "int32"): tl.int64}
"""The types of two operands that differ -> the one that both take."""


def operators(interpreted: Callable[[str], Operator]) -> dict[str, Operator]:
    """Methods of `tl.tensor` by name. interpreted: the interpreter's method of that name."""
    made = {}
    for kind, (compute, types, compares) in _KINDS.items():
        name = f"__{kind}__"
        made[name] = _operator(compute, types, compares, kind in _SHIFTS, interpreted(name))
        if not compares and kind not in _SHIFTS:
            name = f"__r{kind}__"
            made[name] = _reflected(compute, types, interpreted(name))
    made["__add__"] = _pointer_sum(made["__add__"])
    made["__getitem__"] = _index(interpreted("__getitem__"))
    return made


def _operator(
    compute: _Compute, types: frozenset[str], compares: bool, shifts: bool, otherwise: Operator
) -> Operator:
    def call(left: tl.tensor, right: Any, _semantic: Any = None) -> Any:
        kind = left.dtype.name
        if kind not in types:
            return otherwise(left, right)
        if right.__class__ is _tensor:
            if right.dtype.name != kind:
                wide = None if shifts else _WIDENED.get((kind, right.dtype.name))
                return otherwise(left, right) if wide is None else call(_cast(left, wide), _cast(right, wide))
            type_ = left.type if left.shape is right.shape else _common(left, right)
            operand = right.handle.data
        else:
            operand = right.value if right.__class__ is _constexpr else right
            if not _takes(kind, operand) or (shifts and not 0 <= operand < 8 * left.handle.data.itemsize):
                return otherwise(left, right)
            type_ = left.type
        if type_ is None:
            return otherwise(left, right)
        return _made(compute(left.handle.data, operand), left.handle.dtype.scalar, type_, compares)

    return call


def _reflected(compute: _Compute, types: frozenset[str], otherwise: Operator) -> Operator:
    """With the number at the left; a tensor there has an operator of its own."""

    def call(right: tl.tensor, left: Any, _semantic: Any = None) -> Any:
        kind = right.dtype.name
        number = left.value if left.__class__ is _constexpr else left
        if kind not in types or not _takes(kind, number):
            return otherwise(right, left)
        return _made(compute(number, right.handle.data), right.handle.dtype.scalar, right.type, False)

    return call


def _takes(kind: str, number: Any) -> bool:
    """Whether a number beside a tensor of the type is one of that type."""
    if number.__class__ is int:
        if kind in _FLOATS:
            return True
        low, high = _RANGES.get(kind, (1, 0))
        return low <= number <= high  # type: ignore[no-any-return]
    return number.__class__ is float and kind in _FLOATS and number == number


def _made(data: NDArray[Any], kind: tl.dtype, type_: tl.dtype, compares: bool) -> tl.tensor:
    """A comparison's handle keeps the type of what was compared, as the interpreter's does."""
    if compares:
        type_ = type_.with_element_ty(tl.int1) if type_.is_block() else tl.int1
    return _tensor(_Handle(data, kind), type_)


def _cast(value: tl.tensor, kind: tl.dtype) -> tl.tensor:
    return interpreter.interpreter_semantic.cast(value, kind)


def _common(left: tl.tensor, right: tl.tensor) -> tl.dtype | None:
    """The type of what numpy makes of two shapes; None where the interpreter has to say."""
    if not left.type.is_block():
        return right.type.with_element_ty(left.dtype) if right.type.is_block() else None
    if not right.type.is_block():
        return left.type
    a, b = left.handle.data.shape, right.handle.data.shape
    return _common_block(a, b, left.dtype) if len(a) == len(b) else None


@cache
def _common_block(a: tuple[int, ...], b: tuple[int, ...], kind: tl.dtype) -> tl.dtype | None:
    try:
        return tl.block_type(kind, list(np.broadcast_shapes(a, b)))
    except ValueError:
        return None


def _pointer_sum(numbers: Operator) -> Operator:
    """Pointers and offsets in elements; `numbers` adds all else."""

    def call(left: tl.tensor, right: Any, _semantic: Any = None) -> Any:
        pointer = left.dtype
        if pointer.__class__ is not tl.pointer_type or left.handle.dtype.__class__ is not tl.pointer_type:
            return numbers(left, right)
        if right.__class__ is not _tensor:
            number = right.value if right.__class__ is _constexpr else right
            if number.__class__ is not int:
                return numbers(left, right)
            offset = np.uint64(number * _bytes_of(pointer) & (1 << 64) - 1)
            return _tensor(_Handle(left.handle.data + offset, left.handle.dtype), left.type)
        if right.dtype.name not in ("int32", "int64"):
            return numbers(left, right)
        if left.shape is right.shape:
            type_ = left.type
        else:
            shape = _common_shape(left, right)
            if shape is None:
                return numbers(left, right)
            type_ = (
                left.type if left.type.is_block() and left.type.shape is shape else _pointers(pointer, shape)
            )
        data = left.handle.data + right.handle.data.astype(np.uint64) * np.uint64(_bytes_of(pointer))
        return _tensor(_Handle(data, left.handle.dtype), type_)

    return call


def _bytes_of(pointer: tl.pointer_type) -> int:
    """Of what it points to."""
    return max(1, pointer.element_ty.primitive_bitwidth // 8)


def _common_shape(left: tl.tensor, right: tl.tensor) -> Any:
    if not left.type.is_block():
        return right.type.shape if right.type.is_block() else None
    if not right.type.is_block():
        return left.type.shape
    a, b = left.handle.data.shape, right.handle.data.shape
    block = _common_block(a, b, tl.int32) if len(a) == len(b) else None
    return None if block is None else block.shape


_pointer_blocks: dict[tuple[object, ...], tl.block_type] = {}


def _pointers(pointer: tl.pointer_type, shape: Any) -> tl.block_type:
    """The type of pointers of a shape that is one object, which stays."""
    key = pointer.name, pointer.address_space, id(shape)
    block = _pointer_blocks.get(key)
    if block is None:
        block = _pointer_blocks[key] = tl.block_type(pointer, shape)
    return block


_ALL = slice(None)


def _index(otherwise: Operator) -> Operator:
    """[:, None], [None, :] and the like with one new axis."""

    def call(value: tl.tensor, slices: Any, _semantic: Any = None) -> Any:
        if slices.__class__ is tuple and slices.count(None) == 1 and slices.count(_ALL) == len(slices) - 1:
            return interpreter.interpreter_semantic.expand_dims(value, slices.index(None))
        return otherwise(value, slices)

    return call
