"""How Triton's interpreter runs in tests: matrix products with one order of additions, and no work done over again.

The interpreter computes `tl.dot` by `numpy.matmul`, hence by the host's BLAS, which adds in an order that follows from
the processor and from the shape of the product: a row's bits may then depend on how many rows there are, which on a
GPU's matrix units they do not. Tests of bit-equality mean the kernels, so their products are added up here instead.

It also takes long for what is not arithmetic. It puts its own functions into `triton.language` at every launch and
every call of a function within a kernel, and takes them out again; computes each integer operation a second time, in 64
bits, for an assertion that only its debug option makes; makes the objects that describe a shape anew for every tensor;
works out the common type of two operands of one type, and the tensor of a constant, at every operation; checks shapes
that it has broadcast or expanded before; and reduces by a function one element at a time.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

from tests.kernels.cuda.interpreter_instructions import instructions
from tests.kernels.cuda.interpreter_operators import operators

_builder, _semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
_create_dot = interpreter.InterpreterBuilder.create_dot
_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_expand_dims, _cast, _check_bitwise = (
    _semantic.expand_dims,
    _semantic.cast,
    _semantic.bitwise_op_type_checking_impl,
)
_broadcast_impl_value, _init_block_type = _semantic.broadcast_impl_value, tl.block_type.__init__
_unwrap, constexpr = tl.core._unwrap_if_constexpr, tl.constexpr
_check_binary, _generic_reduce = _semantic.binary_op_type_checking_impl, interpreter.ReduceOps.generic_reduce
_to_tensor, _call = _semantic.to_tensor, interpreter.InterpretedFunction.__call__
_rewritten: dict[Any, Callable[..., Any]] = interpreter.InterpretedFunction.rewritten_fn
_patched = set[ModuleType]()
_np_dtypes: dict[str, np.dtype[Any]] = {}
_Sizes = tuple[tl.tuple, tl.constexpr]
_block_sizes: dict[int, tuple[tl.tuple, int, str, _Sizes]] = {}
"""Of shapes that are one object, which stays, by its id."""
_block_types: dict[tuple[int, str], tl.block_type] = {}
_broadcasts: dict[tuple[int, int], tl.block_type] = {}
_expanded: dict[tuple[int, int], tl.block_type] = {}
_constants: dict[tuple[object, ...], tl.tensor] = {}
_integers: dict[int, tl.tensor] = {}
MOST_CONSTANTS = 1024
_WHOLE = frozenset([tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str, type(None)])
"""Of what is no constant expression, nor may hold one."""
KEEP_THEIR_TYPE = frozenset(
    ["int1", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "fp32", "fp64"]
)
"""Types of which every binary operation on two tensors computes in that type, division too."""
_FLOATS = frozenset(["fp16", "fp32", "fp64"])
_INTEGERS = KEEP_THEIR_TYPE - _FLOATS
_AS_NUMPY = KEEP_THEIR_TYPE - {"int1"} | _FLOATS
"""Types that numpy converts integers to as the interpreter does."""


def _interpreted(name: str) -> Callable[..., Any]:
    """The interpreter's own method of `tl.tensor`."""
    return partial(getattr(tl.tensor, name).__wrapped__, _semantic=_semantic)


_OPERATORS = operators(_interpreted)


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the functions of this file in the place of the interpreter's."""
    for fn, numpy in instructions().items():
        monkeypatch.setitem(interpreter.InterpretedFunction.rewritten_fn, fn, numpy)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_language)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call_function)
    monkeypatch.setattr(_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False))
    monkeypatch.setattr(interpreter, "_get_np_dtype", get_np_dtype)
    monkeypatch.setattr(_semantic, "broadcast_impl_value", broadcast_impl_value)
    monkeypatch.setattr(_semantic, "bitwise_op_type_checking_impl", bitwise_op_type_checking_impl)
    monkeypatch.setattr(_semantic, "to_tensor", to_tensor)
    monkeypatch.setattr(_semantic, "cast", cast)
    monkeypatch.setattr(_semantic, "expand_dims", expand_dims)
    monkeypatch.setattr(_semantic, "binary_op_type_checking_impl", binary_op_type_checking_impl)
    monkeypatch.setattr(interpreter, "_patch_attr", patch_attr)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", generic_reduce)
    monkeypatch.setattr(interpreter.TensorHandle, "__init__", init_handle)
    monkeypatch.setattr(tl.core, "_unwrap_if_constexpr", unwrap_if_constexpr)
    monkeypatch.setattr(tl.tensor, "__init__", init_tensor)
    monkeypatch.setattr(tl.block_type, "__init__", init_block_type)
    monkeypatch.setattr(tl.block_type, "with_element_ty", with_element_ty)


