"""The launch between the projections and latent attention: it stores the latent of each token, rotates queries, and
rounds what the heads' matrices are multiplied by."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import KVLayer
from quengine.kernels.cuda.attention.kv_store import BLOCK, check_block_tables, q8_0_codes, table_rows
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, ScaledProduct, fp16_row_scale, store_row
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_group, store_quantized
from quengine.kernels.cuda.latent.shapes import HeadPlaces, LatentShape, latent_pointers
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.latent_spec import LatentSpec


@triton.jit
def _rotated(x_ptr, cos_ptr, sin_ptr, factor, SHAPE: tl.constexpr):
    """The rotated elements at x_ptr, times a factor: fp32 [rotated]."""
    HALF: tl.constexpr = SHAPE.rotated // 2
    e = tl.arange(0, SHAPE.rotated)
    if SHAPE.halves:
        partner = tl.where(e < HALF, e + HALF, e - HALF)
        angle = tl.where(e < HALF, e, e - HALF)
        sign = tl.where(e < HALF, -1.0, 1.0)
    else:
        partner = e ^ 1
        angle = e // 2
        sign = tl.where(e % 2 == 0, -1.0, 1.0)
    x = tl.load(x_ptr + e).to(tl.float32) * factor
    y = tl.load(x_ptr + partner).to(tl.float32) * factor
    return x * tl.load(cos_ptr + angle) + y * (tl.load(sin_ptr + angle) * sign)


@triton.jit
def _store_part(row_ptr, scale_ptr, first, values, live, Q8: tl.constexpr):
    """Elements `first` on of a cached row, fp32 [N] with N a multiple of 32 in q8_0."""
    N: tl.constexpr = values.shape[0]
    at = first + tl.arange(0, N)
    if Q8:
        GROUPS: tl.constexpr = N // 32
        codes, scale = q8_0_codes(tl.reshape(values, [1, GROUPS, 32]))
        tl.store(row_ptr + at, tl.reshape(codes, [N]).to(tl.int8), mask=live)
        group = first // 32 + tl.arange(0, GROUPS)
        tl.store(scale_ptr + group, tl.reshape(scale, [GROUPS]).to(tl.float16), mask=live)
    else:
        tl.store(row_ptr + at, values.to(tl.float16), mask=live)


@triton.jit
def _store_latent(
    latent_ptr, factor, norm_ptr, cos_ptr, sin_ptr, row_ptr, scale_ptr, live, eps, SHAPE: tl.constexpr, Q8: tl.constexpr
):  # fmt: skip
    d = tl.arange(0, SHAPE.rank)
    x = tl.load(latent_ptr + d).to(tl.float32) * factor
    x = x * tl.rsqrt(tl.sum(x * x, 0) / SHAPE.rank + eps) * tl.load(norm_ptr + d).to(tl.float32)
    turned = _rotated(latent_ptr + SHAPE.rank, cos_ptr, sin_ptr, factor, SHAPE)
    _store_part(row_ptr, scale_ptr, 0, x, live, Q8)
    _store_part(row_ptr, scale_ptr, SHAPE.rank, turned, live, Q8)


@DirectLaunch
@triton.jit(do_not_specialize=["blocks", "of_head"])
def _latent_rows_kernel(
    q_ptr, latent_ptr, row_scale_ptr, latent_scale_ptr, norm_ptr, cos_ptr, sin_ptr, query_scale_ptr,
    position_ptr, sequence_ptr, table_ptr, cache, turned_ptr, out_high, out_low, out_scale, out_sums, of_block_ptr,
    eps, weight_scale, latent_weight_scale, blocks, q_stride, latent_stride, out_stride, of_head,
    SHAPE: tl.constexpr, Q8: tl.constexpr, QUANTIZE: tl.constexpr, PLACES: tl.constexpr, FORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs (token, query head), and one more of each token for its latent. PLACES: rows of a block of HeadPlaces.
    sequence_ptr: each token's row of the table; None: its own. Scales may be None."""
    launch_then_wait(PDL)
    HEADS: tl.constexpr = SHAPE.heads
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(position_ptr + token).to(tl.int64)
    cos_ptr += position * (SHAPE.rotated // 2)
    sin_ptr += position * (SHAPE.rotated // 2)
    if head == HEADS:
        if sequence_ptr is not None:
            table_ptr += tl.load(sequence_ptr + token) * blocks
        else:
            table_ptr += token * blocks
        row = table_rows(table_ptr, blocks, position, False).to(tl.int64)
        ROW: tl.constexpr = SHAPE.rank + SHAPE.rotated
        scale_ptr = cache.scale
        if Q8:
            scale_ptr += row * (ROW // 32)
        factor = 1.0
        if latent_scale_ptr is not None:
            factor = tl.load(latent_scale_ptr + token) * latent_weight_scale
        _store_latent(
            latent_ptr + token * latent_stride, factor, norm_ptr, cos_ptr, sin_ptr, cache.rows + row * ROW, scale_ptr,
            position < blocks * BLOCK, eps, SHAPE, Q8,
        )  # fmt: skip
    else:
        factor = 1.0
        if row_scale_ptr is not None:
            factor = tl.load(row_scale_ptr + token) * weight_scale
        if query_scale_ptr is not None:
            factor *= tl.load(query_scale_ptr + position)
        q_ptr += token * q_stride + head * (SHAPE.plain + SHAPE.rotated)
        turned = _rotated(q_ptr + SHAPE.plain, cos_ptr, sin_ptr, factor, SHAPE)
        e = tl.arange(0, SHAPE.rotated)
        tl.store(turned_ptr + (token * HEADS + head) * SHAPE.rotated + e, turned)
        PADDED: tl.constexpr = triton.next_power_of_2(SHAPE.plain) if SHAPE.plain > 128 else 128
        p = tl.arange(0, PADDED)
        x = tl.load(q_ptr + p, mask=p < SHAPE.plain, other=0.0).to(tl.float32) * factor
        if QUANTIZE:
            GROUPS: tl.constexpr = PADDED // 32
            high, low, scale, sums = quantize_group(tl.reshape(x, [GROUPS, 32]))
            n = tl.arange(0, GROUPS)
            OF_HEAD: tl.constexpr = SHAPE.plain // 32
            group = head * OF_HEAD + n
            store_quantized(
                out_high, out_low, out_scale, out_sums, group, n < OF_HEAD, high, low, scale, sums
            )
        else:
            place = head * of_head + token
            scale, row_scale = fp16_row_scale(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
            tl.store(out_scale + place, row_scale)
            store_row(out_high, place, p, out_stride, x * scale, p < SHAPE.plain, FORM)
            if token % PLACES == 0:
                tl.store(of_block_ptr + 1 + place // PLACES, head)
            if (token == 0) & (head == 0):
                tl.store(of_block_ptr, HEADS * (of_head // PLACES))


def latent_rows(
    q: Tensor | ScaledProduct,
    latent: Tensor | ScaledProduct,
    spec: LatentSpec,
    layer: KVLayer,
    positions: Tensor,
    block_tables: Tensor,
    sequences: Tensor | None,
    turned: Tensor,
    out: QuantizedActivations | Fp16Operand,
    places: HeadPlaces | None = None,
    of_block: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Stores T tokens' latents, and writes their queries: rotated parts for attention, others for the heads' matrices.

    q: [T, heads * (plain + rotated)]; latent: [T, rank + rotated]; fp32, or products, whose rows may be slices of
    wider ones. positions: int32 [T] on the device (a position past the block table is not stored); block_tables: int32
    [sequences, blocks]; sequences: int32 [T], each token's row of block_tables; None: token t has row t. turned: fp32
    [T, heads, rotated], written. out: rows [heads, plain] of one token, quantized; or an fp16 operand of the rows at
    `places`, with of_block, int32 [1 + blocks], the number of blocks and each one's head.
    """
    q, row_scale, weight_scale = _scaled(q)
    latent, latent_scale, latent_weight_scale = _scaled(latent)
    tokens, shape = len(q), LatentShape.of(spec)
    assert q.stride(1) == latent.stride(1) == 1 and turned.is_contiguous()
    assert q.shape[1] == spec.heads * spec.query and latent.shape == (tokens, spec.row)
    assert positions.dtype == torch.int32 and positions.shape == (tokens,)
    check_block_tables(block_tables)
    if isinstance(out, QuantizedActivations):
        assert tokens == 1 and out.high.shape == (spec.heads, spec.plain)
        outputs, stride, form = (out.high, out.low, out.scale, out.sums), 0, 0
    else:
        assert places is not None and of_block is not None and out.rows == places.places
        assert out.fits(spec.plain)
        outputs = out.values, out.values, out.row_scale, out.values
        stride, form = out.stride, int(out.layout)
    _latent_rows_kernel[(tokens, spec.heads + 1)](
        q, latent, row_scale, latent_scale, spec.norm, spec.cos, spec.sin, spec.query_scale, positions, sequences,
        block_tables,
        latent_pointers(layer), turned, *outputs, of_block,
        spec.eps, weight_scale, latent_weight_scale, block_tables.shape[1], q.stride(0), latent.stride(0), stride,
        1 if places is None else places.of_head,
        SHAPE=shape, Q8=layer.k_scale is not None, QUANTIZE=isinstance(out, QuantizedActivations),
        PLACES=1 if places is None else places.block, FORM=form, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def _scaled(x: Tensor | ScaledProduct) -> tuple[Tensor, Tensor | None, float]:
    """Values, the scales of their rows (None: ones), and a factor for all values."""
    if isinstance(x, ScaledProduct):
        return x.values, x.row_scale, 1.0 / x.weight_scale
    return x, None, 1.0
