"""Rows times a packed weight and times A of its changes, in one launch of Hopper's matmul (gemm/matmul_wgmma.py).

The programs of the weight's blocks leave room on most multiprocessors. There, further programs compute A x, each for
some ranks and columns. A lies in the order of the matrix unit's left operand (rank_words.py), and rows of x are staged
as in the weight's programs. Of the programs with the same ranks, the last to end adds up their sums, in the order of
the columns:

    s[t, (p, m, r)] = sum over k of a[p, m, r, k] x[t, k]

The next launch reads s, and adds B s to the product (from_rank.py). If no row has an adapter, its A is not read, and
its sums are zero.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout
from quengine.kernels.cuda.gemm.matmul_wgmma import STAGED, subnormal_weight_scale
from quengine.kernels.cuda.gemm.mma import prefetch
from quengine.kernels.cuda.gemm.wgmma_loop import copy_set
from quengine.kernels.cuda.gemm.wgmma_operand import words_operand
from quengine.kernels.cuda.gemm.wgmma_plan import (
    MOST_WAITING,
    WgmmaFlags,
    WgmmaPlan,
    WgmmaProgram,
    wgmma_plan,
    wgmma_plan_two_parts,
)
from quengine.kernels.cuda.gemm.wgmma_program import (
    allocate_stages,
    few_rows_program,
    leave,
    partial_offsets,
    wgmma_matrix,
)
from quengine.kernels.cuda.gemm.wgmma_store import WgmmaOutput
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.glu import epilogue_adding
from quengine.kernels.cuda.launch.gpu import runs_together
from quengine.kernels.cuda.launch.kernel import Constants, Copied, DirectLaunch
from quengine.kernels.cuda.lora.low_rank import CudaChanges, LowRankScratch
from quengine.kernels.cuda.weights.geometry import WgmmaGeometry
from quengine.kernels.cuda.weights.launch_table import MOST_FEW, wgmma_geometry
from quengine.kernels.cuda.weights.layout import PackedLayout
from quengine.kernels.cuda.weights.many_rows import MULTIPROCESSORS
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight
from quengine.kernels.lora.low_rank import RANKS_AT_ONCE

_SHARE_COLUMNS = 512
"""The fewest columns of A that a program takes, if A has as many."""
_REGISTERS, _SHARED_BYTES, _RESERVED_BYTES = 65536, 227 << 10, 1 << 10
"""Registers and shared memory of a multiprocessor, and the shared memory that each program takes besides its own."""
_MOST_REGISTERS = 168, 255
"""Limits on registers per thread where the matmul alone has none: for up to 64 rows, and for more."""


@dataclass(frozen=True)
class RankShape:
    """The shape of A: tiles of 16 ranks, chunks of 128 columns, and the adapters and their rank for each matrix."""

    tiles: int
    chunks: int
    adapters: int
    rank: int


@dataclass(frozen=True)
class RankProgram:
    """Compile-time constants of the programs of A. `splits` of them share the `all_sets` sets of columns of a block of
    tiles: each but the last takes `sets`. The sums of `at_once` splits are read at a time."""

    shape: RankShape
    blocks: int
    splits: int
    sets: int
    all_sets: int
    at_once: int

    @property
    def programs(self) -> int:
        return self.blocks * self.splits


@gluon.jit
def _used(scales_ptr, tile, T, P: gl.constexpr, C: gl.constexpr):
    """Of each thread, whether any row has the adapter of its warp's tile, int32 [thread]; tile: of block [WARPS]."""
    WARPS: gl.constexpr = P.warps
    TB: gl.constexpr = P.block
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    THREAD: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, L))
    token = gl.expand_dims(gl.arange(0, TB, layout=gl.SliceLayout(0, L)), 0)
    of_warp = gl.minimum(tile + warp, C.shape.tiles - 1)
    adapter = gl.expand_dims(of_warp * 16 // C.shape.rank % C.shape.adapters, 1)
    scale = gl.load(scales_ptr + adapter * T + token, mask=token < T, other=0.0, cache_modifier=".cg")
    most = gl.max(gl.abs(scale), 1)
    lane = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, L)), 0)
    each = gl.expand_dims(gl.where(most > 0.0, 1, 0), 1) + 0 * lane
    return gl.convert_layout(gl.reshape(each, [32 * WARPS]), THREAD)


