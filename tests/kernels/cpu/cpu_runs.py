"""Matmuls and attention of the CPU as its tests ask for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.backend import KVLayer
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.quant_tensor import QuantTensor
from tests.forward import one_sequence


def linear(x: Tensor, parts: Sequence[QuantTensor]) -> Tensor:
    """Few rows as decode multiplies them, many as a prompt does."""
    return cpu.decode_linear(x, parts) if len(x) <= 8 else cpu.prompt_linear(x, parts)


def attend_token(
    q: Tensor, layer: KVLayer, length: int, scale: float, first: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """One token's attention, q [H, hd], over positions first .. length - 1, which lie in rows of the same numbers."""
    batch = one_sequence([0], length - 1, blocks=-(-length // BLOCK_SIZE))
    return cpu.batch_attention(q.unsqueeze(0), layer, batch, scale, length - first, sinks=sinks)[0]


def attend_chunk(
    q: Tensor,
    layer: KVLayer,
    start: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a chunk, q [T, H, hd], over positions that lie in rows of the same numbers."""
    table = torch.arange(-(-layer.k.shape[0] // BLOCK_SIZE))
    return cpu.prefill_attention(q, layer, start, scale, window, table, sinks)
