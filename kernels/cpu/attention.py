"""Grouped-query attention of one token over an fp16 or q8_0 key/value cache, on the CPU.

It reads the cache as it is stored and takes no mask. The visible positions are cut into stretches of
`STRETCH`, counted from the first visible one; a task is one stretch of one key/value head. The parts are joined in
order, so the result does not depend on the number of threads.

Caches have any strides whose last is 1: in memory a head's positions lie together.

Does not know: a prompt's attention (prefill_attention.py), RoPE, how the cache is written, layers.
"""

from __future__ import annotations

from array import array
from functools import cache

import torch
from torch import Tensor

from quengine.kernels.backend import KVLayer
from quengine.kernels.cpu.attention_ir import (
    combine_parts,
    dot_codes,
    scale_f32,
    softmax_weights,
    weighted_codes,
    weighted_halves,
)
from quengine.kernels.cpu.compiled import compile_kernel, source_stamp
from quengine.kernels.cpu.row_ir import dot_float_row, get, store_f32
from quengine.kernels.cpu.threads import Launch, run
from quengine.kernels.cpu.vector_ir import fp32_bits

STRETCH = 256  # positions; a multiple of 8
_HEAD_BYTES = 32  # of a part, before its weighted sum


def decode_attention(q: Tensor, layer: KVLayer, length: int, scale: float, first: int = 0) -> Tensor:
    """softmax(scale * q k^T) v of one token over cache positions first .. length - 1: fp32 [H, hd].

    q: fp32 [H, hd], H a multiple of the layer's heads. Raises ValueError for other shapes or types.
    """
    out = torch.empty(q.shape)
    run(decode_attention_launches(q.contiguous(), layer, length, scale, first, out))
    return out


def decode_attention_launches(
    q: Tensor, layer: KVLayer, length: int, scale: float, first: int, out: Tensor
) -> list[Launch]:
    """The kernels of `decode_attention`, for a list that does more than one thing. q and out are contiguous."""
    check_caches(q, layer)
    ctx = layer.k.shape[0]
    if not 0 <= first < length <= ctx:
        raise ValueError(f"positions {first} to {length - 1} are not in a cache of {ctx}")
    visible = Visible(length - first)
    visible.set(first, length)
    return attention_launches(q, layer, visible, scale, out)


def check_caches(q: Tensor, layer: KVLayer) -> None:
    """Raises ValueError for queries [H, hd] and a cache that `decode_attention` does not take."""
    heads, width = q.shape
    k, v = layer.k, layer.v
    check_types(layer)
    if q.dtype != torch.float32 or not q.is_contiguous():
        raise ValueError(
            f"decode attention takes contiguous fp32 queries, not {q.dtype} of stride {q.stride()}"
        )
    fits = k.shape == v.shape and k.shape[2] == width and heads % k.shape[1] == 0
    if not fits or any(tensor.stride(2) != 1 for tensor in layer.tensors):
        raise ValueError(
            f"{heads} query heads of {width} do not fit caches {list(k.shape)} and {list(v.shape)}"
        )


def check_types(layer: KVLayer) -> None:
    """Raises ValueError for a cache that is neither fp16 nor q8_0."""
    types = [tensor.dtype for tensor in layer.tensors]
    if types not in ([torch.float16] * 2, [torch.int8] * 2 + [torch.float16] * 2):
        raise ValueError(f"keys and values are stored as fp16 or q8_0, not as {types}")