@gluon.jit
def _load_words(rank_words_ptr, tile, chunk, lane, used, C: gl.constexpr):
    """The 32 words of a lane of a chunk of its tile; zeros where they are not used."""
    at = (tile.to(gl.int64) * C.shape.chunks + chunk) * 1024 + lane
    words = ()
    for i in gl.static_range(32):
        words = words + (gl.load(rank_words_ptr + at + i * 32, mask=used, other=0),)
    return words


@gluon.jit
def _rank_sums(
    acc, split, block, partial_ptr, counters_ptr, MMA: gl.constexpr, P: gl.constexpr, C: gl.constexpr
):
    """The sums of all splits, and True, in the last of a block's programs to get here."""
    SIZE: gl.constexpr = 16 * P.warps * P.block
    AT_ONCE: gl.constexpr = C.at_once
    spread = partial_offsets(MMA, P.warps, P.block)
    last = leave(
        acc, partial_ptr + (split * C.blocks + block) * SIZE + spread, counters_ptr + block, C.splits
    )
    if last:
        gl.store(counters_ptr + block, 0)
        at = partial_ptr + block * SIZE + spread
        acc = gl.load(at, cache_modifier=".cg")
        for start in range(1, C.splits, AT_ONCE):
            for i in gl.static_range(AT_ONCE):
                here = start + i < C.splits
                acc += gl.load(
                    at + (start + i) * (C.blocks * SIZE), mask=here, other=0.0, cache_modifier=".cg"
                )
    return acc, last


