"""Rows of one layer's KV cache in torch: the row of each position, and how rows are written and read.

The definition that the CPU and CUDA kernels follow, for every cache type.
"""

import torch
from torch import Tensor

from quengine.kernels.backend import KVLayer
from quengine.kernels.hadamard import hadamard
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_FORMATS, CODE_GROUP, CacheType, check_rows
from quengine.kernels.kv.kv_codes import dequantize_rows, quantize_rows


def allocate_layer(
    context: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    cache_type: CacheType = "f16",
    latent: bool = False,
) -> KVLayer:
    """Allocates a layer's cache of `context` positions, those of each head adjacent in memory; nothing is cleared.

    latent: the values are elements of the keys, and stored with them (KVLayer). Raises EngineError for rows that cannot
    be stored in `cache_type`.
    """

    def tensor(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(kv_heads, context, width, dtype=dtype, device=device).transpose(0, 1)

    def both(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = tensor(width, dtype)
        return keys, keys if latent else tensor(width, dtype)

    check_rows(cache_type, head_dim, latent)
    held = CACHE_FORMATS[cache_type]
    if not held.coded:
        return KVLayer(*both(head_dim, torch.float16))
    codes = both(head_dim, torch.int8) if held.bits == 8 else both(head_dim // 2, torch.uint8)
    return KVLayer(*codes, *both(head_dim // CODE_GROUP, torch.float16))


def slot_mapping(positions: Tensor, block_table: Tensor) -> Tensor:
    """The cache row of each position [n]: int64 [n].

    `block_table`: of one sequence, or [n, most], one for each position.
    """
    index = positions // BLOCK_SIZE
    blocks = block_table[index] if block_table.ndim == 1 else block_table.gather(1, index[:, None])[:, 0]
    return blocks.long() * BLOCK_SIZE + positions % BLOCK_SIZE


def write_rows(layer: KVLayer, rows: int | Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k, v [T, kv_heads, head_dim] of any float type to rows `rows`, int64 [T], or to those from `rows` on; they
    are transformed first where the cache's type says so."""
    where = slice(rows, rows + k.shape[0]) if isinstance(rows, int) else rows
    for values, held, scales in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
        if scales is None:
            held[where] = values.to(held.dtype)
        else:
            values = hadamard(values) if layer.format.hadamard else values
            held[where], scales[where] = quantize_rows(values, layer.format.bits)


def read_rows(layer: KVLayer, rows: slice | Tensor, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """The keys and values of `rows` as stored, transformed or not, decoded to fp32: each [n, kv_heads, head_dim]."""
    k, v = (
        held[rows, heads].float()
        if scales is None
        else dequantize_rows(held[rows, heads], scales[rows, heads])
        for held, scales in ((layer.k, layer.k_scale), (layer.v, layer.v_scale))
    )
    return k, v
