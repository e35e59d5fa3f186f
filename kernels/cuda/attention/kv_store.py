"""Reads and writes of the paged KV cache in kernels: fp16, or q8_0 and q4_0 as kernels/kv/kv_codes.py defines them.

BITS: bits of a stored value: 16, 8 or 4. In memory a layer is [kv_heads, rows, head_dim], half as wide with 4 bits. A
block of BLOCK_SIZE positions of one head is contiguous, and a sequence's block table maps its positions to blocks.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, float16, int32

from quengine.kernels.backend import KVLayer
from quengine.kernels.cuda.attention.hadamard import hadamard_heads
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CODE_GROUP, check_rows

GROUP = tl.constexpr(CODE_GROUP)
BLOCK = tl.constexpr(BLOCK_SIZE)
BLOCK_BITS = tl.constexpr(BLOCK_SIZE.bit_length() - 1)


class CachePointers(NamedTuple):
    """One layer's cache as a kernel's argument. For an fp16 cache k and v are repeated as the scales, which
    are not read.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor


def cache_pointers(layer: KVLayer) -> CachePointers:
    """The tensors of a layer in the layout of `allocate_layer`, a head's rows contiguous."""
    k, v, k_scale, v_scale = layer.k, layer.v, layer.k_scale, layer.v_scale
    assert k.shape == v.shape and k.dtype == v.dtype
    rows, _, width = k.shape
    assert k.stride() == v.stride() == (width, rows * width, 1) and rows % BLOCK_SIZE == 0
    assert rows * width < 2**31, "a kernel counts a head's elements in 32 bits"
    if k_scale is None or v_scale is None:
        assert k.dtype == float16
        return CachePointers(k, v, k, v)
    check_rows(layer.cache_type, layer.head_dim)
    return CachePointers(k, v, k_scale, v_scale)


def check_block_tables(block_tables: Tensor) -> None:
    """Checks that block tables are int32 [sequences, blocks], contiguous."""
    assert block_tables.ndim == 2 and block_tables.dtype == int32 and block_tables.is_contiguous()


