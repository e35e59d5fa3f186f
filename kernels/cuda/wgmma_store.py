"""What becomes of the sums of a matmul on Hopper's warp-group matrix instruction: unscaled, and stored as rows, as rows
added to others, or as SwiGLU's rows for the next matmul.

A tensor of sums is fp32 [16 * WARPS, TB], rows of weights by rows of x, as the instruction leaves it. Few are stored by
the threads that have them. Of many rows of x, some at a time are first exchanged between threads, so that a warp stores
whole lines: all at once would take more registers than the multiplication.
Does not know: how the sums came about (matmul_wgmma.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quengine.kernels.cuda.half import ORDERED, half_place
from quengine.kernels.cuda.swiglu import product_scales

ROWS = gl.constexpr(0)
RESIDUAL = gl.constexpr(1)
SWIGLU = gl.constexpr(2)
"""What is done with sums."""


@gluon.jit
def _pair(values, WARPS: gl.constexpr, TB: gl.constexpr):
    """The values [16*WARPS, TB] of rows r and of rows r + 8 of the tiles, which lie in the same threads."""
    return gl.split(gl.permute(gl.reshape(values, [WARPS, 2, 8, TB]), [0, 2, 3, 1]))


@gluon.jit
def _gated(gate, up):
    """silu(gate)*up, fp16."""
    return (gate / (1.0 + gl.exp(-gate)) * up).to(gl.float16)


@gluon.jit
def _store_gated(
    y, row, token, scale, out_ptr, unscale_ptr, width, T, reach, WARPS: gl.constexpr, TB: gl.constexpr
):  # fmt: skip
    """Store silu(gate)*up of fp32 [16*WARPS, TB], as ordered rows of scaled fp16, and their unscale.

    row, token: of the packed matrix and of x, along their axes; scale: what x's rows are scaled by.
    """
    out_scale, out_unscale = product_scales(scale, reach)
    gl.store(unscale_ptr + token, out_unscale, mask=(token < T) & (gl.program_id(0) == 0))
    far = gl.expand_dims((row >> 3) & 1, 1)
    gate, up = _pair(y * gl.where(far == 1, gl.expand_dims(out_scale, 0), 1.0), WARPS, TB)
    values = _gated(gate, up)
    column = gl.expand_dims((row >> 4) * 8 + (row & 7), 1)
    token = gl.expand_dims(token, 0)
    live, _ = _pair(((column < width) & (token < T)).to(gl.int32), WARPS, TB)
    place, _ = _pair(half_place(token, column, width, ORDERED), WARPS, TB)
    gl.store(out_ptr + place, values, mask=live != 0)


@gluon.jit
def _store_rows(
    y, row, token, residual_ptr, out_ptr, rows, first, N, T, PAIRED: gl.constexpr, EPILOGUE: gl.constexpr
):  # fmt: skip
    """Store fp32 [16*WARPS, TB] as rows, or added to others. row, token: as `_store_gated`'s."""
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
    row = block_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, MMA))
    token = gl.arange(0, TB, layout=gl.SliceLayout(0, MMA))
    scale = gl.load(unscale_ptr + token, mask=token < T, other=0.0)
    y = y * gl.expand_dims(scale / gain, 0)
    if EPILOGUE == SWIGLU:
        _store_gated(y, row, token, scale, out_ptr, out_unscale_ptr, N, T, reach, WARPS, TB)
    else:
        _store_rows(y, row, token, residual_ptr, out_ptr, rows, first, N, T, PAIRED, EPILOGUE)


@gluon.jit
def _store_pieces(
    out_ptr, values, token0, width, T, WARPS: gl.constexpr, TB: gl.constexpr, RUN: gl.constexpr, ONE: gl.constexpr
):  # fmt: skip
    """Store [TB, RUN, ONE]: RUN pieces of ONE values, one piece every 8 places."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 1, ONE], [32 // RUN, RUN, 1], [WARPS, 1, 1], [2, 1, 0])
    values = gl.convert_layout(values, LINES)
    token = token0 + gl.arange(0, TB, layout=gl.SliceLayout(1, gl.SliceLayout(2, LINES)))
    token = gl.expand_dims(gl.expand_dims(token, 1), 2)
    run = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(2, LINES)))
    one = gl.arange(0, ONE, layout=gl.SliceLayout(0, gl.SliceLayout(1, LINES)))
    place = gl.expand_dims(gl.expand_dims(run * 8, 0), 2) + gl.expand_dims(gl.expand_dims(one, 0), 1)
    gl.store(out_ptr + (token * width + place), values, mask=token < T)


@gluon.jit
def _store_runs(values, column0, token0, out_ptr, width, T, WARPS: gl.constexpr, TB: gl.constexpr):
    """Store fp16 [WARPS, 8, TB], columns from column0 on of rows from token0 on, as ordered rows."""
    # Columns by their bits, highest first: 5 (of 8 warps), 4, 3 and 2, 1, 0. Of a place the lowest bits are 0, 5, 6 of
    # the column (`half_place`), then 1, 2, 3 and 4.
    HIGH: gl.constexpr = WARPS // 4
    bits = gl.reshape(values, [HIGH, 4, 4, 2, TB])
    runs = gl.reshape(gl.permute(bits, [4, 1, 2, 0, 3]), [TB, 16, 2 * HIGH])
    start = column0 // 128 * 128 + column0 // (32 * HIGH) % (4 // HIGH) * (2 * HIGH)
    _store_pieces(out_ptr + start, runs, token0, width, T, WARPS, TB, 16, 2 * HIGH)


@gluon.jit
def _finish_gated(
    y, block_row, token0, unscale_ptr, out_ptr, out_unscale_ptr, width, T, gain, reach,
    WARPS: gl.constexpr, TB: gl.constexpr,
):  # fmt: skip
    """`store_block` of silu(gate)*up."""
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
    _store_runs(_gated(gate, up), block_row // 2, token0, out_ptr, width, T, WARPS, TB)


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
    elif EPILOGUE == SWIGLU:
        MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TB, 16])
        _finish_gated(
            gl.convert_layout(y, MMA, assert_trivial=True), block_row, token0, unscale_ptr, out_ptr, out_unscale_ptr, N,
            T, gain, reach, WARPS, TB,
        )  # fmt: skip
    else:
        _finish_rows(
            y, block_row, token0, unscale_ptr, residual_ptr, out_ptr, rows, first, N, T, gain, WARPS, TB, PAIRED,
            EPILOGUE,
        )  # fmt: skip
