"""Causal grouped-query attention of a prompt's tokens over an fp16 or q8_0 key/value cache, on the CPU, in fp32.

A task is some query rows of one key/value head: a row is one query head of one token, the heads that share the keys
next to each other. It goes over the visible positions in blocks of `DEPTH`, which begin at multiples of `DEPTH`
whatever the first query is; keys and values become panels that are multiplied as weights are (tiles.py), and a
running softmax joins the blocks (Milakov and Gimelshein 2018; Dao et al. 2022). A row's result depends on its position
and the cache alone: not on what else is computed with it, on the number of threads, or on where in the cache the
positions lie: in a row each, or in blocks that a table names.

Does not know: RoPE, how the cache is written, layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quengine.errors import CannotRunError
from quengine.kernels.backend import KVLayer
from quengine.kernels.cpu.attention.attention import check_types, strides
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.runtime.kernel_table import (
    block_kernel,
    key_panel_kernel,
    scores_kernel,
    softmax_kernel,
    sums_kernel,
    value_panel_kernel,
)
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.cpu.runtime.threads import Launch, fp32_bits, run
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CacheType

TILES = 8  # of query rows in a task


def prefill_attention(
    q: Tensor,
    layer: KVLayer,
    start: int,
    scale: float,
    window: int | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v of the tokens at positions start .. start + T - 1, each over those up to its own.

    q: fp32 [T, H, hd], strides any but the last; with a window each token sees that many positions at most; the blocks
    of a table (int [blocks]) are in the cache. fp32 [T, H, hd]. Raises ValueError for shapes or types that do not fit,
    CannotRunError for heads of more than DEPTH.
    """
    out = torch.empty(q.shape)
    run([prefill_attention_launch(q, layer, start, scale, window, out, block_table)])
    return out


def prefill_attention_launch(
    q: Tensor,
    layer: KVLayer,
    start: int,
    scale: float,
    window: int | None,
    out: Tensor,
    block_table: Tensor | None = None,
) -> Launch:
    """The kernel of `prefill_attention`; out is contiguous fp32 [T, H, hd]."""
    tokens, heads, width = q.shape
    ctx, kv_heads = layer.k.shape[:2]
    table = None if block_table is None else block_table.long()
    ctx = ctx if table is None else table.shape[0] * BLOCK_SIZE
    check_types(layer)
    if width > DEPTH:
        raise CannotRunError(f"attention heads of {width} are not supported on the CPU, only up to {DEPTH}")
    if layer.k.shape[2] != width or heads % kv_heads:
        raise ValueError(f"{heads} query heads of {width} do not fit a cache {list(layer.k.shape)}")
    if q.dtype != torch.float32 or q.stride(2) != 1 or any(t.stride(2) != 1 for t in layer.tensors):
        raise ValueError(f"queries are fp32 with adjacent elements, not {q.dtype} of stride {q.stride()}")
    if not 0 <= start < start + tokens <= ctx:
        raise ValueError(f"positions {start} to {start + tokens - 1} are not in a cache of {ctx}")
    cache_type: CacheType = "f16" if layer.k_scale is None else "q8_0"
    scales = (t if t is not None else layer.k for t in (layer.k_scale, layer.v_scale))
    tasks_a_head = -(-tokens * (heads // kv_heads) // (TILES * host_tile().rows))
    parameters = (
        *(q.data_ptr(), 4 * q.stride(0), 4 * q.stride(1), tokens, heads // kv_heads, width, tasks_a_head),
        *(start, window or ctx, fp32_bits(scale), out.data_ptr(), 4 * out.stride(0), 4 * out.stride(1)),
        *(number for held in (layer.k, layer.v, *scales) for number in strides(held)),
        *(scores_kernel(), softmax_kernel(), sums_kernel()),
        *(key_panel_kernel(cache_type), value_panel_kernel(cache_type)),
        0 if table is None else table.data_ptr(),
    )
    return Launch(block_kernel(), parameters, kv_heads * tasks_a_head, keep=(q, layer, out, table))