class Visible:
    """Which positions of the cache a token sees, in memory that kernels read; at most `most` of them."""

    def __init__(self, most: int) -> None:
        self.most_stretches = -(-most // STRETCH)
        self._memory = array("q", (0, 0, 0))

    @property
    def address(self) -> int:
        """Of three int64: the first position, how many there are, how many stretches they are cut into."""
        return self._memory.buffer_info()[0]

    @property
    def stretches(self) -> int:
        return self._memory[2]

    def set(self, first: int, length: int) -> None:
        """Positions first .. length - 1."""
        self._memory[0], self._memory[1] = first, length - first
        self._memory[2] = -(-(length - first) // STRETCH)


def attention_launches(
    q: Tensor, layer: KVLayer, visible: Visible, scale: float, out: Tensor
) -> list[Launch]:
    """The kernels of `decode_attention` over the positions that `visible` names when they run.

    The first launch has a task for each of the present stretches of each key/value head.
    """
    heads, width = q.shape
    kv_heads = layer.k.shape[1]
    part_bytes = _HEAD_BYTES + 4 * width
    parts = torch.empty(heads, visible.most_stretches, part_bytes, dtype=torch.uint8)
    # Scores of one query head at a time; a task has its own.
    scores = torch.empty(kv_heads * visible.most_stretches, STRETCH)
    parameters = (
        *(q.data_ptr(), width, heads // kv_heads, visible.address),
        *strides(layer.k),
        *strides(layer.v),
        *(parts.data_ptr(), part_bytes, scores.data_ptr(), fp32_bits(scale)),
        *scale_strides(layer.k_scale),
        *scale_strides(layer.v_scale),
    )
    kernel = _stretch_kernel(layer.k_scale is not None)
    joined = (parts.data_ptr(), visible.address, part_bytes, width, out.data_ptr())
    keep = (q, layer, visible, parts, scores, out)
    return [
        Launch(kernel, parameters, kv_heads * visible.stretches, keep=keep),
        Launch(_join_kernel(), joined, heads, keep=keep),
    ]


def strides(tensor: Tensor) -> tuple[int, int, int]:
    """Of a cache [ctx, kv_heads, n]: its address, bytes from position to position, from head to head."""
    size = tensor.element_size()
    return tensor.data_ptr(), size * tensor.stride(0), size * tensor.stride(1)


def scale_strides(scales: Tensor | None) -> tuple[int, int, int]:
    """As `strides`, of the scales of a q8_0 cache; zeros where there are none."""
    return (0, 0, 0) if scales is None else strides(scales)


@cache
def _stretch_kernel(q8_0: bool) -> int:
    """Task h * stretches + s: the query heads of key/value head h over stretch s.

    0 q, 1 head_dim, 2 query heads per key/value head, 3 address of a `Visible`; keys: 4 address, 5 bytes from
    position to position, 6 from head to head; values: 7, 8, 9; 10 parts, 11 bytes per part, 12 scores, 13 scale
    (the bits of an fp32); scales of keys in a q8_0 cache: 14 address, 15 bytes from position to position, 16 from head
    to head; of values: 17, 18, 19.
    """
    halves, stamp = f"F16/row/{source_stamp()}", f"attention/{source_stamp()}"

    def stretch_attention(context: int, task: int) -> None:
        width, group, visible = get(context, 1), get(context, 2), get(context, 3)
        stretches = get(visible, 2)
        head, stretch = task // stretches, task % stretches
        start = get(visible, 0) + stretch * STRETCH
        count = min(STRETCH, get(visible, 1) - stretch * STRETCH)
        k = get(context, 4) + start * get(context, 5) + head * get(context, 6)
        v = get(context, 7) + start * get(context, 8) + head * get(context, 9)
        k_scale = get(context, 14) + start * get(context, 15) + head * get(context, 16)
        v_scale = get(context, 17) + start * get(context, 18) + head * get(context, 19)
        scores = get(context, 12) + task * 4 * STRETCH
        for i in range(head * group, (head + 1) * group):
            q = get(context, 0) + i * 4 * width
            for position in range(count):
                key = k + position * get(context, 5)
                if q8_0:
                    dot = dot_codes(stamp, key, k_scale + position * get(context, 15), width, q)
                else:
                    dot = dot_float_row(halves, key, width, q)
                store_f32(scale_f32(dot, context + 8 * 13), scores + 4 * position)
            part = get(context, 10) + (i * stretches + stretch) * get(context, 11)
            softmax_weights(stamp, scores, count, part)
            out = part + _HEAD_BYTES
            if q8_0:
                weighted_codes(
                    stamp, scores, count, v, get(context, 8), v_scale, get(context, 18), width, out
                )
            else:
                weighted_halves(stamp, scores, count, v, get(context, 8), width, out)

    return compile_kernel(stretch_attention)


@cache
def _join_kernel() -> int:
    """Task h: joins the parts of query head h.

    0 parts, 1 address of a `Visible`, 2 bytes per part, 3 head_dim, 4 output (fp32).
    """
    stamp = f"attention/{source_stamp()}"

    def join_stretches(context: int, task: int) -> None:
        stretches, part_bytes, width = get(get(context, 1), 2), get(context, 2), get(context, 3)
        parts = get(context, 0) + task * stretches * part_bytes
        combine_parts(stamp, parts, stretches, part_bytes, width, get(context, 4) + task * 4 * width)

    return compile_kernel(join_stretches)
