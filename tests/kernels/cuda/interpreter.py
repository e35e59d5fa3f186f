"""How Triton's interpreter runs in tests: matrix products with one order of additions, and no work done over again.

The interpreter computes `tl.dot` by `numpy.matmul`, hence by the host's BLAS, which adds in an order that follows from
the processor and from the shape of the product: a row's bits may then depend on how many rows there are, which on a
GPU's matrix units they do not. Tests of bit-equality mean the kernels, so their products are added up here instead.

It also takes long for what is not arithmetic. It puts its own functions into `triton.language` at every call of a
function within a kernel, though the launch has done so; computes each integer operation a second time, in 64 bits, for
an assertion that only its debug option makes; and makes the objects that describe a shape anew for every tensor.
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

_builder, _semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
_create_dot = interpreter.InterpreterBuilder.create_dot
_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_broadcast_impl_value, _init_block_type = _semantic.broadcast_impl_value, tl.block_type.__init__
_np_dtypes: dict[str, np.dtype[Any]] = {}


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the functions of this file in the place of the interpreter's."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter, "_patch_lang", _Language().patch)
    monkeypatch.setattr(_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False))
    monkeypatch.setattr(interpreter, "_get_np_dtype", get_np_dtype)
    monkeypatch.setattr(_semantic, "broadcast_impl_value", broadcast_impl_value)
    monkeypatch.setattr(tl.tensor, "__init__", init_tensor)
    monkeypatch.setattr(tl.block_type, "__init__", init_block_type)


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


class _Language:
    """What the launch under way has put into `triton.language`, which is put back when the launch ends."""

    def __init__(self) -> None:
        self._scope: Any = None
        self._patched: set[ModuleType] = set()

    def patch(self, fn: Callable[..., Any]) -> Any:
        """Stands for `_patch_lang`: patches the modules that `fn` sees, those that the launch has patched excepted."""
        visible = _visible_modules(fn)
        if self._scope is None:
            self._scope = scope = _patch_lang(fn)
            scope.restore = partial(self._restore, scope.restore)
        elif not visible <= self._patched:
            self._scope._changes += _patch_lang(fn)._changes
        self._patched |= visible
        return self._scope

    def _restore(self, restore: Callable[[], None]) -> None:
        self._scope = None
        self._patched.clear()
        restore()


@cache
def _visible_modules(fn: Callable[..., Any]) -> frozenset[ModuleType]:
    return frozenset(value for value in fn.__globals__.values() if value is tl or value is tl.core)


def get_np_dtype(tt_dtype: tl.dtype) -> np.dtype[Any]:
    """Stands for `_get_np_dtype`, which makes its table at every call."""
    scalar = tt_dtype.scalar
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _get_np_dtype(scalar)
    return _np_dtypes[scalar.name]


def broadcast_impl_value(lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Stands for `TritonSemantic.broadcast_impl_value`. Equal shapes are one object: `init_tensor` sees to it."""
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast_impl_value(lhs, rhs)


def init_tensor(tensor: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """Stands for `tensor.__init__`."""
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.shape, tensor.numel = _tensor_shape(tuple(type.shape) if type.is_block() else ())


def init_block_type(block: tl.block_type, element_ty: tl.dtype, shape: Iterable[int | tl.constexpr]) -> None:
    """Stands for `block_type.__init__`."""
    block.element_ty = element_ty
    block.shape, block.numel, text = _block_shape(tuple(tl.core._unwrap_if_constexpr(size) for size in shape))
    block.name = f"<{text}, {element_ty}>"


@cache
def _tensor_shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


@cache
def _block_shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, int, str]:
    block = tl.block_type.__new__(tl.block_type)
    _init_block_type(block, tl.int32, list(sizes))
    return block.shape, block.numel, str(block.shape)
