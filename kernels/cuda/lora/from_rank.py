"""Launches that add B A x of changes on CUDA, after a product that has left A x (rank_matmul.py): to the product,
to gate and up before their activation, or to the residual stream before its norm.

A program reads B of the adapters that its rows have. Rows of a gated unit are stored as the next matmul reads them.
Their row scales follow from a bound on the product, as in the matmul itself (glu.py), and one on what is added:

    |sum over r of b[n, r] s[r]| <= max |b| * sum over r of |s[r]|
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, operand_columns, places_offset
from quengine.kernels.cuda.gemm.mma import prefetch
from quengine.kernels.cuda.glu import EPILOGUES, gated, product_bound, product_scales
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.lora.low_rank import OUTPUTS, CudaChanges, used_adapters
from quengine.kernels.cuda.rms_norm_wgmma import normed_row, row_columns, row_geometry, store_wgmma_layout
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.glu import Gating
from quengine.kernels.rms_norm import RMSNorm

_MOST_ROWS, _GATED_ROWS = 32, 16
"""Rows of a program, and of a program of gated units, which has two matrices."""
_GATED_COLUMNS = 128
"""Columns of a gated unit that a program takes: a block that the operand's layout permutes."""
_RANKS = tl.constexpr(16)


@triton.constexpr_function
def _count(adapters):
    """Adapters whose scales a program looks at ahead of its wait."""
    return min(32, triton.next_power_of_2(adapters))


@triton.jit
def _first_hinted(row, scales_ptr, rows, ADAPTERS: tl.constexpr):
    """An adapter that these rows probably have, ahead of the wait, by the scales perhaps of an earlier step: of 32 at
    most."""
    COUNT: tl.constexpr = _count(ADAPTERS)
    adapter = tl.arange(0, COUNT)
    there = (adapter < ADAPTERS)[:, None] & (row < rows)[None, :]
    at = scales_ptr + adapter[:, None] * rows + row[None, :]
    most = tl.max(tl.abs(tl.load(at, mask=there, other=0.0, cache_modifier=".cg")), 1)
    return (COUNT - tl.max(tl.where(most > 0.0, COUNT - adapter, 1), 0)) % ADAPTERS


@triton.jit
def _ranks_of_b(b_ptr, n, present, rank, RANKS: tl.constexpr):
    """b of rows n, those that are `present`, and ranks `rank` among those of all adapters, fp16 [rank, n]."""
    return tl.load(b_ptr + n[None, :].to(tl.int64) * RANKS + rank[:, None], mask=present[None, :], other=0.0)


@triton.jit
def _scaled_sums(
    row, part, adapter, rank, scales_ptr, sums_ptr, rows, RANKS: tl.constexpr, WIDTH: tl.constexpr
):
    """The sums of rows of a matrix for ranks of an adapter, times its scales, fp32 [T, rank]."""
    there = row < rows
    scale = tl.load(scales_ptr + adapter * rows + row, mask=there, other=0.0, cache_modifier=".cg")
    at = row[:, None] * WIDTH + part * RANKS + rank[None, :]
    return tl.load(sums_ptr + at, mask=there[:, None], other=0.0, cache_modifier=".cg") * scale[:, None]


@triton.jit
def _times_b(s, b, total):
    """total plus s times b: b has tf32's bits, s is taken in several parts."""
    return tl.dot(s, b.to(tl.float32), total, input_precision="tf32x3")