@gluon.jit
def _rank_program(
    x_rows, row_scale_ptr, rank_words_ptr, adapter_scales_ptr, sums_ptr, partial_ptr, counters_ptr, program, T,
    P: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The sums of block number `program` modulo the blocks of ranks, over a split of the columns."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [P.warps, 1], [16, P.block, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WARPS: gl.constexpr = P.warps
    TB: gl.constexpr = P.block
    STAGES: gl.constexpr = P.stages
    HALVES: gl.constexpr = P.columns // 128
    block, split = program % C.blocks, program // C.blocks
    first = split * C.sets
    count = gl.minimum(C.sets, C.all_sets - first)
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    tile = gl.minimum(block * WARPS + (thread >> 5), C.shape.tiles - 1)  # tiles past the end are not stored
    lane = thread & 31
    stages, ready = allocate_stages(x_rows, P)
    if P.flags.pdl:
        # By the scales as they are now, perhaps of an earlier step.
        hinted = _used(adapter_scales_ptr, block * WARPS, T, P, C) != 0
        for n in range(count * HALVES):
            at = (tile.to(gl.int64) * C.shape.chunks + first * HALVES + n) * 1024 + lane * 32
            prefetch(rank_words_ptr + gl.where(hinted, at, 0), True)
        tl.extra.cuda.gdc_wait()
    for i in gl.static_range(STAGES):
        copy_set(x_rows, stages, ready, i, i, first, count, 0, P)
    used = _used(adapter_scales_ptr, block * WARPS, T, P, C) != 0
    acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
    words = _load_words(rank_words_ptr, tile, first * HALVES, lane, used, C)
    for n in range(count):
        slot = n % STAGES
        rows = stages.index(slot)
        for half in gl.static_range(HALVES):
            chunk = gl.minimum((first + n) * HALVES + half + 1, C.shape.chunks - 1)
            later = _load_words(rank_words_ptr, tile, chunk, lane, used, C)
            a = words_operand(words, WARPS, A)
            if half == 0:
                mbarrier.wait(ready.index(slot), (n // STAGES) & 1)
            x = rows if HALVES == 1 else rows.slice(half * 128, 128, 1)
            acc = warpgroup_mma(a, x.permute((1, 0)), acc)
            words = later
        tl.debug_barrier()  # all warps have read the set, which the next copy overwrites
        copy_set(x_rows, stages, ready, n + STAGES, slot, first, count, 0, P)
    finished = True
    if C.splits > 1:
        acc, finished = _rank_sums(acc, split, block, partial_ptr, counters_ptr, MMA, P, C)
    if finished:
        WIDTH: gl.constexpr = 16 * C.shape.tiles
        rank = gl.expand_dims(
            block * (16 * WARPS) + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, MMA)), 1
        )
        token = gl.arange(0, TB, layout=gl.SliceLayout(0, MMA))
        scale = gl.expand_dims(gl.load(row_scale_ptr + token, mask=token < T, other=0.0), 0)
        token = gl.expand_dims(token, 0)
        gl.store(sums_ptr + token * WIDTH + rank, acc * scale, mask=(token < T) & (rank < WIDTH))


@partial(DirectLaunch, layout=STAGED)
@gluon.jit(do_not_specialize=["T"])
def _rank_matmul_kernel(
    low, high, scales, supers, x_rows, row_scale_ptr, residual_ptr, out_ptr, partial_ptr, arrivals_ptr, tiles, rows,
    N, T, weight_scale, low_2, high_2, scales_2, supers_2, tiles_2, rows_2, weight_scale_2, rank_words_ptr,
    adapter_scales_ptr, sums_ptr, rank_partial_ptr, counters_ptr,
    P: gl.constexpr, P_2: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Grid: (splits; blocks of weight rows, those of a second part, and some for the programs of A)."""
    if P.flags.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    place = gl.program_id(1)
    blocks = (tiles + P.warps - 1) // P.warps
    every = blocks
    if P_2 is not None:
        every = blocks + (tiles_2 + P.warps - 1) // P.warps
    if place < blocks:
        matrix = wgmma_matrix((low, high, scales, supers), tiles, rows, weight_scale, P)
        output = WgmmaOutput(row_scale_ptr, residual_ptr, out_ptr, out_ptr, 0, N, T, 0.0)
        few_rows_program(
            matrix, x_rows, output, partial_ptr, arrivals_ptr, place, gl.program_id(0), place, every, P
        )  # fmt: skip
    elif place < every:
        if P_2 is not None:
            matrix_2 = wgmma_matrix((low_2, high_2, scales_2, supers_2), tiles_2, rows_2, weight_scale_2, P_2)
            output_2 = WgmmaOutput(row_scale_ptr, residual_ptr, out_ptr, out_ptr, rows, N, T, 0.0)
            few_rows_program(
                matrix_2, x_rows, output_2, partial_ptr, arrivals_ptr, place - blocks, gl.program_id(0), place,
                every, P_2,
            )  # fmt: skip
    else:
        program = (place - every) * gl.num_programs(0) + gl.program_id(0)
        if program < C.programs:
            _rank_program(
                x_rows, row_scale_ptr, rank_words_ptr, adapter_scales_ptr, sums_ptr, rank_partial_ptr, counters_ptr,
                program, T, P, C,
            )  # fmt: skip


def _registers(geometry: WgmmaGeometry, made: WgmmaProgram) -> int:
    """The limit of registers of a thread."""
    return geometry.registers or _MOST_REGISTERS[made.block > 64]


def _places_left(plan: WgmmaPlan, geometry: WgmmaGeometry) -> int:
    """How many programs still fit in the last wave of a matmul: any further one would start when others have ended."""
    made: WgmmaProgram = plan.constants.named["P"]
    by_registers = _REGISTERS // (32 * made.warps * _registers(geometry, made))
    by_memory = _SHARED_BYTES // (2 * made.stages * made.block * made.columns + _RESERVED_BYTES)
    slots = MULTIPROCESSORS * max(1, min(by_registers, by_memory))
    return -(plan.grid[0] * plan.grid[1]) % slots


@lru_cache(1024)
def _planned(
    geometry: WgmmaGeometry,
    layouts: tuple[PackedLayout, ...],
    weight_rows: tuple[int, ...],
    cols: int,
    rows: int,
    flags: WgmmaFlags,
    shape: RankShape,
) -> tuple[WgmmaPlan, RankProgram]:
    """The plan of a matmul of one or two parts, and of the programs of A beside it."""
    if len(layouts) == 2:
        (one, two), (first, second) = layouts, weight_rows
        plan = wgmma_plan_two_parts(geometry, (one, two), (first, second), cols, rows, flags)
    else:
        plan = wgmma_plan(geometry, layouts[0], weight_rows[0], cols, rows, flags)
    named = plan.constants.named
    made: WgmmaProgram = named["P"]
    sets, blocks = -(-cols // made.columns), -(-shape.tiles // made.warps)
    shares = max(1, min(_places_left(plan, geometry) // blocks, sets * made.columns // _SHARE_COLUMNS))
    of_share = -(-sets // min(shares, sets))
    program = RankProgram(shape, blocks, -(-sets // of_share), of_share, sets, max(1, 128 // made.block))
    splits, across = plan.grid
    grid = (splits, across + -(-program.programs // splits))
    constants = Constants({"P_2": None, **named, "C": program, "maxnreg": _registers(geometry, made)})
    return replace(plan, grid=grid, constants=constants), program


def takes_ranks(rows: int, weight: PackedWeight, changes: CudaChanges, workspace: MatmulWorkspace) -> bool:
    """Whether `rank_matmul` takes these: few rows on Hopper, not batch-invariant, a weight of one or two packed parts,
    and an A that has words."""
    packed = len(weight.parts) <= 2 and all(isinstance(part, PackedPart) for part in weight.parts)
    few = rows <= MOST_FEW and workspace.layout(rows) is OperandLayout.WGMMA and not workspace.batch_invariant
    return few and packed and changes.words_of_a is not None


def rank_matmul(
    x: Fp16Operand,
    weight: PackedWeight,
    changes: CudaChanges,
    scales: Tensor,
    workspace: MatmulWorkspace,
    scratch: LowRankScratch,
    addend: Tensor | None = None,
    pdl: bool = False,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Two results: x [T, K] times the weight, plus an addend fp32 [T, N] or [N], as fp32 [T, N]; and A x of the
    changes, fp32 [T, ranks], which stays in the scratch until the next launch with it.

    scales: fp32 [M, T], contiguous. exact: as for `matmul`. `takes_ranks` says which arguments are taken.
    """
    words, (matrices, adapters, rank, _) = changes.words_of_a, changes.a.shape
    parts = [part for part in weight.parts if isinstance(part, PackedPart)]
    assert words is not None and len(parts) == len(weight.parts) and x.fits(weight.cols)
    assert scales.shape == (adapters, x.rows) and scales.is_contiguous()
    one, two = parts[0], parts[-1]
    kind = "swiglu" if weight.paired else "rows"
    geometry = wgmma_geometry(one, kind, x.rows, beside=two.rows if len(parts) == 2 else 0)
    waiting = runs_together(MOST_WAITING)
    flags = WgmmaFlags(epilogue_adding(addend), weight.paired, exact, pdl, waiting=waiting)
    shape = RankShape(matrices * adapters * rank // RANKS_AT_ONCE, words.shape[1], adapters, rank)
    plan, program = _planned(
        geometry, tuple(part.layout for part in parts), tuple(part.rows for part in parts), x.values.shape[1], x.rows,
        flags, shape,
    )  # fmt: skip
    out = torch.empty(x.rows, weight.rows, dtype=torch.float32, device=x.values.device)
    assert out.numel() < 2**31, "the kernel counts results in 32 bits"
    partials, arrivals = workspace.scratch.take(plan.partial, plan.blocks)
    count, size = x.rows * shape.tiles * RANKS_AT_ONCE, 16 * geometry.warps * plan.tma_block[0]
    sums, counters, _ = scratch.take(count + program.programs * size, program.blocks)
    weight_scales = [part.weight_scale if exact else subnormal_weight_scale(part) for part in (one, two)]
    _rank_matmul_kernel.launch(
        plan.grid,
        (
            *one.planes, Copied(x.values, plan.tma_block), x.row_scale, out if addend is None else addend, out,
            partials, arrivals, one.tiles, one.rows, weight.rows, x.rows, weight_scales[0], *two.planes, two.tiles,
            two.rows, weight_scales[1], words, scales, sums, sums[count:], counters,
        ),
        plan.constants,
    )  # fmt: skip
    return out, sums[:count].view(x.rows, -1)
