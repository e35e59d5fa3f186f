"""Matrix times any number of rows on Hopper's warp-group matrix instruction, on packed weights.

As in matmul_fused.py, weights are read packed and dequantized to fp16 in registers, now as the left operand of wgmma;
the rows, the right operand, are staged in shared memory by the copy engine, some sets of 128 or 256 columns ahead, so
that all warps of a program share them and no register waits for them. The stored order of the weights fixes which
columns meet in an instruction; rows come with their columns in that order (half.py, "ordered").

Programs take 16 rows of weights a warp and up to 128 rows of x; where such programs are too few, `splits` of them
share the columns (wgmma_program.py). A matrix of two parts is one launch then. Where rows are more than 128, they are
cut into blocks of 128 or 256, and a program takes all columns: as one share, or, where a row's sums must be the same,
to the last bit, as among few rows, one share after the other, and adds them up in the same order.
Does not know: how weights become an operand (wgmma_operand.py), what is made of the sums (wgmma_store.py), where rows
come from, or when this way pays (matmul.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quengine.kernels.backend import Activation
from quengine.kernels.cuda.attention.attention_prefill import is_hopper
from quengine.kernels.cuda.gemm.half import HalfRows
from quengine.kernels.cuda.gemm.matmul_fused import FusedScratch
from quengine.kernels.cuda.gemm.wgmma_loop import multiply
from quengine.kernels.cuda.gemm.wgmma_program import begin_block, few_rows_program
from quengine.kernels.cuda.gemm.wgmma_store import store_block
from quengine.kernels.cuda.glu import EPILOGUES, RESIDUAL, ROWS, SILU, reach_of
from quengine.kernels.cuda.launch.relaunch import Constants, Copied, Relaunched
from quengine.kernels.cuda.weights.launch_table import (
    MOST_FEW,
    WgmmaGeometry,
    wgmma_block,
    wgmma_geometry,
)
from quengine.kernels.cuda.weights.layout import PackedLayout
from quengine.kernels.cuda.weights.packed import PackedPart

_STAGED = gl.NVMMASharedLayout(128, 16, 2)


@partial(Relaunched, layout=_STAGED)
@gluon.jit(do_not_specialize=["T"])  # any number of rows up to TB runs the same code
def _wgmma_kernel(
    low, high, scales, supers, x_rows, unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, partial_ptr, tickets_ptr,
    tiles, rows, first, N, T, gain, reach,
    FMT: gl.constexpr, K: gl.constexpr, TB: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    AT_ONCE: gl.constexpr, STAGES: gl.constexpr, SET: gl.constexpr, ASYNC: gl.constexpr, EXACT: gl.constexpr,
    PAIRED: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr, BEFORE: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Programs (16*WARPS rows of weights, share of the columns), up to TB rows of x. BEFORE, BEHIND: see
    `launch_wgmma`."""
    if PDL and not BEFORE:
        tl.extra.cuda.gdc_launch_dependents()
    block = gl.program_id(0)
    few_rows_program(
        (low, high, scales, supers), x_rows, (unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr),
        (partial_ptr, tickets_ptr), (tiles, rows, first, N, T, gain, reach),
        block, gl.program_id(1), block, gl.num_programs(0),
        FMT, K, TB, WARPS, SPLITS, AT_ONCE, STAGES, SET, ASYNC, EXACT, PAIRED, EPILOGUE, PDL, BEFORE, BEHIND,
    )  # fmt: skip


