"""Grouped-query attention of single tokens over an fp16 or q8_0 paged key/value cache, on the CPU.

It reads the cache as it is stored and takes no mask. The positions that a token sees are cut into KV splits of
`KV_SPLIT`, counted from the first visible one; a task is one split of one key/value head of one token. The parts are
combined in order, so the result does not depend on the number of threads, on the other tokens, or on where in the
cache the blocks lie.

Caches have any strides whose last is 1: in memory a head's positions lie together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.backend import KVLayer
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32, size_of
from quengine.kernels.cpu.runtime.kernel_table import combine_kernel, kv_split_kernel
from quengine.kernels.cpu.runtime.threads import Launch, run
from quengine.kernels.forward_batch import ForwardBatch

KV_SPLIT = 256  # positions; a multiple of 8
PART_HEAD_BYTES = 32  # of a part, before its weighted sum


def batch_attention(
    q: Tensor,
    layer: KVLayer,
    batch: ForwardBatch,
    scale: float,
    window: int | None,
    group: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v of the newest token of each of B sequences over what it sees: fp32 [B, H, hd].

    q: fp32 [B, H, hd]. `group`: of layers, whose block tables name the rows. The positions and tables are in the cache.
    `sinks`: fp32 [H], logits that are in the softmax's denominator too. Raises ValueError for other shapes or types.
    """
    check_caches(q, layer)
    lengths, tables = (batch.positions + 1).tolist(), batch.block_tables_of(group).long()
    visible = Visible(min(max(lengths), window or max(lengths)), tables)
    visible.set(lengths, window)
    out = torch.empty(q.shape)
    parts = torch.empty(part_bytes(visible, *q.shape[1:]), dtype=torch.uint8)
    run(attention_launches(q, layer, visible, scale, out, parts, sinks))
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


@dataclass
class CacheArguments(Arguments):
    """Keys or values of a layer's cache: addresses, and bytes from row to row and from head to head.

    `scales` of a q8_0 cache; zeros elsewhere.
    """

    rows: int
    row_stride: int
    head_stride: int
    scales: int = 0
    scale_row_stride: int = 0
    scale_head_stride: int = 0

    @classmethod
    def of(cls, rows: Tensor, scales: Tensor | None) -> CacheArguments:
        """Of [rows, kv_heads, head_dim] and of [rows, kv_heads, head_dim / 32]."""
        described = (
            number
            for tensor in (rows, scales)
            if tensor is not None
            for number in (
                tensor.data_ptr(),
                *(tensor.element_size() * tensor.stride(dimension) for dimension in (0, 1)),
            )
        )
        return cls(*described)


@dataclass
class VisibleRow(Arguments):
    """What one token sees: `count` positions from `first` on, by an int64 block table; its first KV split's number."""

    first: int
    count: int
    first_split: int
    table: int


_ROW = size_of(VisibleRow) // 8


class Visible:
    """Which positions each of some tokens sees, at most `most`, in memory that kernels read.

    block_tables: int64 [tokens, blocks], contiguous, where each token's positions lie.
    """

    def __init__(self, most: int, block_tables: Tensor) -> None:
        self.tokens = block_tables.shape[0]
        self.most_splits = -(-most // KV_SPLIT)
        self.splits = 0
        self._tables = block_tables  # read at the addresses below
        self._rows = array("q")  # a VisibleRow for each token
        for table in block_tables:
            self._rows.frombytes(VisibleRow(0, 0, 0, table.data_ptr()).to_bytes())
        # Of each KV split of all tokens, the token.
        self._owners = array("q", bytes(8 * self.tokens * self.most_splits))

    @property
    def addresses(self) -> tuple[int, int]:
        return self._rows.buffer_info()[0], self._owners.buffer_info()[0]

    def set(self, lengths: Sequence[int], window: int | None) -> None:
        """Token i sees the last `window` of positions 0 .. lengths[i] - 1."""
        splits = 0
        for i, length in enumerate(lengths):
            count = length if window is None else min(length, window)
            self._rows[_ROW * i : _ROW * i + 3] = array("q", (length - count, count, splits))
            for _ in range(0, count, KV_SPLIT):
                self._owners[splits] = i
                splits += 1
        self.splits = splits


@dataclass
class SplitArguments(Arguments):
    """q: fp32 [tokens, heads, width]; group: query heads per key/value head.

    visible: a `VisibleRow` for each token; owners: int64, the token of each KV split; parts: a part for each KV split
    and query head.
    """

    q: int
    q_stride: int
    width: int
    group: int
    kv_heads: int
    scale: Fp32
    k: CacheArguments
    v: CacheArguments
    visible: int
    owners: int
    parts: int
    part_bytes: int


@dataclass
class CombineArguments(Arguments):
    """As `SplitArguments`; out: fp32 [tokens, heads, width]; sinks: fp32 [heads], or 0 where there are none."""

    visible: int
    parts: int
    part_bytes: int
    width: int
    heads: int
    out: int
    sinks: int


def attention_launches(
    q: Tensor,
    layer: KVLayer,
    visible: Visible,
    scale: float,
    out: Tensor,
    parts: Tensor,
    sinks: Tensor | None = None,
) -> list[Launch]:
    """The kernels of `batch_attention` over the positions that `visible` names when they run.

    q: fp32 [B, H, hd] of adjacent heads. out: fp32 [B, H, hd] in memory. The first launch has a task for each of the
    present KV splits of each key/value head, the second one for each head of each token. parts: what lies between,
    uint8 of `part_bytes`. sinks: fp32 [H].
    """
    tokens, heads, width = q.shape
    kv_heads = layer.k.shape[1]
    rows, owners = visible.addresses
    split = SplitArguments(
        q=q.data_ptr(),
        q_stride=4 * q.stride(0),
        width=width,
        group=heads // kv_heads,
        kv_heads=kv_heads,
        scale=scale,
        k=CacheArguments.of(layer.k, layer.k_scale),
        v=CacheArguments.of(layer.v, layer.v_scale),
        visible=rows,
        owners=owners,
        parts=parts.data_ptr(),
        part_bytes=PART_HEAD_BYTES + 4 * width,
    )
    combine = CombineArguments(
        rows, parts.data_ptr(), split.part_bytes, width, heads, out.data_ptr(), sink_address(sinks, heads)
    )
    kernel, keep = kv_split_kernel(layer.k_scale is not None), (q, layer, visible, parts, out, sinks)
    combining = combine_kernel() if sinks is None else combine_kernel(True)
    return [
        Launch(kernel, split, kv_heads * visible.splits, keep=keep),
        Launch(combining, combine, tokens * heads, keep=keep),
    ]


def sink_address(sinks: Tensor | None, heads: int) -> int:
    """Where fp32 [heads] lies, 0 for None. Raises ValueError for other shapes or types."""
    if sinks is None:
        return 0
    if sinks.shape != (heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous():
        raise ValueError(f"sinks are fp32 [{heads}], not {sinks.dtype} {list(sinks.shape)}")
    return sinks.data_ptr()


def part_bytes(visible: Visible, heads: int, width: int) -> int:
    """Memory between the two kernels of `attention_launches`, of which only the present KV splits are used."""
    return visible.tokens * visible.most_splits * heads * (PART_HEAD_BYTES + 4 * width)
