"""Grouped-query attention of single tokens over an fp16 or q8_0 key/value cache, on the CPU.

It reads the cache as it is stored and takes no mask. The positions that a token sees are cut into stretches of
`STRETCH`, counted from the first visible one; a task is one stretch of one key/value head of one token. The parts are
joined in order, so the result does not depend on the number of threads, on the other tokens, or on where in the cache
the positions lie: in a row each, or in blocks that a table names.

Caches have any strides whose last is 1: in memory a head's positions lie together.

Does not know: a prompt's attention (prefill_attention.py), RoPE, how the cache is written, layers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.kernels.backend import KVLayer
from quengine.kernels.cpu.runtime.kernel_table import join_kernel, stretch_kernel
from quengine.kernels.cpu.runtime.threads import Launch, fp32_bits, run
from quengine.kernels.forward_batch import ForwardBatch

STRETCH = 256  # positions; a multiple of 8
PART_HEAD_BYTES = 32  # of a part, before its weighted sum


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
    check_caches(q.unsqueeze(0), layer)
    ctx = layer.k.shape[0]
    if not 0 <= first < length <= ctx:
        raise ValueError(f"positions {first} to {length - 1} are not in a cache of {ctx}")
    visible = Visible(length - first)
    visible.set([length], length - first)
    return attention_launches(q.unsqueeze(0), layer, visible, scale, out)


def batch_attention(
    q: Tensor, layer: KVLayer, batch: ForwardBatch, scale: float, window: int | None, group: int = 0
) -> Tensor:
    """`decode_attention` of the newest token of each of B sequences, over what it sees: fp32 [B, H, hd].

    q: fp32 [B, H, hd]. `group`: of layers, whose block tables name the rows. The positions and tables are in the cache.
    Raises ValueError for other shapes or types.
    """
    check_caches(q, layer)
    lengths, tables = (batch.positions + 1).tolist(), batch.block_tables_of(group).long()
    visible = Visible(min(max(lengths), window or max(lengths)), tables)
    visible.set(lengths, window)
    out = torch.empty(q.shape)
    run(attention_launches(q, layer, visible, scale, out))
    return out


def check_caches(q: Tensor, layer: KVLayer) -> None:
    """Raises ValueError for queries [B, H, hd] and a cache that `attention_launches` does not take."""
    heads, width = q.shape[1:]
    k, v = layer.k, layer.v
    check_types(layer)
    if q.dtype != torch.float32 or q.stride()[1:] != (width, 1):
        raise ValueError(
            f"decode attention takes fp32 queries of adjacent heads, not {q.dtype} of stride {q.stride()}"
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
    """Which positions each of some tokens sees, at most `most`, in memory that kernels read.

    block_tables: int64 [tokens, blocks], contiguous, where each token's positions lie; without them there is one
    token, and position p is row p of the cache.
    """

    def __init__(self, most: int, block_tables: Tensor | None = None) -> None:
        self.tokens = 1 if block_tables is None else block_tables.shape[0]
        self.most_stretches = -(-most // STRETCH)
        self.stretches = 0
        self._tables = block_tables  # read at the addresses below
        # Per token: first position, how many, the number of its first stretch, the address of its table (0: none).
        self._tokens = array("q", bytes(32 * self.tokens))
        # Of each stretch of all tokens, the token.
        self._owners = array("q", bytes(8 * self.tokens * self.most_stretches))
        if block_tables is not None:
            for i, table in enumerate(block_tables):
                self._tokens[4 * i + 3] = table.data_ptr()

    @property
    def addresses(self) -> tuple[int, int]:
        return self._tokens.buffer_info()[0], self._owners.buffer_info()[0]

    def set(self, lengths: Sequence[int], window: int | None) -> None:
        """Token i sees the last `window` of positions 0 .. lengths[i] - 1."""
        stretches = 0
        for i, length in enumerate(lengths):
            count = length if window is None else min(length, window)
            self._tokens[4 * i], self._tokens[4 * i + 1], self._tokens[4 * i + 2] = (
                length - count,
                count,
                stretches,
            )
            for _ in range(0, count, STRETCH):
                self._owners[stretches] = i
                stretches += 1
        self.stretches = stretches


def attention_launches(
    q: Tensor, layer: KVLayer, visible: Visible, scale: float, out: Tensor, parts: Tensor | None = None
) -> list[Launch]:
    """The kernels of `decode_attention` over the positions that `visible` names when they run.

    q: fp32 [B, H, hd] of adjacent heads. out: fp32 [B, H, hd] in memory. The first launch has a task for each of the
    present stretches of each key/value head, the second one for each head of each token. parts: what lies between,
    uint8 of `part_bytes`.
    """
    tokens, heads, width = q.shape
    kv_heads = layer.k.shape[1]
    if parts is None:
        parts = torch.empty(part_bytes(visible, heads, width), dtype=torch.uint8)
    size = PART_HEAD_BYTES + 4 * width
    parameters = (
        *(q.data_ptr(), width, heads // kv_heads, visible.addresses[0]),
        *strides(layer.k),
        *strides(layer.v),
        *(parts.data_ptr(), size, visible.addresses[1], fp32_bits(scale)),
        *scale_strides(layer.k_scale),
        *scale_strides(layer.v_scale),
        *(4 * q.stride(0), kv_heads),
    )
    kernel = stretch_kernel(layer.k_scale is not None)
    joined = (parts.data_ptr(), visible.addresses[0], size, width, out.data_ptr(), heads)
    keep = (q, layer, visible, parts, out)
    return [
        Launch(kernel, parameters, kv_heads * visible.stretches, keep=keep),
        Launch(join_kernel(), joined, tokens * heads, keep=keep),
    ]


def part_bytes(visible: Visible, heads: int, width: int) -> int:
    """Memory between the two kernels of `attention_launches`, of which only the present stretches are used."""
    return visible.tokens * visible.most_stretches * heads * (PART_HEAD_BYTES + 4 * width)


def strides(tensor: Tensor) -> tuple[int, int, int]:
    """Of a cache [ctx, kv_heads, n]: its address, bytes from position to position, from head to head."""
    size = tensor.element_size()
    return tensor.data_ptr(), size * tensor.stride(0), size * tensor.stride(1)


def scale_strides(scales: Tensor | None) -> tuple[int, int, int]:
    """As `strides`, of the scales of a q8_0 cache; zeros where there are none."""
    return (0, 0, 0) if scales is None else strides(scales)