@partial(Relaunched, layout=_STAGED)
@gluon.jit(do_not_specialize=["T"])
def _wgmma_two_parts_kernel(
    low, high, scales, supers, x_rows, unscale_ptr, out_ptr, partial_ptr, tickets_ptr, tiles, rows, N, T, gain,
    low_2, high_2, scales_2, supers_2, tiles_2, rows_2, gain_2,
    FMT: gl.constexpr, FMT_2: gl.constexpr, K: gl.constexpr, TB: gl.constexpr, WARPS: gl.constexpr,
    SPLITS: gl.constexpr, AT_ONCE: gl.constexpr, STAGES: gl.constexpr, SET: gl.constexpr, ASYNC: gl.constexpr,
    EXACT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`_wgmma_kernel` for two parts of one matrix, whose types differ: the blocks of one behind those of the other."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place = gl.program_id(0)
    outs = (unscale_ptr, out_ptr, out_ptr, out_ptr)
    shared = (partial_ptr, tickets_ptr)
    blocks = (tiles + WARPS - 1) // WARPS
    if place < blocks:
        few_rows_program(
            (low, high, scales, supers), x_rows, outs, shared, (tiles, rows, 0, N, T, gain, 0.0),
            place, gl.program_id(1), place, gl.num_programs(0),
            FMT, K, TB, WARPS, SPLITS, AT_ONCE, STAGES, SET, ASYNC, EXACT, False, ROWS, PDL, False, False,
        )  # fmt: skip
    else:
        few_rows_program(
            (low_2, high_2, scales_2, supers_2), x_rows, outs, shared, (tiles_2, rows_2, rows, N, T, gain_2, 0.0),
            place - blocks, gl.program_id(1), place, gl.num_programs(0),
            FMT_2, K, TB, WARPS, SPLITS, AT_ONCE, STAGES, SET, ASYNC, EXACT, False, ROWS, PDL, False, False,
        )  # fmt: skip


@partial(Relaunched, layout=_STAGED)
@gluon.jit(do_not_specialize=["T"])
def _wgmma_blocks_kernel(
    low, high, scales, supers, x_rows, unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, tiles, rows, first, N,
    T, gain, reach,
    FMT: gl.constexpr, K: gl.constexpr, TB: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, SET: gl.constexpr, ASYNC: gl.constexpr, PAIRED: gl.constexpr, EPILOGUE: gl.constexpr,
    PDL: gl.constexpr, BEFORE: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Programs (TB rows of x, 16*WARPS rows of weights), for more rows of x than TB. All columns are a program's own,
    SPLITS shares of them added up in order."""
    CHUNKS: gl.constexpr = K // FMT.chunk
    SHARE: gl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TB, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    if PDL and not BEFORE:
        tl.extra.cuda.gdc_launch_dependents()
    token0 = gl.program_id(0) * TB
    block = gl.program_id(1)
    planes = (low, high, scales, supers)
    words, stages, ready, tile, lane = begin_block(
        planes, x_rows, block, tiles, 0, CHUNKS, token0,
        FMT, CHUNKS, TB, WARPS, STAGES, SET, EPILOGUE, PDL, BEFORE, BEHIND,
    )  # fmt: skip
    if SPLITS == 1:
        acc, words = multiply(
            planes, words, x_rows, stages, ready, tile, lane, 0, 0, CHUNKS, CHUNKS, token0, gain,
            FMT, CHUNKS, TB, WARPS, STAGES, SET, ASYNC, True, MMA, A,
        )  # fmt: skip
    else:
        acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
        for share in range(SPLITS):
            last = gl.minimum((share + 1) * SHARE, CHUNKS)
            one, words = multiply(
                planes, words, x_rows, stages, ready, tile, lane, 0, share * SHARE, last, CHUNKS, token0, gain,
                FMT, CHUNKS, TB, WARPS, STAGES, SET, ASYNC, True, MMA, A,
            )  # fmt: skip
            acc += one
    if PDL and BEHIND:
        tl.extra.cuda.gdc_wait()
    store_block(
        acc, block * (16 * WARPS), token0, unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, rows, first, N, T, gain,
        reach, WARPS, TB, PAIRED, EPILOGUE, 64 if EPILOGUE >= SILU else 32,
    )  # fmt: skip


def _small_gain(part: PackedPart) -> float:
    """The gain of weights whose codes are read as subnormal fp16: scales must fit fp16 when multiplied by 2^24. It
    brings the largest weight to 2^-5 or so; fp16 keeps its 11 bits down to 2^-14."""
    few = part.layout.bits == 2 and not part.layout.offset
    return part.gain * 2.0 ** (-11 if few else -9)


def uses_wgmma(device: torch.device, cols: int) -> bool:
    """Whether this kernel takes weights of `cols` columns on `device`."""
    return is_hopper(device) and cols % 128 == 0


def launch_wgmma(
    x: HalfRows,
    part: PackedPart,
    paired: bool,
    out: Tensor,
    first: int,
    scratch: FusedScratch,
    residual: Tensor | None = None,
    pdl: bool = False,
    before: bool = False,
    behind: bool = False,
    exact: bool = False,
    fixed: bool = False,
) -> None:
    """`launch_fused` for ordered rows; `out` may be the residual where rows are more than `MOST_FEW`.

    Where one matrix is several parts, with `pdl`: a launch `before` one of another part of it, and one `behind` such a
    launch, itself or another `behind` it. The latter needs nothing that the one in front writes, but the room for
    sums: it waits for its end only before it writes, and runs beside it until then. It may, because the one `before`
    lets it begin only when what both read is written.
    """
    geometry = wgmma_geometry(part, "rows", x.rows, fixed, behind)
    epilogue = ROWS if residual is None else RESIDUAL
    added = out if residual is None else residual
    _launch(
        x,
        part,
        geometry,
        paired,
        epilogue.value,
        added,
        (out, out, out.shape[1], first),
        scratch,
        pdl,
        exact,
        fixed,
        before,
        behind,
    )


def takes_two_parts(x: HalfRows, parts: Sequence[PackedPart], fixed: bool) -> bool:
    """Whether `launch_wgmma_two_parts` takes these rows and all parts of a matrix. With `fixed` sums each part keeps
    the shares that many rows have, so it is a launch of its own."""
    return x.ordered and x.rows <= MOST_FEW and not fixed and len(parts) == 2


def launch_wgmma_two_parts(
    x: HalfRows,
    parts: Sequence[PackedPart],
    out: Tensor,
    scratch: FusedScratch,
    pdl: bool = False,
    exact: bool = False,
) -> None:
    """Ordered rows times a matrix of two parts, fp32, to `out`, in one launch with the geometry of the first part: two
    launches beside each other take half as long again."""
    one, two = parts
    geometry = wgmma_geometry(one, "rows", x.rows)
    plan = _plan_two_parts(geometry, one.layout, two.layout, one.rows, two.rows, one.cols, x.rows, exact, pdl)
    assert x.rows * out.shape[1] < 2**31, "the kernel counts results in 32 bits"
    assert plan.partial == 0 or plan.grid[0] <= scratch.tickets.shape[0]
    gains = [part.gain if exact else _small_gain(part) for part in parts]
    _wgmma_two_parts_kernel.launch(
        plan.grid,
        (
            one.low, one.high, one.scales, one.supers, Copied(x.values, plan.copied), x.unscale, out,
            scratch.partial(plan.partial), scratch.tickets, one.tiles, one.rows, out.shape[1], x.rows, gains[0],
            two.low, two.high, two.scales, two.supers, two.tiles, two.rows, gains[1],
        ),
        plan.constants,
    )  # fmt: skip


def launch_wgmma_glu(
    x: HalfRows,
    part: PackedPart,
    activation: Activation,
    out: HalfRows,
    scratch: FusedScratch,
    pdl: bool = False,
    exact: bool = False,
    fixed: bool = False,
) -> None:
    """activation(gate) * up of ordered rows times a paired part, to ordered rows."""
    geometry = wgmma_geometry(part, "swiglu", x.rows, fixed)
    assert out.ordered
    outputs = (out.values, out.unscale, out.stride, 0)
    _launch(x, part, geometry, True, EPILOGUES[activation], out.unscale, outputs, scratch, pdl, exact, fixed)


def _launch(
    x: HalfRows,
    part: PackedPart,
    geometry: WgmmaGeometry,
    paired: bool,
    epilogue: int,
    residual: Tensor,
    outputs: tuple[Tensor, Tensor, int, int],
    scratch: FusedScratch,
    pdl: bool,
    exact: bool,
    fixed: bool,
    before: bool = False,
    behind: bool = False,
) -> None:
    """`outputs`: values, unscale (or anything), from a row to the next, first column."""
    out, unscale, stride, first = outputs
    exact = exact or fixed or x.rows > MOST_FEW
    plan = _plan(
        geometry, part.layout, part.rows, part.cols, x.rows, exact, paired, epilogue, pdl, before, behind
    )
    assert x.ordered and x.rows * stride < 2**31, "the kernel counts results in 32 bits"
    values = Copied(x.values, plan.copied)
    gain = part.gain if exact else _small_gain(part)
    matrices = (part.low, part.high, part.scales, part.supers, values, x.unscale, residual, out, unscale)
    sizes = (part.tiles, part.rows, first, stride, x.rows, gain, reach_of(part))
    if x.rows > MOST_FEW:
        _wgmma_blocks_kernel.launch(plan.grid, matrices + sizes, plan.constants)
    else:
        assert plan.partial == 0 or plan.grid[0] <= scratch.tickets.shape[0]
        shared = (scratch.partial(plan.partial), scratch.tickets)
        _wgmma_kernel.launch(plan.grid, matrices + shared + sizes, plan.constants)


@dataclass(frozen=True)
class _Plan:
    """What follows from the shapes of a launch: grid, block of x that is copied at once, fp32 that programs leave for
    each other, constants."""

    grid: tuple[int, int]
    copied: tuple[int, int]
    partial: int
    constants: Constants


def _at_once(splits: int, block: int, geometry: WgmmaGeometry) -> int:
    """How many shares' sums are read at once: a divisor of `splits`, for whose registers, block / 2 each, there is
    room when all else has ended."""
    registers = 64 if geometry.registers or block > 64 else 128
    return max(
        n for n in range(1, splits + 1) if splits % n == 0 and n * (block // 2) <= max(registers, block // 2)
    )


def _program_constants(
    geometry: WgmmaGeometry, layout: PackedLayout, cols: int, rows: int, pdl: bool
) -> dict[str, Any]:
    """What every kernel here is told of its programs, and how it is launched."""
    chunks = cols // layout.chunk
    share = -(-chunks // geometry.splits)
    return {
        "FMT": layout, "K": cols, "TB": geometry.block or wgmma_block(rows), "WARPS": geometry.warps,
        "SPLITS": -(-chunks // share),  # none without a share
        "STAGES": geometry.stages, "SET": min(geometry.columns, layout.chunk),
        # Where the loop has one turn at most, the compiler may copy sums in front of the wait that is behind it.
        "ASYNC": geometry.overlap and share > 1,
        "PDL": pdl, "num_warps": geometry.warps, "maxnreg": geometry.registers or None, "launch_pdl": pdl,
    }  # fmt: skip


@lru_cache(1024)
def _plan(
    geometry: WgmmaGeometry,
    layout: PackedLayout,
    weight_rows: int,
    cols: int,
    rows: int,
    exact: bool,
    paired: bool,
    epilogue: int,
    pdl: bool,
    before: bool,
    behind: bool,
) -> _Plan:
    named = _program_constants(geometry, layout, cols, rows, pdl)
    named |= {"PAIRED": paired, "EPILOGUE": epilogue, "BEFORE": before, "BEHIND": behind}
    block, splits = named["TB"], named["SPLITS"]
    blocks = -(-weight_rows // (16 * geometry.warps))
    copied = (block, named["SET"])
    if rows > MOST_FEW:
        return _Plan((-(-rows // block), blocks), copied, 0, Constants(named))
    named |= {"EXACT": exact, "AT_ONCE": _at_once(splits, block, geometry)}
    return _Plan((blocks, splits), copied, _partial(blocks, named), Constants(named))


@lru_cache(1024)
def _plan_two_parts(
    geometry: WgmmaGeometry,
    layout: PackedLayout,
    second: PackedLayout,
    weight_rows: int,
    second_rows: int,
    cols: int,
    rows: int,
    exact: bool,
    pdl: bool,
) -> _Plan:
    named = _program_constants(geometry, layout, cols, rows, pdl)
    named |= {"FMT_2": second, "EXACT": exact, "AT_ONCE": _at_once(named["SPLITS"], named["TB"], geometry)}
    blocks = sum(-(-count // (16 * geometry.warps)) for count in (weight_rows, second_rows))
    return _Plan(
        (blocks, named["SPLITS"]), (named["TB"], named["SET"]), _partial(blocks, named), Constants(named)
    )


def _partial(blocks: int, named: dict[str, Any]) -> int:
    """fp32 that programs leave for each other."""
    splits: int = named["SPLITS"]
    return splits * blocks * 16 * named["WARPS"] * named["TB"] if splits > 1 else 0
