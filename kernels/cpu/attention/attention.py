"""Decode attention on the CPU: grouped-query attention of one token per sequence over a paged KV cache.

It reads the cache as stored and needs no mask. The positions that a token sees are cut into KV splits of `KV_SPLIT`,
counted from the first visible one; a task is one split of one key/value head of one token. The partial results are
combined in order, so the result does not depend on the number of threads, on the other tokens, or on the placement of
the blocks in the cache.

A cache may have any strides, except that a head's elements are adjacent (last stride 1).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quengine.kernels.backend import KVLayer
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32, size_of
from quengine.kernels.cpu.runtime.kernel_table import combine_kernel, kv_split_kernel
from quengine.kernels.cpu.runtime.threads import Launch
from quengine.kernels.hadamard import hadamard_block

KV_SPLIT = 256  # positions; a multiple of 8
PART_HEAD_BYTES = 32  # of a split's partial result, before its weighted sum


def check_caches(q: Tensor, layer: KVLayer) -> None:
    """Raises ValueError for queries [B, H, hd] or a cache that `attention_launches` does not support."""
    heads, width = q.shape[1:]
    k, v = layer.k, layer.v
    check_types(layer)
    if q.dtype != torch.float32 or q.stride()[1:] != (width, 1):
        raise ValueError(
            f"decode attention takes fp32 queries of adjacent heads, not {q.dtype} of stride {q.stride()}"
        )
    fits = (
        k.shape[:2] == v.shape[:2] and layer.value_dim <= layer.head_dim == width and heads % k.shape[1] == 0
    )
    if not fits or any(tensor.stride(2) != 1 for tensor in layer.tensors):
        raise ValueError(
            f"{heads} query heads of {width} do not fit caches {list(k.shape)} and {list(v.shape)}"
        )


def check_types(layer: KVLayer) -> None:
    """Raises ValueError if the dtypes of a cache are not those of a CacheType."""
    types = {tensor.dtype for tensor in (layer.k, layer.v)}
    scales = {None if scale is None else scale.dtype for scale in (layer.k_scale, layer.v_scale)}
    if (types, scales) not in (
        ({torch.float16}, {None}),
        ({torch.int8}, {torch.float16}),
        ({torch.uint8}, {torch.float16}),
    ):
        raise ValueError(f"keys and values are stored as fp16, q8_0 or q4_0, not as {types} and {scales}")


def hadamard_log(layer: KVLayer) -> int:
    """Log2 of the block of elements that are transformed together in stored rows; 0: they are stored as they are."""
    return hadamard_block(layer.head_dim).bit_length() - 1 if layer.format.hadamard else 0


@dataclass
class CacheArguments(Arguments):
    """Keys or values of a layer's cache: addresses, and strides in bytes between rows and between heads.

    `scales` and its strides belong to codes and are 0 for fp16.
    """

    rows: int
    row_stride: int
    head_stride: int
    scales: int = 0
    scale_row_stride: int = 0
    scale_head_stride: int = 0

    @classmethod
    def of(cls, rows: Tensor, scales: Tensor | None) -> CacheArguments:
        """From rows [rows, kv_heads, head_dim] or of codes, and their scales [rows, kv_heads, head_dim / 32]."""
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
    """The positions that one token sees, `count` from `first` on; its int64 block table; its first KV split's index."""

    first: int
    count: int
    first_split: int
    table: int


_ROW = size_of(VisibleRow) // 8


class Seen(NamedTuple):
    """The positions that a token sees, up to its own: the last `window`, or those in its chunk of `chunk` positions;
    all of them if these are None and 0."""

    window: int | None = None
    chunk: int = 0

    def most(self, context: int) -> int:
        """The most positions that a token sees in a context of `context` positions."""
        return min(context, self.window or context, self.chunk or context)

    def count(self, length: int) -> int:
        """The number of positions that the last of `length` tokens sees."""
        if self.chunk:
            return (length - 1) % self.chunk + 1
        return length if self.window is None else min(length, self.window)


ALL = Seen()


