"""How rows are written to one layer's key-value cache and read back, in torch, whatever type they are stored in.

The definition that the CPU and CUDA kernels follow. Knows nothing of attention.
"""

import torch
from torch import Tensor

from quengine.kernels.backend import KVLayer
from quengine.kernels.cache_types import CacheType, check_head_dim
from quengine.kernels.kv_q8_0 import GROUP, dequantize_rows, quantize_rows


def allocate_layer(
    context: int, kv_heads: int, head_dim: int, device: torch.device | str, cache_type: CacheType = "f16"
) -> KVLayer:
    """Room for `context` positions, each head's positions together in memory; nothing is cleared.

    Raises EngineError where a head is not a whole number of q8_0 groups.
    """

    def tensor(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(kv_heads, context, width, dtype=dtype, device=device).transpose(0, 1)

    if cache_type == "f16":
        return KVLayer(tensor(head_dim, torch.float16), tensor(head_dim, torch.float16))
    check_head_dim(head_dim)
    codes = [tensor(head_dim, torch.int8) for _ in range(2)]
    scales = [tensor(head_dim // GROUP, torch.float16) for _ in range(2)]
    return KVLayer(*codes, *scales)


def write_rows(layer: KVLayer, start: int, k: Tensor, v: Tensor) -> None:
    """k, v [T, kv_heads, head_dim] of any float type to positions start .. start + T - 1, rounded as stored."""
    rows = slice(start, start + k.shape[0])
    for values, held, scales in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
        if scales is None:
            held[rows] = values.to(held.dtype)
        else:
            held[rows], scales[rows] = quantize_rows(values)


def read_rows(layer: KVLayer, rows: slice, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """The values that keys and values of positions `rows` stand for, fp32: each [n, kv_heads, head_dim]."""
    k, v = (
        held[rows, heads].float()
        if scales is None
        else dequantize_rows(held[rows, heads], scales[rows, heads])
        for held, scales in ((layer.k, layer.k_scale), (layer.v, layer.v_scale))
    )
    return k, v