@DirectLaunch
@triton.jit(do_not_specialize=["rows"])
def _from_rank_kernel(
    y_ptr, sums_ptr, b_ptr, adapter_scales_ptr, tiles_ptr, rows, width,
    ADAPTERS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs (tile, block of rows). b of one adapter is read ahead of the wait; of others once the scales are."""
    RANKS: tl.constexpr = ADAPTERS * RANK
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    tile = tiles_ptr + tl.program_id(0) * 3
    part, n = tl.load(tile), tl.load(tile + 1) + tl.arange(0, COLUMNS)
    present = n < tl.load(tile + 2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    near = _first_hinted(row, adapter_scales_ptr, rows, ADAPTERS)
    rank = near * RANK + tl.arange(0, _RANKS)
    b = _ranks_of_b(b_ptr, n, present, rank, RANKS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    inside = (row < rows)[:, None] & present[None, :]
    at = y_ptr + row[:, None] * width + n[None, :]
    y = tl.load(at, mask=inside, other=0.0)
    s = _scaled_sums(row, part, near, rank, adapter_scales_ptr, sums_ptr, rows, RANKS, WIDTH)
    used = used_adapters(row, adapter_scales_ptr, rows, ADAPTERS)
    y = _times_b(s, b, y)
    for adapter in range(ADAPTERS):
        if (used >> adapter % 32) & 1 != 0:
            for first in range(0, RANK, _RANKS):
                if (adapter != near) | (first > 0):
                    rank = adapter * RANK + first + tl.arange(0, _RANKS)
                    b = _ranks_of_b(b_ptr, n, present, rank, RANKS)
                    s = _scaled_sums(
                        row, part, adapter, rank, adapter_scales_ptr, sums_ptr, rows, RANKS, WIDTH
                    )
                    y = _times_b(s, b, y)
    if used != 0:
        tl.store(at, y, mask=inside)


@DirectLaunch
@triton.jit(do_not_specialize=["rows"])
def _glu_from_rank_kernel(
    y_ptr, out_ptr, out_scale_ptr, x_scale_ptr, sums_ptr, b_ptr, adapter_scales_ptr, rows, width, stride, bound,
    largest, ADAPTERS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EPILOGUE: tl.constexpr, LAYOUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (block of columns of the unit, block of rows), as those of `_from_rank_kernel`. width: of gate, and of
    up; stride: of the result's rows."""
    RANKS: tl.constexpr = ADAPTERS * RANK
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    n = operand_columns(place, LAYOUT)
    present = n < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    near = _first_hinted(row, adapter_scales_ptr, rows, ADAPTERS)
    rank = near * RANK + tl.arange(0, _RANKS)
    b_gate = _ranks_of_b(b_ptr, n, present, rank, RANKS)
    b_up = _ranks_of_b(b_ptr, n + width, present, rank, RANKS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    inside = (row < rows)[:, None] & present[None, :]
    at = y_ptr + row[:, None] * (2 * width) + n[None, :]
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + width, mask=inside, other=0.0)
    most = tl.load(x_scale_ptr + row, mask=row < rows, other=0.0) * bound
    of_gate = _scaled_sums(row, 0, near, rank, adapter_scales_ptr, sums_ptr, rows, RANKS, WIDTH)
    of_up = _scaled_sums(row, 1, near, rank, adapter_scales_ptr, sums_ptr, rows, RANKS, WIDTH)
    used = used_adapters(row, adapter_scales_ptr, rows, ADAPTERS)
    size = tl.sum(tl.abs(of_gate) + tl.abs(of_up), 1)
    gate, up = _times_b(of_gate, b_gate, gate), _times_b(of_up, b_up, up)
    for adapter in range(ADAPTERS):
        if (used >> adapter % 32) & 1 != 0:
            for first in range(0, RANK, _RANKS):
                if (adapter != near) | (first > 0):
                    rank = adapter * RANK + first + tl.arange(0, _RANKS)
                    b_gate = _ranks_of_b(b_ptr, n, present, rank, RANKS)
                    b_up = _ranks_of_b(b_ptr, n + width, present, rank, RANKS)
                    of_gate = _scaled_sums(
                        row, 0, adapter, rank, adapter_scales_ptr, sums_ptr, rows, RANKS, WIDTH
                    )
                    of_up = _scaled_sums(
                        row, 1, adapter, rank, adapter_scales_ptr, sums_ptr, rows, RANKS, WIDTH
                    )
                    size += tl.sum(tl.abs(of_gate) + tl.abs(of_up), 1)
                    gate, up = _times_b(of_gate, b_gate, gate), _times_b(of_up, b_up, up)
    scale, row_scale = product_scales(most + largest * size, 1.0, EPILOGUE)
    if tl.program_id(0) == 0:
        tl.store(out_scale_ptr + row, row_scale, mask=row < rows)
    value = gated(gate, up, EPILOGUE) * scale[:, None]
    to = places_offset(row[:, None], place[None, :], stride, LAYOUT)
    tl.store(out_ptr + to, value.to(tl.float16), mask=inside)


def add_from_rank(y: Tensor, sums: Tensor, changes: CudaChanges, scales: Tensor, pdl: bool = False) -> Tensor:
    """Adds B A x of the changes to y fp32 [T, N], contiguous, in place, and returns y. sums: A x, fp32 [T, ranks].
    scales: fp32 [M, T], contiguous."""
    (rows, width), (adapters, rank) = y.shape, _checked(y, sums, changes, scales)
    block = min(_MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    _from_rank_kernel[(len(changes.tiles), triton.cdiv(rows, block))](
        y, sums, changes.b, scales, changes.tiles, rows, width, ADAPTERS=adapters, RANK=rank, WIDTH=sums.shape[1],
        ROWS=block, COLUMNS=OUTPUTS, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return y


def glu_from_rank(
    y: Tensor,
    sums: Tensor,
    changes: CudaChanges,
    scales: Tensor,
    activation: Gating,
    x: Fp16Operand,
    part: PackedPart,
    out: Fp16Operand,
    pdl: bool = False,
) -> Fp16Operand:
    """Writes activation(gate) * up to `out`, an fp16 operand [T, F], F a multiple of 128. Gate and up are the product y
    [T, 2F] of rows x and a part, plus the changes, given as for `add_from_rank`."""
    (rows, width), (adapters, rank) = y.shape, _checked(y, sums, changes, scales)
    half = width // 2
    assert half % _GATED_COLUMNS == 0 and out.fits(half) and not out.is_mma
    _glu_from_rank_kernel[(half // _GATED_COLUMNS, triton.cdiv(rows, _GATED_ROWS))](
        y, out.values, out.row_scale, x.row_scale, sums, changes.b, scales, rows, half, out.stride,
        product_bound(part), changes.largest, ADAPTERS=adapters, RANK=rank, WIDTH=sums.shape[1], ROWS=_GATED_ROWS,
        COLUMNS=_GATED_COLUMNS, EPILOGUE=EPILOGUES[activation], LAYOUT=int(out.layout), PDL=pdl, num_warps=4,
        maxnreg=128, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _checked(y: Tensor, sums: Tensor, changes: CudaChanges, scales: Tensor) -> tuple[int, int]:
    """The number of adapters and their rank; asserts that the tensors' shapes fit."""
    parts, adapters, rank, _ = changes.a.shape
    rows, width = y.shape
    assert scales.shape == (adapters, rows) and scales.is_contiguous() and y.is_contiguous()
    assert sums.shape == (rows, parts * adapters * rank) and sum(changes.parts) == width
    return adapters, rank


@gluon.jit
def _add_ranks(total, b_ptr, sums_ptr, rank, scale, place, block, BLOCKS: gl.constexpr):
    """total plus 16 rows of B from `rank` on, at places of a block of 128 each, those below BLOCKS, times their sums
    and a scale."""
    for first in gl.static_range(0, 16, 8):
        held, sums = (), ()
        for r in gl.static_range(8):  # all are on their way before the first is needed
            at = b_ptr + (rank + first + r).to(gl.int64) * (BLOCKS * 128) + place
            held = held + (gl.load(at, mask=block < BLOCKS, other=0.0),)
            sums = sums + (gl.load(sums_ptr + rank + first + r),)
        for r in gl.static_range(8):
            total += held[r].to(gl.float32) * (sums[r] * scale)
    return total


@DirectLaunch
@gluon.jit(do_not_specialize=["rows"])
def _norm_from_rank_kernel(
    x_ptr, weight_ptr, out_ptr, row_scale_ptr, sums_ptr, b_ptr, adapter_scales_ptr, rows, eps,
    WIDTH: gl.constexpr, BLOCKS: gl.constexpr, PADDED: gl.constexpr, WARPS: gl.constexpr, ADAPTERS: gl.constexpr,
    RANK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A program a row. B of an adapter that the row probably has is prefetched ahead of the wait."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = gl.program_id(0).to(gl.int64)
    column = row_columns(PADDED, WARPS)
    live = column < WIDTH
    OF_ROW: gl.constexpr = column.type.layout
    # A thread's columns lie one after the other in a row of B.
    L: gl.constexpr = gl.BlockedLayout([1, 1, 16], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    block = gl.arange(0, PADDED, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    place = block * 128 + gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None] * 16
    place += gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    weight = gl.load(weight_ptr + column, mask=live, other=0.0)
    COUNT: gl.constexpr = _count(ADAPTERS)
    each = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    each_scale = adapter_scales_ptr + each * rows + row
    hinted = gl.load(each_scale, mask=each < ADAPTERS, other=0.0, cache_modifier=".cg")
    near = gl.max(gl.where(hinted != 0.0, each, 0), 0)
    # A quarter of 16 rows of B: rows of x that follow one another share it.
    line = (
        gl.arange(0, PADDED * 8, layout=gl.BlockedLayout([1], [32], [WARPS], [0])) * 4 + gl.program_id(0) % 4
    )
    line = gl.where(line < BLOCKS * 32, line, 0).to(gl.int64) * 64
    prefetch(b_ptr + near.to(gl.int64) * (RANK * BLOCKS * 128) + line, True)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_ptr += row * WIDTH
    x = gl.load(x_ptr + column, mask=live, other=0.0)
    scales = gl.load(each_scale, mask=each < ADAPTERS, other=0.0, cache_modifier=".cg")
    sums_ptr += row * (ADAPTERS * RANK)
    total = gl.zeros([PADDED, 8, 16], gl.float32, L)
    scale = gl.load(adapter_scales_ptr + near * rows + row, cache_modifier=".cg")
    total = _add_ranks(total, b_ptr, sums_ptr, near * RANK, scale, place, block, BLOCKS)
    if (gl.sum(gl.where((scales != 0.0) & (each != near), 1, 0), 0) > 0) | (ADAPTERS > COUNT) | (RANK > 16):
        for adapter in range(ADAPTERS):
            scale = gl.load(adapter_scales_ptr + adapter * rows + row, cache_modifier=".cg")
            if scale != 0.0:
                for first in range(0, RANK, 16):
                    if (adapter != near) | (first > 0):
                        at = adapter * RANK + first
                        total = _add_ranks(total, b_ptr, sums_ptr, at, scale, place, block, BLOCKS)
    x += gl.convert_layout(gl.reshape(total, [PADDED, 8, 8, 2]), OF_ROW, assert_trivial=True)
    gl.store(x_ptr + column, x, mask=live)
    y, row_scale = normed_row(x, weight, eps, WIDTH, PADDED)
    gl.store(row_scale_ptr + row, row_scale)
    store_wgmma_layout(out_ptr + row * (BLOCKS * 128), y, BLOCKS, WARPS)


def norm_from_rank(
    y: Tensor,
    sums: Tensor,
    changes: CudaChanges,
    scales: Tensor,
    norm: RMSNorm,
    out: Fp16Operand,
    pdl: bool = False,
) -> Fp16Operand:
    """Runs `add_from_rank` for the changes of one matrix, and writes the RMSNorm of y to `out`, in the WGMMA layout."""
    (rows, width), (adapters, rank) = y.shape, _checked(y, sums, changes, scales)
    assert len(changes.parts) == 1 and changes.rows_of_b is not None and out.is_wgmma and out.fits(width)
    blocks, padded, warps = row_geometry(width)
    _norm_from_rank_kernel[(rows,)](
        y, norm.weight, out.values, out.row_scale, sums, changes.rows_of_b, scales, rows, norm.eps,
        WIDTH=width, BLOCKS=blocks, PADDED=padded, WARPS=warps, ADAPTERS=adapters, RANK=rank, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
