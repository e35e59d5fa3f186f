"""Matrix products of Triton's interpreter with one order of additions, whatever the machine.

The interpreter computes `tl.dot` by `numpy.matmul`, hence by the host's BLAS, which adds in an order that follows from
the processor and from the shape of the product: a row's bits may then depend on how many rows there are, which on a
GPU's matrix units they do not. Tests of bit-equality mean the kernels, so their products are added up here instead.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_dot = InterpreterBuilder.create_dot


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


def create_dot(builder: InterpreterBuilder, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """Stands for `InterpreterBuilder.create_dot`. Integers are exact in any order, and 8-bit floats nowhere in use."""
    if not all(np.issubdtype(handle.data.dtype, np.floating) for handle in (a, b, d)):
        return _create_dot(builder, a, b, d, *precision)
    return TensorHandle(ordered_matmul(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)