def ordered_matmul(a: NDArray[Any], b: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """[..., M, K] times [..., K, N] in `dtype`; products are added pairwise, in an order that K alone decides."""
    columns, rows = np.moveaxis(a.astype(dtype), -1, 0), np.moveaxis(b.astype(dtype), -2, 0)
    terms = columns[..., :, None] * rows[..., None, :]
    count = len(terms)
    while count > 1:
        half = count // 2
        terms[:half] += terms[count - half : count]
        count -= half
    return terms[0]


def create_dot(builder: interpreter.InterpreterBuilder, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """Stands for `InterpreterBuilder.create_dot`. Integers are exact in any order, and 8-bit floats nowhere in use."""
    if not all(np.issubdtype(handle.data.dtype, np.floating) for handle in (a, b, d)):
        return _create_dot(builder, a, b, d, *precision)
    return interpreter.TensorHandle(ordered_matmul(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)


@cache
def patch_language(fn: Callable[..., Any]) -> Any:
    """Stands for `_patch_lang`. What it puts into the modules that `fn` sees stays there: nothing but the interpreter
    calls them in this process."""
    visible = {value for value in fn.__globals__.values() if value is tl or value is tl.core}
    if not visible <= _patched:
        _patch_lang(fn)
        _patched.update(visible)
    return interpreter._LangPatchScope()


def call_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for `InterpretedFunction.__call__`, which it asks for what is called the first time."""
    fn = _rewritten.get(function.fn)
    if fn is None:
        return _call(function, *args, **kwargs)
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def to_tensor(value: Any, check_type: bool = True) -> Any:
    """Stands for `TritonSemantic.to_tensor`, which is asked at every assignment."""
    if value.__class__ is tl.tensor:
        return value
    if value.__class__ is not int:
        return _to_tensor(value, check_type)
    known = _integers.get(value)
    if known is None:
        if len(_integers) >= MOST_CONSTANTS:
            _integers.clear()
        known = _integers[value] = _to_tensor(value, check_type)
        known.handle.data.flags.writeable = False
    return known


def get_np_dtype(tt_dtype: tl.dtype) -> np.dtype[Any]:
    """Stands for `_get_np_dtype`, which makes its table at every call."""
    scalar = tt_dtype.scalar
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _get_np_dtype(scalar)
    return _np_dtypes[scalar.name]


def broadcast_impl_value(lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Stands for `TritonSemantic.broadcast_impl_value`. Equal shapes are one object: `init_tensor` sees to it."""
    left, right = lhs.shape, rhs.shape
    if left is right:
        return lhs, rhs
    if len(lhs.handle.data.shape) == len(rhs.handle.data.shape) and left is not _SCALAR[0] is not right:
        block = _broadcast_block(left, right, lhs.handle.data.shape, rhs.handle.data.shape)
        return (
            lhs if block.shape == lhs.type.shape else _filled(lhs, block),
            rhs if block.shape == rhs.type.shape else _filled(rhs, block),
        )
    if right is _SCALAR[0] and rhs.handle.dtype.__class__ is not tl.block_type:
        return lhs, _filled(rhs, lhs.type)
    if left is _SCALAR[0] and lhs.handle.dtype.__class__ is not tl.block_type:
        return _filled(lhs, rhs.type), rhs
    return _broadcast_impl_value(lhs, rhs)  # type: ignore[no-any-return]


def _filled(value: tl.tensor, block: tl.block_type) -> tl.tensor:
    """A tensor of the block's shape with the values of one that is a scalar, or whose sizes are its or 1."""
    handle = value.handle
    # A comparison's handle names the type of what was compared, which a scalar's values then take.
    dtype = get_np_dtype(handle.dtype) if value.shape is _SCALAR[0] else handle.data.dtype
    data = np.empty(tuple(block.shape), dtype)
    data[...] = handle.data
    return tl.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), block.with_element_ty(value.dtype))


def _broadcast_block(
    left: tl.tuple, right: tl.tuple, lhs: tuple[int, ...], rhs: tuple[int, ...]
) -> tl.block_type:
    """A type, of any elements, of what two shapes are broadcast to."""
    key = id(left), id(right)
    block = _broadcasts.get(key)
    if block is None:
        block = _broadcasts[key] = tl.block_type(tl.int32, list(np.broadcast_shapes(lhs, rhs)))
    return block


def expand_dims(value: tl.tensor, axis: int) -> tl.tensor:
    """Stands for `TritonSemantic.expand_dims`."""
    if value.shape is _SCALAR[0]:
        return _expand_dims(value, axis)
    key = id(value.shape), axis
    block = _expanded.get(key)
    if block is None:
        sizes = list(value.handle.data.shape)
        sizes.insert(axis, 1)
        block = _expanded[key] = tl.block_type(tl.int32, sizes)
    handle = value.handle
    data = handle.data.reshape(tuple(block.shape))
    return tl.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), block.with_element_ty(value.dtype))


