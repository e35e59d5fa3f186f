"""The key-value cache of one layer on the device, and how a kernel writes and reads its rows.

fp16, or q8_0 as `quengine.kernels.kv_q8_0` defines it. Knows positions, heads and bytes; not attention.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quengine.kernels.kv_q8_0 import GROUP, check_head_dim

Q8_GROUP = tl.constexpr(GROUP)


@dataclass(frozen=True)
class KVStore:
    """Keys and values of all sequences of a batch, one layer.

    k, v: [sequences, context, kv_heads, head_dim], fp16, or int8 codes with k_scale, v_scale
    [sequences, context, kv_heads, head_dim / 32] fp16. All contiguous.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.k.dtype == torch.int8:
            check_head_dim(self.k.shape[-1])
            assert self.k_scale is not None and self.v_scale is not None
        else:
            assert self.k.dtype == torch.float16
        assert self.k.shape == self.v.shape and self.k.is_contiguous() and self.v.is_contiguous()

    @property
    def q8_0(self) -> bool:
        return self.k_scale is not None

    @classmethod
    def allocate(
        cls,
        sequences: int,
        context: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        q8_0: bool = False,
    ) -> "KVStore":
        """Reserve memory; rows are written before they are read, so nothing is cleared."""
        shape = (sequences, context, kv_heads, head_dim)
        if not q8_0:
            k, v = (torch.empty(shape, dtype=torch.float16, device=device) for _ in range(2))
            return cls(k, v)
        check_head_dim(head_dim)
        k, v = (torch.empty(shape, dtype=torch.int8, device=device) for _ in range(2))
        groups = (*shape[:-1], head_dim // GROUP)
        k_scale, v_scale = (torch.empty(groups, dtype=torch.float16, device=device) for _ in range(2))
        return cls(k, v, k_scale, v_scale)


@triton.jit
def round_half_even(x):
    """Nearest integer of fp32 below 2^22, halves to even: adding 1.5 * 2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def store_rows(
    values, row, live, cache_ptr, scale_ptr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, Q8: tl.constexpr
):
    """Write fp32 `values` [R, PADDED] to cache rows `row` [R]: a row is one head at one position.

    Rows where `live` [R] is false are not written. Returns fp32 [R, PADDED]: the values as the cache gives
    them back.
    """
    d = tl.arange(0, PADDED)[None, :]
    mask = live[:, None] & (d < HEAD_DIM)
    address = cache_ptr + row[:, None] * HEAD_DIM + d
    if Q8:
        R: tl.constexpr = values.shape[0]
        GROUPS: tl.constexpr = PADDED // Q8_GROUP
        groups = tl.reshape(values, [R, GROUPS, Q8_GROUP])
        scale = tl.math.div_rn(tl.max(tl.abs(groups), 2), 127.0)
        divisor = tl.where(scale > 0, scale, 1.0)
        codes = round_half_even(tl.math.div_rn(groups, divisor[:, :, None]))
        tl.store(address, tl.reshape(codes, [R, PADDED]).to(tl.int8), mask=mask)
        g = tl.arange(0, GROUPS)[None, :]
        stored = scale.to(tl.float16)
        inside = live[:, None] & (g < HEAD_DIM // Q8_GROUP)
        tl.store(scale_ptr + row[:, None] * (HEAD_DIM // Q8_GROUP) + g, stored, mask=inside)
        read_back = tl.reshape(codes * stored.to(tl.float32)[:, :, None], [R, PADDED])
    else:
        stored = values.to(tl.float16)
        tl.store(address, stored, mask=mask)
        read_back = stored.to(tl.float32)
    return read_back


@triton.jit
def load_tile(
    cache_ptr, scale_ptr, row, live, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, Q8: tl.constexpr
):
    """Cache rows `row` [N]: fp16 as stored, or int8 codes times scale in fp32. [N, PADDED], 0 outside."""
    d = tl.arange(0, PADDED)[None, :]
    address = cache_ptr + row[:, None] * HEAD_DIM + d
    mask = live[:, None] if HEAD_DIM == PADDED else live[:, None] & (d < HEAD_DIM)
    tile = tl.load(address, mask=mask, other=0)
    if Q8:
        N: tl.constexpr = row.shape[0]
        GROUPS: tl.constexpr = PADDED // Q8_GROUP
        g = tl.arange(0, GROUPS)[None, :]
        inside = live[:, None] & (g < HEAD_DIM // Q8_GROUP)
        scale = tl.load(scale_ptr + row[:, None] * (HEAD_DIM // Q8_GROUP) + g, mask=inside, other=0.0)
        groups = tl.reshape(tile, [N, GROUPS, Q8_GROUP]).to(tl.float32) * scale.to(tl.float32)[:, :, None]
        tile = tl.reshape(groups, [N, PADDED])
    return tile
