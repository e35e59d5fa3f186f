"""The machine instructions of the matmul kernels (`kernels/cuda/gemm/mma.py`) as numpy computes them.

Their equivalents in plain Triton take the interpreter a hundred operations each, and most of the time of a matmul. The
bits are the same, additions in the same order: test_mma_instructions.py compares them.
"""

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

from quengine.kernels.cuda.gemm import mma

Array = NDArray[Any]
Words = tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]


def instructions() -> dict[Any, Any]:
    """The function in Triton -> what stands for it."""
    made = {
        mma.mma_int8: mma_int8,
        mma.mma_half: mma_half,
        mma.mma_half_step: mma_half_step,
        mma.byte_permute: byte_permute,
        mma.scale_bytes: scale_bytes,
        mma.scale_bytes_once: scale_bytes_once,
    }
    return {triton.fn: numpy for triton, numpy in made.items()}


def _made(data: Array, kind: tl.dtype, like: tl.tensor) -> tl.tensor:
    """A tensor of the shape of another one."""
    type_ = like.type.with_element_ty(kind) if like.type.is_block() else kind
    return tl.tensor(interpreter.TensorHandle(data, kind), type_)


def _words(*words: tl.tensor) -> Array:
    """[threads, words], contiguous."""
    return np.stack([word.handle.data for word in words], axis=1)


def _spread(product: Array, d: Words, kind: tl.dtype, like: tl.tensor) -> Words:
    """d + a product [warp, row, column] of 16 x 8 in every warp, over the lanes as by the instruction."""
    of_lanes = product.reshape(-1, 2, 8, 4, 2)
    parts = (
        (d[2 * half + column].handle.data + of_lanes[:, half, :, :, column].reshape(-1))
        for half in range(2)
        for column in range(2)
    )
    d0, d1, d2, d3 = (_made(part, kind, like) for part in parts)
    return d0, d1, d2, d3


def mma_int8(
    a: Words, b0: tl.tensor, b1: tl.tensor, d: Words, A_SIGNED: Any, B_SIGNED: Any, ASM: Any
) -> Words:
    del ASM
    rows = _words(a[0], a[2], a[1], a[3]).view(_byte_type(A_SIGNED)).astype(np.int32)
    rows = rows.reshape(-1, 8, 4, 2, 8).transpose(0, 3, 1, 2, 4).reshape(-1, 16, 32)
    columns = _words(b0, b1).view(_byte_type(B_SIGNED)).astype(np.int32).reshape(-1, 8, 32)
    return _spread(rows @ columns.transpose(0, 2, 1), d, tl.int32, b0)


def _byte_type(signed: Any) -> type[np.integer[Any]]:
    return np.int8 if tl.core._unwrap_if_constexpr(signed) else np.uint8


def _half_product(a: Any, b0: Array, b1: Array) -> Array:
    rows = np.stack([a[i].handle.data for i in (0, 2, 1, 3)], axis=1).view(np.float16).astype(np.float32)
    rows = rows.reshape(-1, 8, 4, 2, 4).transpose(0, 3, 1, 2, 4).reshape(-1, 16, 1, 16)
    columns = np.stack([b0, b1], axis=1).view(np.float16).astype(np.float32).reshape(-1, 1, 8, 16)
    return np.asarray((rows * columns).sum(axis=3))


def mma_half(a: Words, b0: tl.tensor, b1: tl.tensor, d: Words, ASM: Any) -> Words:
    del ASM
    return _spread(_half_product(a, b0.handle.data, b1.handle.data), d, tl.float32, b0)


def mma_half_step(
    first: Words, last: Words, x_first: tl.tensor, x_last: tl.tensor, d: Words, ASM: Any
) -> Words:
    del ASM
    for a, x in ((first, x_first), (last, x_last)):
        halves = np.ascontiguousarray(x.handle.data).view(np.int32).reshape(-1, 2)
        d = _spread(_half_product(a, halves[:, 0], halves[:, 1]), d, tl.float32, a[0])
    return d


def byte_permute(x: tl.tensor, y: tl.tensor, selector: tl.tensor, ASM: Any) -> tl.tensor:
    del ASM
    first, second, select = np.broadcast_arrays(x.handle.data, y.handle.data, selector.handle.data)
    pair = np.stack([first, second], axis=-1).view(np.uint8)  # [..., 8]
    nibbles = (select[..., None] >> np.array([0, 4, 8, 12], np.int32)) & 15
    picked = np.take_along_axis(pair, nibbles & 7, axis=-1)
    chosen = np.where(nibbles < 8, picked, np.where(picked & 128, 255, 0)).astype(np.uint8)
    like = next(each for each in (selector, x, y) if each.handle.data.shape == select.shape)
    return _made(chosen.view(np.int32)[..., 0], tl.int32, like)


def _data(value: Any, kind: Any = np.float32) -> Array:
    value = tl.core._unwrap_if_constexpr(value)
    return np.asarray(value.handle.data if isinstance(value, tl.tensor) else value, kind)


def _scaled(word: tl.tensor, scale: Array, minimum: Array, signed: Any) -> tuple[tl.tensor, tl.tensor]:
    values = np.ascontiguousarray(word.handle.data)[..., None].view(_byte_type(signed)).astype(np.float32)
    halves = (values * scale[..., None] - minimum[..., None]).astype(np.float16)
    packed = np.ascontiguousarray(halves).view(np.int32)
    return _made(packed[..., 0], tl.int32, word), _made(packed[..., 1], tl.int32, word)


def scale_bytes(
    word: tl.tensor, scale: Any, minimum: Any, SIGNED: Any, ASM: Any
) -> tuple[tl.tensor, tl.tensor]:
    del ASM
    rounded = (_data(each).astype(np.float16).astype(np.float32) for each in (scale, minimum))
    return _scaled(word, *rounded, SIGNED)


def scale_bytes_once(
    word: tl.tensor, scale: Any, minimum: Any, SIGNED: Any, ASM: Any
) -> tuple[tl.tensor, tl.tensor]:
    del ASM
    return _scaled(word, _data(scale) / np.float32(mma.SUBNORMALS.value), _data(minimum), SIGNED)