class Visible:
    """The visible positions of each token of a batch, at most `most` a token, in memory that kernels read.

    block_tables: int64 [tokens, blocks], contiguous; row i maps the positions of token i to blocks.
    """

    def __init__(self, most: int, block_tables: Tensor) -> None:
        self.tokens = block_tables.shape[0]
        self.most_splits = -(-most // KV_SPLIT)
        self.splits = 0
        self._tables = block_tables  # read at the addresses below
        self._rows = array("q")  # a VisibleRow for each token
        for table in block_tables:
            self._rows.frombytes(VisibleRow(0, 0, 0, table.data_ptr()).to_bytes())
        # The token that each KV split belongs to, over the splits of all tokens.
        self._owners = array("q", bytes(8 * self.tokens * self.most_splits))

    @property
    def addresses(self) -> tuple[int, int]:
        return self._rows.buffer_info()[0], self._owners.buffer_info()[0]

    def set(self, lengths: Sequence[int], seen: Seen) -> None:
        """Lets token i see the positions that `seen` allows, of 0 .. lengths[i] - 1."""
        splits = 0
        for i, length in enumerate(lengths):
            count = seen.count(length)
            self._rows[_ROW * i : _ROW * i + 3] = array("q", (length - count, count, splits))
            for _ in range(0, count, KV_SPLIT):
                self._owners[splits] = i
                splits += 1
        self.splits = splits


@dataclass
class SplitArguments(Arguments):
    """q: fp32 [tokens, heads, width]; values: elements of a value; group: query heads per key/value head; cap: of
    soft-capped scores, or 0.

    visible: a `VisibleRow` per token; owners: int64, the token of each KV split; parts: one partial result per KV
    split and query head.
    """

    q: int
    q_stride: int
    width: int
    values: int
    group: int
    kv_heads: int
    scale: Fp32
    cap: Fp32
    k: CacheArguments
    v: CacheArguments
    visible: int
    owners: int
    parts: int
    part_bytes: int


@dataclass
class CombineArguments(Arguments):
    """As in `SplitArguments`, but width: elements of a value. out: fp32 [tokens, heads, width]; sinks: fp32 [heads], or
    0 without sinks; hadamard: `hadamard_log` of the output."""

    visible: int
    parts: int
    part_bytes: int
    width: int
    heads: int
    out: int
    sinks: int
    hadamard: int


def attention_launches(
    q: Tensor,
    layer: KVLayer,
    visible: Visible,
    scale: float,
    out: Tensor,
    parts: Tensor,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> list[Launch]:
    """The kernels of softmax(scale * q k^T) v of each row, over the positions that `visible` holds when they run.

    Positions and blocks must lie within the cache; they are not checked.

    Args:
        q: fp32 [B, H, hd] with adjacent heads.
        out: fp32 [B, H, value's hd], contiguous.
        parts: workspace for the partial results, uint8 of `part_bytes`.
        sinks: fp32 [H], extra logits in the softmax's denominator.
        cap: of soft-capped scores (kernels/attention.py), or 0.

    Returns two launches: one task per key/value head and current KV split; then, to combine the splits, one task per
    query head and token.
    """
    tokens, heads, width = q.shape
    kv_heads, values = layer.k.shape[1], layer.value_dim
    rows, owners = visible.addresses
    split = SplitArguments(
        q=q.data_ptr(),
        q_stride=4 * q.stride(0),
        width=width,
        values=values,
        group=heads // kv_heads,
        kv_heads=kv_heads,
        scale=scale,
        cap=cap,
        k=CacheArguments.of(layer.k, layer.k_scale),
        v=CacheArguments.of(layer.v, layer.v_scale),
        visible=rows,
        owners=owners,
        parts=parts.data_ptr(),
        part_bytes=PART_HEAD_BYTES + 4 * values,
    )
    combine = CombineArguments(
        rows, parts.data_ptr(), split.part_bytes, values, heads, out.data_ptr(), sink_address(sinks, heads),
        hadamard_log(layer),
    )  # fmt: skip
    kernel, keep = kv_split_kernel(layer.cache_type), (q, layer, visible, parts, out, sinks)
    combining = combine_kernel() if sinks is None else combine_kernel(True)
    return [
        Launch(kernel, split, kv_heads * visible.splits, keep=keep),
        Launch(combining, combine, tokens * heads, keep=keep),
    ]


def sink_address(sinks: Tensor | None, heads: int) -> int:
    """The address of sinks, fp32 [heads], or 0 for None. Raises ValueError for other shapes or types."""
    if sinks is None:
        return 0
    if sinks.shape != (heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous():
        raise ValueError(f"sinks are fp32 [{heads}], not {sinks.dtype} {list(sinks.shape)}")
    return sinks.data_ptr()


def part_bytes(visible: Visible, heads: int, width: int) -> int:
    """Bytes of workspace between the kernels of `attention_launches`, for the most KV splits that may be visible."""
    return visible.tokens * visible.most_splits * heads * (PART_HEAD_BYTES + 4 * width)
