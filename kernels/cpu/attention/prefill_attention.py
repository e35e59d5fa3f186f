"""Prefill attention on the CPU: causal grouped-query attention over a paged KV cache, in fp32.

A query row is one query head of one token; the rows that share a key/value head are adjacent, and a task is a tile of
them. It loops over the visible positions in blocks of `DEPTH` that begin at multiples of `DEPTH` whatever the first
query is. Keys and values are unpacked into panels that are multiplied like weights (tiles.py), and an online softmax
joins the blocks (Milakov and Gimelshein 2018; Dao et al. 2022). A row's result depends on its position and on the
cached keys and values alone: not on the other rows, the number of threads, or the placement of the blocks in the
cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.errors import CannotRunError
from quengine.kernels.backend import KVLayer
from quengine.kernels.cpu.attention.attention import CacheArguments, check_types, hadamard_log, sink_address
from quengine.kernels.cpu.gemm.amx import STEP, has_amx
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32
from quengine.kernels.cpu.runtime.kernel_table import (
    amx_scores_kernel,
    amx_sums_kernel,
    block_kernel,
    key_panel_kernel,
    scores_kernel,
    softmax_kernel,
    sums_kernel,
    value_panel_kernel,
)
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.cpu.runtime.threads import Launch, run
from quengine.kernels.kv.cache_types import BLOCK_SIZE

TILES = 8  # of query rows per task
WIDEST = 640  # most elements of a head; kernels of their own compute heads wider than DEPTH


def widest(wide: bool) -> int:
    """Elements of a head that a kernel has room for."""
    return WIDEST if wide else DEPTH


@dataclass
class PrefillArguments(Arguments):
    """fp32 queries [tokens, heads, width] and output: addresses, strides in bytes between tokens and between heads.

    width, values: elements of keys and of values. group: query heads per key/value head; head_tasks: tasks per
    key/value head; start: position of the first token; window: most positions that a token sees; cap: of soft-capped
    scores, or 0; table: int64 block table. `*_kernel`: addresses of the kernels that a task calls. sinks: fp32 [heads],
    or 0 without sinks. hadamard: `hadamard_log` of the output.
    """

    q: int
    q_stride: int
    q_head_stride: int
    out: int
    out_stride: int
    out_head_stride: int
    tokens: int
    group: int
    width: int
    values: int
    head_tasks: int
    start: int
    window: int
    scale: Fp32
    cap: Fp32
    k: CacheArguments
    v: CacheArguments
    table: int
    scores_kernel: int
    softmax_kernel: int
    sums_kernel: int
    key_panel_kernel: int
    value_panel_kernel: int
    sinks: int
    hadamard: int


@dataclass
class CachePanelArguments(Arguments):
    """Keys or values in adjacent cache rows, to unpack into a panel; the last key is repeated to fill a vector."""

    rows: int
    row_stride: int
    scales: int
    scale_row_stride: int
    positions: int
    width: int
    panel: int


@dataclass
class WorkArguments(Arguments):
    """State shared by a task's kernels: query rows from first_row on of a key/value head, positions from `first` on.

    queries, sums: fp32 [rows, `widest`]; scores: fp32 [rows, DEPTH]; state: the online softmax's maximum and sum, fp32
    [rows, 2]; panel and panel_arguments: the panel and the arguments of the kernel that writes it.
    """

    call: int
    head: int
    first_row: int
    rows: int
    first: int
    positions: int
    queries: int
    scores: int
    sums: int
    state: int
    panel: int
    panel_arguments: int


def uses_tiles(width: int) -> bool:
    """Whether heads of this size are multiplied on AMX tiles."""
    return has_amx() and width <= DEPTH and width % STEP == 0


def prefill_attention(
    q: Tensor,
    layer: KVLayer,
    start: int,
    scale: float,
    window: int | None,
    block_table: Tensor,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """softmax(scale * q k^T) v of the tokens at positions start .. start + T - 1, causal: fp32 [T, H, value's hd].

    q: fp32 [T, H, hd] with adjacent elements, any other strides. window: most positions that a token sees, or None.
    block_table: int [blocks], within the cache. sinks: fp32 [H], extra logits in the softmax's denominator. cap: of
    soft-capped scores (kernels/attention.py), or 0. Raises ValueError for shapes or types that do not fit,
    CannotRunError for heads wider than WIDEST.
    """
    tokens, heads, width = q.shape
    wide = (True,) if width > DEPTH else ()
    table = block_table.long().contiguous()
    _check(q, layer, start, table.shape[0] * BLOCK_SIZE)
    kv_heads, values, cache_type = layer.k.shape[1], layer.value_dim, layer.cache_type
    on_tiles = uses_tiles(width) and uses_tiles(values)
    out = torch.empty(tokens, heads, values)
    arguments = PrefillArguments(
        *(q.data_ptr(), 4 * q.stride(0), 4 * q.stride(1)),
        *(out.data_ptr(), 4 * out.stride(0), 4 * out.stride(1)),
        tokens=tokens,
        group=heads // kv_heads,
        width=width,
        values=values,
        head_tasks=-(-tokens * (heads // kv_heads) // (TILES * host_tile().rows)),
        start=start,
        window=window or start + tokens,
        scale=scale,
        cap=cap,
        k=CacheArguments.of(layer.k, layer.k_scale),
        v=CacheArguments.of(layer.v, layer.v_scale),
        table=table.data_ptr(),
        scores_kernel=amx_scores_kernel(cache_type) if on_tiles else scores_kernel(*wide),
        softmax_kernel=softmax_kernel(*wide),
        sums_kernel=amx_sums_kernel(cache_type) if on_tiles else sums_kernel(*wide),
        key_panel_kernel=key_panel_kernel(cache_type, *wide),
        value_panel_kernel=value_panel_kernel(cache_type),
        sinks=sink_address(sinks, heads),
        hadamard=hadamard_log(layer),
    )
    variant = (sinks is not None, True) if wide else (True,) if sinks is not None else ()
    kernel = block_kernel(*variant)
    keep = (q, layer, out, table, sinks)
    run([Launch(kernel, arguments, kv_heads * arguments.head_tasks, keep=keep)])
    return out


def _check(q: Tensor, layer: KVLayer, start: int, context: int) -> None:
    tokens, heads, width = q.shape
    check_types(layer)
    if width > WIDEST:
        raise CannotRunError(f"attention heads of {width} are not supported on the CPU, only up to {WIDEST}")
    if layer.head_dim != width or layer.value_dim > width or heads % layer.k.shape[1]:
        raise ValueError(f"{heads} query heads of {width} do not fit a cache {list(layer.k.shape)}")
    if q.dtype != torch.float32 or q.stride(2) != 1 or any(t.stride(2) != 1 for t in layer.tensors):
        raise ValueError(f"queries are fp32 with adjacent elements, not {q.dtype} of stride {q.stride()}")
    if not 0 <= start < start + tokens <= context:
        raise ValueError(f"positions {start} to {start + tokens - 1} are not in a cache of {context}")