def binary_op_type_checking_impl(
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[tl.tensor, tl.tensor]:
    """Stands for `TritonSemantic.binary_op_type_checking_impl`, which it asks where the operands' types differ."""
    flags = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    if lhs.__class__ is not tl.tensor:
        return _check_binary(lhs, rhs, *flags)
    kind = lhs.dtype.name
    if rhs.__class__ is tl.tensor:
        same = kind == rhs.dtype.name and kind in KEEP_THEIR_TYPE
        if same or (allow_lhs_ptr and lhs.dtype.is_ptr() and rhs.dtype.is_int()):
            return _semantic.broadcast_impl_value(lhs, rhs)
    elif rhs.__class__ in (int, float) and rhs == rhs and kind in KEEP_THEIR_TYPE:
        return _with_constant(lhs, rhs, flags)
    return _check_binary(lhs, rhs, *flags)


def bitwise_op_type_checking_impl(lhs: Any, rhs: Any) -> tuple[tl.tensor, tl.tensor]:
    """Stands for `TritonSemantic.bitwise_op_type_checking_impl`, which it asks where the operands' types differ."""
    if lhs.__class__ is tl.tensor and rhs.__class__ is tl.tensor:
        kind = lhs.dtype.name
        if kind == rhs.dtype.name and kind in _INTEGERS:
            return _semantic.broadcast_impl_value(lhs, rhs)
    return _check_bitwise(lhs, rhs)  # type: ignore[no-any-return]


def cast(value: tl.tensor, dst_ty: tl.dtype, fp_downcast_rounding: str | None = None) -> tl.tensor:
    """Stands for `TritonSemantic.cast`, which it asks for all but what numpy converts alike."""
    source, target = value.dtype.name, dst_ty.scalar
    plain = (source in _INTEGERS and target.name in _AS_NUMPY) or (
        source in _FLOATS and target.name in _FLOATS
    )
    if not plain or fp_downcast_rounding is not None or value.handle.dtype.name == "bf16":
        return _cast(value, dst_ty, fp_downcast_rounding)
    if source == target.name:
        return value
    handle = interpreter.TensorHandle(value.handle.data.astype(get_np_dtype(target)), target)
    return tl.tensor(handle, value.type.with_element_ty(target) if value.type.is_block() else target)


def _with_constant(lhs: tl.tensor, value: float, flags: tuple[bool, ...]) -> tuple[tl.tensor, tl.tensor]:
    """The tensor, and that of a number: the same one for the same number, type and shape."""
    key = value.__class__, value, lhs.dtype.name, id(lhs.shape), flags
    known = _constants.get(key)
    if known is not None:
        return lhs, known
    left, right = _check_binary(lhs, value, *flags)
    if left is lhs:
        if len(_constants) >= MOST_CONSTANTS:
            _constants.clear()
        right.handle.data.flags.writeable = False
        _constants[key] = right
    return left, right


def patch_attr(obj: Any, name: str, member: Callable[..., Any], _builder: Any, scope: Any) -> None:
    """Stands for `_patch_attr`, without the check that the argument which it adds is there."""
    if obj is tl.tensor and name in _OPERATORS:
        scope.set_attr(obj, name, _OPERATORS[name])
        return
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

    scope.set_attr(obj, name, call)


def generic_reduce(reduction: interpreter.ReduceOps, given: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Stands for `ReduceOps.generic_reduce`: neighbours are combined, all pairs of them at once."""
    axis, shape = reduction.axis, given[0].handle.data.shape
    if axis is None or shape[axis] & (shape[axis] - 1):
        return _generic_reduce(reduction, given)  # type: ignore[no-any-return]
    parts = list(given)
    while (count := parts[0].handle.data.shape[axis]) > 1:
        first, second = (
            [
                reduction.to_tensor(part.handle.data.take(range(start, count, 2), axis), part.dtype)
                for part in parts
            ]
            for start in (0, 1)
        )
        combined = reduction.combine_fn.fn(*first, *second)
        parts = list(combined) if isinstance(combined, (tuple, tl.tuple)) else [combined]
    rows = (part.handle.data if reduction.keep_dims else part.handle.data.take(0, axis) for part in parts)
    return [reduction.to_tensor(row, part.dtype) for row, part in zip(rows, given, strict=True)]


def unwrap_if_constexpr(given: Any) -> Any:
    """Stands for `_unwrap_if_constexpr`, which looks for lists and tuples first."""
    kind = given.__class__
    if kind is constexpr:
        return given.value
    return given if kind in _WHOLE else _unwrap(given)


def init_handle(handle: Any, data: NDArray[Any], dtype: tl.dtype, attr: dict[str, Any] | None = None) -> None:
    """Stands for `TensorHandle.__init__`, without its check."""
    handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr


def init_tensor(tensor: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """Stands for `tensor.__init__`."""
    tensor.handle, tensor.type = handle, type
    if type.__class__ is tl.block_type:
        tensor.dtype = type.element_ty
        tensor.shape, tensor.numel = type.sizes
    else:
        tensor.dtype = type.scalar
        tensor.shape, tensor.numel = _SCALAR


def init_block_type(block: tl.block_type, element_ty: tl.dtype, shape: Iterable[int | tl.constexpr]) -> None:
    """Stands for `block_type.__init__`."""
    known = _block_sizes.get(id(shape))
    if known is None:
        known = _block_shape(tuple([each.value if each.__class__ is constexpr else each for each in shape]))
    block.element_ty = element_ty
    block.shape, block.numel, text, block.sizes = known
    block.name = f"<{text}, {element_ty}>"


def with_element_ty(block: tl.block_type, scalar_ty: tl.dtype) -> tl.block_type:
    """Stands for `block_type.with_element_ty`."""
    if scalar_ty.__class__ is not tl.dtype:  # names of pointers do not say all
        return tl.block_type(scalar_ty, block.shape)
    key = id(block.shape), scalar_ty.name
    if key not in _block_types:
        _block_types[key] = tl.block_type(scalar_ty, block.shape)
    return _block_types[key]


def _tensor_shape(sizes: tuple[int, ...]) -> _Sizes:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


_SCALAR = _tensor_shape(())


@cache
def _block_shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, int, str, _Sizes]:
    block = tl.block_type.__new__(tl.block_type)
    _init_block_type(block, tl.int32, list(sizes))
    made = block.shape, block.numel, str(block.shape), _tensor_shape(sizes)
    _block_sizes[id(block.shape)] = made
    return made