@triton.jit
def round_half_even(x):
    """Nearest integer of fp32 below 2^22, halves to even: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def table_rows(table_ptr, blocks, key, ASM: tl.constexpr):
    """Cache rows of positions `key` [N] of a sequence, from the `blocks` entries of its block table at `table_ptr`.

    Positions past the table get the row of some block in it. ASM: as in mma.py.
    """
    entry_ptr = table_ptr + tl.minimum(key >> BLOCK_BITS, blocks - 1)
    if ASM:
        # tl.load would become a stage of the software pipeline, and tiles would be fetched one stage later.
        entry = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];",
            "=r,l",
            [entry_ptr.to(tl.int64)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        entry = tl.load(entry_ptr)
    return (entry << BLOCK_BITS) + (key & (BLOCK - 1))


@triton.jit
def q8_0_codes(groups):
    """Quantizes fp32 [R, GROUPS, 32] to q8_0: codes as integers in fp32 [R, GROUPS, 32], and scales fp32 [R,
    GROUPS], which are stored as fp16.
    """
    scale = tl.math.div_rn(tl.max(tl.abs(groups), 2), 127.0)
    divisor = tl.where(scale > 0, scale, 1.0)
    return round_half_even(tl.math.div_rn(groups, divisor[:, :, None])), scale


@triton.jit
def q4_0_codes(groups):
    """Quantizes fp32 [R, GROUPS, 32] to q4_0: codes as integers in fp32, and scales fp16 [R, GROUPS]."""
    low = tl.min(groups, 2)
    high = tl.max(groups, 2)
    scale = (tl.where(-low > high, low, high) * -0.125).to(tl.float16)
    bits = (scale.to(tl.int16, bitcast=True) + 4) & -8  # to 8 significant bits
    scale = bits.to(tl.float16, bitcast=True)
    divisor = scale.to(tl.float32)
    codes = round_half_even(tl.math.div_rn(groups, tl.where(divisor != 0, divisor, 1.0)[:, :, None]))
    codes = tl.minimum(tl.maximum(codes, -8.0), 7.0)
    return tl.where(divisor[:, :, None] != 0, codes, 0.0), scale


@triton.jit
def packed_codes(codes):
    """Codes fp32 [R, GROUPS, 32] of q4_0 as they are stored: int8 [R, GROUPS, 16]."""
    R: tl.constexpr = codes.shape[0]
    GROUPS: tl.constexpr = codes.shape[1]
    halves = tl.permute(tl.reshape((codes + 8.0).to(tl.int32), [R, GROUPS, 2, 16]), [0, 1, 3, 2])
    near, far = tl.split(halves)
    return (near | (far << 4)).to(tl.int8)


@triton.constexpr_function
def row_width(size: int, bits: int) -> int:
    """Elements of a stored row that has `size` values."""
    return size // 2 if bits == 4 else size


@triton.jit
def store_rows(
    values, row, live, cache_ptr, scale_ptr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr
):
    """Stores fp32 `values` [R, PADDED] to cache rows `row` [R]; a row is one head at one position.

    Rows where `live` [R] is false are not stored. Returns fp32 [R, PADDED]: the values as the cache would return them.
    """
    WIDTH: tl.constexpr = row_width(HEAD_DIM, BITS)
    d = tl.arange(0, row_width(PADDED, BITS))[None, :]
    mask = live[:, None] & (d < WIDTH)
    address = cache_ptr + row[:, None] * WIDTH + d
    if BITS < 16:
        R: tl.constexpr = values.shape[0]
        GROUPS: tl.constexpr = PADDED // GROUP
        if BITS == 4:
            values = hadamard_heads(values, HEAD_DIM)
            codes, stored = q4_0_codes(tl.reshape(values, [R, GROUPS, GROUP]))
            tl.store(address, tl.reshape(packed_codes(codes), [R, PADDED // 2]), mask=mask)
        else:
            codes, scale = q8_0_codes(tl.reshape(values, [R, GROUPS, GROUP]))
            tl.store(address, tl.reshape(codes, [R, PADDED]).to(tl.int8), mask=mask)
            stored = scale.to(tl.float16)
        g = tl.arange(0, GROUPS)[None, :]
        inside = live[:, None] & (g < HEAD_DIM // GROUP)
        tl.store(scale_ptr + row[:, None] * (HEAD_DIM // GROUP) + g, stored, mask=inside)
        read_back = tl.reshape(codes * stored.to(tl.float32)[:, :, None], [R, PADDED])
    else:
        stored = values.to(tl.float16)
        tl.store(address, stored, mask=mask)
        read_back = stored.to(tl.float32)
    return read_back


@triton.jit
def load_tile(
    cache_ptr, scale_ptr, row, live, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr
):
    """Cache rows `row` [N] as stored: [N, PADDED] fp16, or codes, int8 [N, PADDED] or packed [N, PADDED / 2], and their
    fp16 scales [N, PADDED / 32].

    0 where not live. For fp16 the tile is returned in place of the scales, too.
    """
    WIDTH: tl.constexpr = row_width(HEAD_DIM, BITS)
    d = tl.arange(0, row_width(PADDED, BITS))[None, :]
    mask = live[:, None] if HEAD_DIM == PADDED else live[:, None] & (d < WIDTH)
    tile = tl.load(cache_ptr + row[:, None] * WIDTH + d, mask=mask, other=0)
    scale = tile
    if BITS < 16:
        GROUPS: tl.constexpr = PADDED // GROUP
        g = tl.arange(0, GROUPS)[None, :]
        inside = live[:, None] if HEAD_DIM == PADDED else live[:, None] & (g < HEAD_DIM // GROUP)
        scale = tl.load(scale_ptr + row[:, None] * (HEAD_DIM // GROUP) + g, mask=inside, other=0.0)
    return tile, scale


@triton.jit
def load_row(
    cache_ptr, scale_ptr, row, live, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr
):
    """Cache rows `row` [N] as fp32 [N, PADDED]: what `store_rows` returned when they were stored."""
    tile, scale = load_tile(cache_ptr, scale_ptr, row, live, HEAD_DIM, PADDED, BITS)
    if BITS == 4:
        values = dequantize_packed(tile, scale).to(tl.float32)
    elif BITS == 8:
        N: tl.constexpr = tile.shape[0]
        GROUPS: tl.constexpr = PADDED // GROUP
        groups = tl.reshape(tile.to(tl.float32), [N, GROUPS, GROUP]) * scale.to(tl.float32)[:, :, None]
        values = tl.reshape(groups, [N, PADDED])
    else:
        values = tile.to(tl.float32)
    return values


@triton.jit
def dequantize_packed(packed, scale):
    """Packed codes of q4_0 [N, PADDED / 2] times scale fp16 [N, PADDED / 32]: fp16 [N, PADDED], exact. A code in the
    last bits of 0x6400, the fp16 1024, makes 1024 + code."""
    N: tl.constexpr = packed.shape[0]
    GROUPS: tl.constexpr = scale.shape[1]
    halves = tl.join(packed & 15, (packed >> 4) & 15)
    halves = tl.reshape(halves.to(tl.int16) | 0x6400, [N, GROUPS, 16, 2])
    codes = tl.permute(halves, [0, 1, 3, 2]).to(tl.float16, bitcast=True) - 1032.0
    return tl.reshape(codes * scale[:, :, None, None], [N, GROUPS * GROUP])


@triton.jit
def dequantize_codes(codes, scale, ASM: tl.constexpr):
    """codes int8 [N, PADDED] times scale fp16 [N, PADDED / 32] as two fp16 terms: the rounded product, the remainder.

    Their sum is exact down to fp16's smallest step, 2^-24. int8 becomes fp16 without a conversion: 0x6400 is 1024,
    whose last eight bits count ones, so the byte `code + 128` in their place makes 1152 + code.
    """
    N: tl.constexpr = codes.shape[0]
    PADDED: tl.constexpr = codes.shape[1]
    GROUPS: tl.constexpr = PADDED // GROUP
    wide = tl.reshape(tl.broadcast_to(scale[:, :, None], [N, GROUPS, GROUP]), [N, PADDED])
    if ASM:
        value, remainder = tl.inline_asm_elementwise(
            """{ .reg .b32 t, a, b, m, n;
            xor.b32 t, $4, 0x80808080;
            prmt.b32 a, t, 0x64646464, 0x4140;
            prmt.b32 b, t, 0x64646464, 0x4342;
            mov.b32 m, 0x64806480;
            sub.rn.f16x2 a, a, m;
            sub.rn.f16x2 b, b, m;
            mul.rn.f16x2 m, a, $5;
            mul.rn.f16x2 n, b, $6;
            mov.b32 $0, m;
            mov.b32 $1, n;
            neg.f16x2 m, m;
            neg.f16x2 n, n;
            fma.rn.f16x2 $2, a, $5, m;
            fma.rn.f16x2 $3, b, $6, n; }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [codes, wide],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        exact = codes.to(tl.float32) * wide.to(tl.float32)
        value = exact.to(tl.float16)
        remainder = (exact - value.to(tl.float32)).to(tl.float16)
    return value, remainder
