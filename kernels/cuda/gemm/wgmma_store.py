"""The epilogue of the wgmma matmuls: sums are scaled and stored as rows, as rows added to a residual, or as rows of a
gated linear unit for the next matmul.

Sums are fp32 [16 * warps, rows of x], in the instruction's result layout. Few rows of x are stored by the threads that
hold them. Many rows are first exchanged between threads, some at a time, so that a warp stores whole cache lines: all
at once would take more registers than the multiplication. Rows of a gated unit, a quarter of the size, are always
exchanged.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quengine.kernels.cuda.glu import BIAS, BIASED_SWISH, CLAMPED_SWISH, RESIDUAL, SILU, gated, product_scales


class WgmmaOutput(NamedTuple):
    """Output pointers (row scales of x, residual or bias, result, its row scales), first output column, row
    stride, rows of x, and a bound on the products (see glu.py).
    """

    row_scale_ptr: Any
    residual_ptr: Any
    ptr: Any
    out_row_scale_ptr: Any
    first: Any
    stride: Any
    rows: Any
    bound: Any


@gluon.jit
def _pair(values, WARPS: gl.constexpr, TB: gl.constexpr):
    """The values [16*WARPS, TB] of rows r and of rows r + 8 of the tiles, which are in the same threads."""
    return gl.split(gl.permute(gl.reshape(values, [WARPS, 2, 8, TB]), [0, 2, 3, 1]))


@gluon.jit
def tile_of(block, warp, P: gl.constexpr):
    """The tile of weights of a warp in block number `block`: consecutive ones. For a gated unit, whose tile
    is 8 columns of the result, tiles whose columns are adjacent in the WGMMA layout: a block is 8*P.warps
    consecutive places.
    """
    if P.flags.epilogue >= SILU:
        # From the lowest, a place's bits are bits 0, 5, 6, 1, 2, 3 and 4 of the column. A tile has bits 0 to 2; bits 5
        # and 6, and with 8 warps bit 3, are the warp's index; the others are the block's.
        HIGH: gl.constexpr = P.warps // 4
        NEAR: gl.constexpr = 4 // HIGH
        return block // NEAR * 16 + warp // HIGH * 4 + block % NEAR * HIGH + warp % HIGH
    else:
        return block * P.warps + warp


@gluon.jit
def _store_wgmma_layout(values, first, token0, output, WARPS: gl.constexpr, TB: gl.constexpr):
    """Stores fp16 [WARPS, 8, TB], 8 columns of each of a block's tiles (`tile_of`), in the WGMMA layout, from
    place `first` and from row token0 on.
    """
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WARPS, WARPS], [WARPS, 1], [1, 0])
    bits = gl.permute(gl.reshape(values, [4, WARPS // 4, 4, 2, TB]), [4, 1, 2, 0, 3])
    values = gl.convert_layout(gl.reshape(bits, [TB, 8 * WARPS]), LINES)
    token = gl.expand_dims(token0 + gl.arange(0, TB, layout=gl.SliceLayout(1, LINES)), 1)
    place = gl.expand_dims(first + gl.arange(0, 8 * WARPS, layout=gl.SliceLayout(0, LINES)), 0)
    gl.store(output.ptr + (token * output.stride + place), values, mask=token < output.rows)


@gluon.jit
def _pair_bias(block_row, output, rows, P: gl.constexpr, L: gl.constexpr):
    """The biases of a block's gate and up values, [warps, 8, 1] each, for values in layout L."""
    OF_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    OF_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    WARPS: gl.constexpr = P.warps
    tile = tile_of(block_row // (16 * WARPS), gl.arange(0, WARPS, layout=OF_WARP), P)
    column = gl.expand_dims(tile, 1) * 8 + gl.expand_dims(gl.arange(0, 8, layout=OF_ROW), 0)
    inside = column < rows // 2
    gate = gl.load(output.residual_ptr + column, mask=inside, other=0.0)
    up = gl.load(output.residual_ptr + rows // 2 + column, mask=inside, other=0.0)
    return gl.expand_dims(gate, 2), gl.expand_dims(up, 2)


@gluon.jit
def load_row_scales(output, token0, MMA: gl.constexpr, P: gl.constexpr):
    """The row scales for `store_sums` of rows of x from token0 on, loaded early to hide the latency."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [P.warps], [0])
    L: gl.constexpr = LINE if P.flags.epilogue >= SILU else gl.SliceLayout(0, MMA)
    token = token0 + gl.arange(0, P.block, layout=L)
    return gl.load(output.row_scale_ptr + token, mask=token < output.rows, other=0.0)


@gluon.jit
def _store_gated(
    y, block_row, token0, output, rows, weight_scale, P: gl.constexpr, TB: gl.constexpr, scale=None
):  # fmt: skip
    """Stores activation(gate) * up of sums [16*P.warps, TB] as scaled fp16 in the WGMMA layout, and its row scales."""
    WARPS: gl.constexpr = P.warps
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    token = token0 + gl.arange(0, TB, layout=LINE)
    if scale is None:
        scale = gl.load(output.row_scale_ptr + token, mask=token < output.rows, other=0.0)
    out_scale, out_row_scale = product_scales(scale, output.bound, P.flags.epilogue)
    gl.store(output.out_row_scale_ptr + token, out_row_scale, mask=(token < output.rows) & (block_row == 0))
    gate, up = _pair(y, WARPS, TB)
    OF_TOKEN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gate.type.layout))
    near = scale / weight_scale
    of_gate = gl.convert_layout(near, OF_TOKEN)
    if P.flags.epilogue >= CLAMPED_SWISH:  # up is clamped before it is scaled
        of_up = of_gate
    else:
        of_up = gl.convert_layout(near * out_scale, OF_TOKEN)
    gate = gate * gl.expand_dims(gl.expand_dims(of_gate, 0), 0)
    up = up * gl.expand_dims(gl.expand_dims(of_up, 0), 0)
    if P.flags.epilogue == BIASED_SWISH:  # the bounds of other activations do not include biases
        OF_GATE: gl.constexpr = gate.type.layout
        gate_bias, up_bias = _pair_bias(block_row, output, rows, P, OF_GATE)
        gate += gate_bias
        up += up_bias
    result = gated(gate, up, P.flags.epilogue)
    if P.flags.epilogue >= CLAMPED_SWISH:
        result *= gl.expand_dims(gl.expand_dims(gl.convert_layout(out_scale, OF_TOKEN), 0), 0)
    result = result.to(gl.float16)
    _store_wgmma_layout(result, block_row // 2, token0, output, WARPS, TB)


@gluon.jit
def _store_rows(y, row, token, output, rows, weight_scale, P: gl.constexpr, scale=None):
    """Scales sums [16*P.warps, tokens] and stores them as rows, plus a residual, or plus a bias (at the
    residual's pointer). row, token: indices in the packed matrix and in x, along their axes.
    """
    if scale is None:
        scale = gl.load(output.row_scale_ptr + token, mask=token < output.rows, other=0.0)
    y = y * gl.expand_dims(scale / weight_scale, 0)
    token = gl.expand_dims(token, 0)
    if P.flags.paired:
        column = (row >> 4) * 8 + (row & 7)
        inside = gl.expand_dims(column < rows // 2, 1) & (token < output.rows)
        column = column + ((row >> 3) & 1) * (rows // 2)
    else:
        column = row
        inside = gl.expand_dims(row < rows, 1) & (token < output.rows)
    at = token * output.stride + (output.first + gl.expand_dims(column, 1))
    if P.flags.epilogue == RESIDUAL:
        y += gl.load(output.residual_ptr + at, mask=inside, other=0.0)
    elif P.flags.epilogue == BIAS:
        bias = gl.load(output.residual_ptr + (output.first + column), mask=column < rows, other=0.0)
        y += gl.expand_dims(bias, 1)
    gl.store(output.ptr + at, y, mask=inside)


@gluon.jit
def store_sums(
    y, block_row, output, rows, weight_scale, L: gl.constexpr, P: gl.constexpr, token0=0, scale=None
):  # fmt: skip
    """Scales and stores sums of few rows of x in layout L, from row token0 on; the first row is row `block_row` of the
    packed matrix. scale: from `load_row_scales`.
    """
    TB: gl.constexpr = y.shape[1]
    if P.flags.epilogue >= SILU:
        _store_gated(y, block_row, token0, output, rows, weight_scale, P, TB, scale)
    else:
        row = block_row + gl.arange(0, 16 * P.warps, layout=gl.SliceLayout(1, L))
        token = token0 + gl.arange(0, TB, layout=gl.SliceLayout(0, L))
        _store_rows(y, row, token, output, rows, weight_scale, P, scale)


@gluon.jit
def store_block(
    y, block_row, token0, output, rows, weight_scale, P: gl.constexpr, TB: gl.constexpr, PART: gl.constexpr
):  # fmt: skip
    """Scales and stores sums [16*P.warps, TB], PART columns at a time. The first row is row `block_row` of
    the packed matrix, the first column is row `token0` of x.
    """
    WARPS: gl.constexpr = P.warps
    if TB > PART:
        near, far = gl.split(gl.permute(gl.reshape(y, [16 * WARPS, 2, TB // 2]), [0, 2, 1]))
        store_block(near, block_row, token0, output, rows, weight_scale, P, TB // 2, PART)
        store_block(far, block_row, token0 + TB // 2, output, rows, weight_scale, P, TB // 2, PART)
    elif P.flags.epilogue >= SILU:
        MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TB, 16])
        y = gl.convert_layout(y, MMA, assert_trivial=True)
        _store_gated(y, block_row, token0, output, rows, weight_scale, P, TB)
    else:
        LANES: gl.constexpr = 4 * WARPS
        LINES: gl.constexpr = gl.BlockedLayout([4, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
        y = gl.convert_layout(y, LINES)
        row = block_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, LINES))
        token = token0 + gl.arange(0, TB, layout=gl.SliceLayout(0, LINES))
        _store_rows(y, row, token, output, rows, weight_scale, P)
