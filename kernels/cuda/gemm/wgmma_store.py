"""What becomes of the sums of a matmul on Hopper's warp-group matrix instruction: unscaled, and stored as rows, as rows
added to others, or as a gated linear unit's rows for the next matmul.

A tensor of sums is fp32 [16 * WARPS, TB], rows of weights by rows of x, as the instruction leaves it. Rows of few are
stored by the threads that have them. Of many rows of x, some at a time are first exchanged between threads, so that a
warp stores whole lines: all at once would take more registers than the multiplication. Those of a
gated unit, a quarter as much, are always exchanged.
Does not know: how the sums came about (matmul_wgmma.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quengine.kernels.cuda.glu import RESIDUAL, SILU, gated, product_scales


@gluon.jit
def _pair(values, WARPS: gl.constexpr, TB: gl.constexpr):
    """The values [16*WARPS, TB] of rows r and of rows r + 8 of the tiles, which lie in the same threads."""
    return gl.split(gl.permute(gl.reshape(values, [WARPS, 2, 8, TB]), [0, 2, 3, 1]))


@gluon.jit
def tile_of(block, warp, WARPS: gl.constexpr, EPILOGUE: gl.constexpr):
    """Which tile of weights a warp of block number `block` takes: one behind the other. For a gated unit, of whose
    result a tile is 8 columns, those that stand side by side in ordered rows (half.py): a block is 8*WARPS places in
    a row."""
    if EPILOGUE >= SILU:
        # Of a place the lowest bits are 0, 5, 6, 1, 2, 3 and 4 of the column. A tile has bits 0 to 2; 5 and 6 are a
        # warp's own number, and so is 3 of 8 warps; the others are the block's.
        HIGH: gl.constexpr = WARPS // 4
        NEAR: gl.constexpr = 4 // HIGH
        return block // NEAR * 16 + warp // HIGH * 4 + block % NEAR * HIGH + warp % HIGH
    else:
        return block * WARPS + warp


@gluon.jit
def _store_ordered(values, first, token0, out_ptr, width, T, WARPS: gl.constexpr, TB: gl.constexpr):
    """Store fp16 [WARPS, 8, TB], 8 columns of each of a block's tiles (`tile_of`), as ordered rows, from place `first`
    and from row token0 on."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WARPS, WARPS], [WARPS, 1], [1, 0])
    bits = gl.permute(gl.reshape(values, [4, WARPS // 4, 4, 2, TB]), [4, 1, 2, 0, 3])
    values = gl.convert_layout(gl.reshape(bits, [TB, 8 * WARPS]), LINES)
    token = gl.expand_dims(token0 + gl.arange(0, TB, layout=gl.SliceLayout(1, LINES)), 1)
    place = gl.expand_dims(first + gl.arange(0, 8 * WARPS, layout=gl.SliceLayout(0, LINES)), 0)
    gl.store(out_ptr + (token * width + place), values, mask=token < T)


@gluon.jit
def _finish_gated(
    y, block_row, token0, unscale_ptr, out_ptr, out_unscale_ptr, width, T, gain, reach,
    WARPS: gl.constexpr, TB: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Finish and store activation(gate) * up of fp32 [16*WARPS, TB], as ordered rows of scaled fp16."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    token = token0 + gl.arange(0, TB, layout=LINE)
    scale = gl.load(unscale_ptr + token, mask=token < T, other=0.0)
    out_scale, out_unscale = product_scales(scale, reach)
    gl.store(out_unscale_ptr + token, out_unscale, mask=(token < T) & (block_row == 0))
    gate, up = _pair(y, WARPS, TB)
    OF_TOKEN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gate.type.layout))
    near = scale / gain
    of_gate = gl.convert_layout(near, OF_TOKEN)
    of_up = gl.convert_layout(near * out_scale, OF_TOKEN)
    gate = gate * gl.expand_dims(gl.expand_dims(of_gate, 0), 0)
    up = up * gl.expand_dims(gl.expand_dims(of_up, 0), 0)
    result = gated(gate, up, ACTIVATION).to(gl.float16)
    _store_ordered(result, block_row // 2, token0, out_ptr, width, T, WARPS, TB)


@gluon.jit
def _store_rows(
    y, row, token, residual_ptr, out_ptr, rows, first, N, T, PAIRED: gl.constexpr, EPILOGUE: gl.constexpr
):  # fmt: skip
    """Store fp32 [16*WARPS, TB] as rows, or added to others. row, token: of the packed matrix and of x, along their
    axes."""
    token = gl.expand_dims(token, 0)
    if PAIRED:
        column = (row >> 4) * 8 + (row & 7)
        inside = gl.expand_dims(column < rows // 2, 1) & (token < T)
        column = column + ((row >> 3) & 1) * (rows // 2)
    else:
        column = row
        inside = gl.expand_dims(row < rows, 1) & (token < T)
    at = token * N + (first + gl.expand_dims(column, 1))
    if EPILOGUE == RESIDUAL:
        y += gl.load(residual_ptr + at, mask=inside, other=0.0)
    gl.store(out_ptr + at, y, mask=inside)


@gluon.jit
def store_sums(
    y, block_row, unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, rows, first, N, T, gain, reach,
    MMA: gl.constexpr, WARPS: gl.constexpr, TB: gl.constexpr, PAIRED: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Finish and store fp32 [16*WARPS, TB] of few rows of x; the first row is row `block_row` of the packed matrix."""
    if EPILOGUE >= SILU:
        _finish_gated(
            y, block_row, 0, unscale_ptr, out_ptr, out_unscale_ptr, N, T, gain, reach, WARPS, TB, EPILOGUE
        )  # fmt: skip
    else:
        row = block_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, MMA))
        token = gl.arange(0, TB, layout=gl.SliceLayout(0, MMA))
        scale = gl.load(unscale_ptr + token, mask=token < T, other=0.0)
        y = y * gl.expand_dims(scale / gain, 0)
        _store_rows(y, row, token, residual_ptr, out_ptr, rows, first, N, T, PAIRED, EPILOGUE)


@gluon.jit
def _finish_rows(
    y, block_row, token0, unscale_ptr, residual_ptr, out_ptr, rows, first, N, T, gain,
    WARPS: gl.constexpr, TB: gl.constexpr, PAIRED: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """`store_block` of the rows themselves."""
    LANES: gl.constexpr = 4 * WARPS
    LINES: gl.constexpr = gl.BlockedLayout([4, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    y = gl.convert_layout(y, LINES)
    row = block_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, LINES))
    token = token0 + gl.arange(0, TB, layout=gl.SliceLayout(0, LINES))
    scale = gl.load(unscale_ptr + token, mask=token < T, other=0.0)
    y = y * gl.expand_dims(scale / gain, 0)
    _store_rows(y, row, token, residual_ptr, out_ptr, rows, first, N, T, PAIRED, EPILOGUE)


@gluon.jit
def store_block(
    y, block_row, token0, unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, rows, first, N, T, gain, reach,
    WARPS: gl.constexpr, TB: gl.constexpr, PAIRED: gl.constexpr, EPILOGUE: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Finish and store fp32 [16*WARPS, TB], whose first row is row `block_row` of the packed matrix, whose first column
    is row `token0` of x, PART columns at a time."""
    if TB > PART:
        near, far = gl.split(gl.permute(gl.reshape(y, [16 * WARPS, 2, TB // 2]), [0, 2, 1]))
        store_block(
            near, block_row, token0, unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, rows, first, N, T, gain,
            reach, WARPS, TB // 2, PAIRED, EPILOGUE, PART,
        )  # fmt: skip
        store_block(
            far, block_row, token0 + TB // 2, unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, rows, first, N, T,
            gain, reach, WARPS, TB // 2, PAIRED, EPILOGUE, PART,
        )  # fmt: skip
    elif EPILOGUE >= SILU:
        MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TB, 16])
        _finish_gated(
            gl.convert_layout(y, MMA, assert_trivial=True), block_row, token0, unscale_ptr, out_ptr, out_unscale_ptr, N,
            T, gain, reach, WARPS, TB, EPILOGUE,
        )  # fmt: skip
    else:
        _finish_rows(
            y, block_row, token0, unscale_ptr, residual_ptr, out_ptr, rows, first, N, T, gain, WARPS, TB, PAIRED,
            EPILOGUE,
        )  # fmt: skip
