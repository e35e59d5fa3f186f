"""The plan of a wgmma matmul launch: its programs' constants, grid and scratch, which follow from shapes.
Plans are cached per shape, as computing one takes the host longer than the launch.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from quengine.kernels.cuda.launch.kernel import Constants
from quengine.kernels.cuda.weights.geometry import WgmmaGeometry
from quengine.kernels.cuda.weights.launch_table import MOST_FEW, wgmma_block
from quengine.kernels.cuda.weights.layout import PackedLayout
from quengine.kernels.cuda.weights.many_rows import MOST_SHARES

MOST_WAITING = MOST_FEW // 8
"""The most programs of a block that wait for each other."""

GRANTED_BYTES = 48 << 10
"""Shared memory that a block has without a request for more."""


class WgmmaFlags(NamedTuple):
    """The options of a launch, besides its shapes.

    exact: weights are rounded to fp16 once, without rounding their scales and minimums first. producer, consumer: see
    `launch_wgmma`. epilogue: see glu.py. apart: programs that share a block's columns store rows of their own, fp32
    [splits, T, N], which the next launch adds. waiting: the GPU runs MOST_WAITING programs at a time, so that they may
    wait for each other.
    """

    epilogue: int
    paired: bool
    exact: bool
    pdl: bool
    producer: bool = False
    consumer: bool = False
    apart: bool = False
    waiting: bool = False


@dataclass(frozen=True)
class WgmmaProgram:
    """The compile-time constants of the kernels.

    A program takes 16 * `warps` rows of a weight of `cols` columns and `block` rows of x, and keeps `stages` sets of
    `columns` columns in shared memory. With few rows, `splits` programs share the columns; with many, one program
    computes `splits` splits in turn, and the number of programs that share a block's columns is an argument. `overlap`:
    the matrix units multiply while weights are dequantized. `groups`: see WgmmaGeometry; `warps` are then those of one
    group. `per_warp`: see there.
    """

    layout: PackedLayout
    cols: int
    block: int
    warps: int
    splits: int
    stages: int
    columns: int
    overlap: bool
    flags: WgmmaFlags
    groups: bool = False
    per_warp: bool = False

    @property
    def chunks(self) -> int:
        return self.cols // self.layout.chunk

    @property
    def split_chunks(self) -> int:
        return -(-self.chunks // self.splits)

    @property
    def parts(self) -> int:
        """The number of programs of a block that add its partial sums, a power of two. Each adds those of at least 8
        rows of x. With few rows, one program adds them sooner than several find each other.
        """
        parts = 1
        while self.flags.waiting and self.block > 16 and 2 * parts <= min(self.splits, self.block // 8):
            parts *= 2
        return parts

    @property
    def first_adding(self) -> int:
        """The number of the first program of a block that adds partial sums. It and the later ones wait for the whole
        block.

        Programs start in the order of their numbers. So only programs of one block can wait for one that has not
        started, and they are fewer than `parts`: all start where at least `parts` run at a time (`WgmmaFlags.waiting`).
        """
        return self.splits - self.parts

    @property
    def even(self) -> bool:
        """Whether the loop takes two chunks per iteration, so that their words need not be moved: where all splits have
        an even number of chunks, and there are registers for it.
        """
        alike = self.split_chunks % 2 == 0 and self.splits * self.split_chunks == self.chunks
        return alike and self.together == 1 and self.columns == 128 and not self.overlap

    @property
    def sets(self) -> int:
        """Sets of columns per chunk."""
        return self.layout.chunk // self.columns

    @property
    def together(self) -> int:
        """Chunks per iteration of the loop. An iteration that overlaps needs two matrix instructions or more:
        the operand of one stays in registers until the next has started, and a single one would be
        overwritten by the next iteration's.
        """
        return 2 if self.layout.chunk == 128 and self.split_chunks > 2 and not self.groups else 1


@dataclass(frozen=True)
class WgmmaPlan:
    """One launch. tma_block: rows and columns of x per copy. partial: fp32 of scratch. blocks: the number of blocks
    that several programs may share. sharing: for many rows, the number of blocks with one program, the programs of each
    other block, and their chunks. splits: the number of programs that share the columns of every block.
    """

    grid: tuple[int, ...]
    tma_block: tuple[int, int]
    partial: int
    constants: Constants
    blocks: int
    sharing: tuple[int, int, int] = (0, 1, 1)
    splits: int = 1


@lru_cache(1024)
def wgmma_plan(
    geometry: WgmmaGeometry, layout: PackedLayout, weight_rows: int, cols: int, rows: int, flags: WgmmaFlags
) -> WgmmaPlan:
    """The plan of one part of a weight times `rows` rows."""
    blocks = -(-weight_rows // (16 * geometry.warps))
    if rows <= MOST_FEW:
        program = _program(geometry, layout, cols, rows, flags)
        plan = _plan(geometry, program, (program.splits, blocks), _partial(program, blocks))
        return replace(plan, splits=program.splits, blocks=blocks)
    program = _program(
        geometry if geometry.in_turn else replace(geometry, splits=1), layout, cols, rows, flags
    )
    if geometry.groups:
        program = replace(program, groups=True, warps=geometry.warps // 2, overlap=False)
    return _plan_many(geometry, program, -(-rows // program.block) * blocks)


@lru_cache(1024)
def wgmma_plan_two_parts(
    geometry: WgmmaGeometry,
    layouts: tuple[PackedLayout, PackedLayout],
    weight_rows: tuple[int, int],
    cols: int,
    rows: int,
    flags: WgmmaFlags,
) -> WgmmaPlan:
    """The plan of both parts of a weight in one launch, with the geometry of the first."""
    program = _program(geometry, layouts[0], cols, rows, flags, layouts[1].staged_bytes)
    blocks = sum(-(-count // (16 * geometry.warps)) for count in weight_rows)
    second = replace(program, layout=layouts[1])
    plan = _plan(geometry, program, (program.splits, blocks), _partial(program, blocks), second)
    return replace(plan, blocks=blocks)


@lru_cache(1024)
def wgmma_plan_grouped(
    geometry: WgmmaGeometry,
    layout: PackedLayout,
    cols: int,
    grid: tuple[int, ...],
    flags: WgmmaFlags,
    early: bool,
) -> WgmmaPlan:
    """The plan of blocks of geometry.block rows times their experts' matrices, see moe/grouped_wgmma.py.
    cols: columns of the rows, a multiple of 128.
    """
    program = _program(geometry, layout, cols, geometry.block, flags)
    if not takes_turns(geometry, layout, cols):
        return _plan(geometry, program, grid, 0, more={"EARLY": early})
    turns = -(-cols // geometry.columns)
    stages = min(geometry.stages, turns + 1)
    program = replace(
        program, columns=geometry.columns, stages=stages, overlap=False, per_warp=geometry.per_warp
    )
    return _plan(geometry, program, grid, 0, more={"EARLY": early, "SLOTS": min(geometry.ring, turns + 1)})


def takes_turns(geometry: WgmmaGeometry, layout: PackedLayout, cols: int) -> bool:
    """Whether a grouped matmul takes `geometry.columns` columns at a time, even if they span several chunks."""
    return geometry.columns < cols and (
        geometry.ring > 0 or geometry.per_warp or layout.chunk < geometry.columns
    )


def _plan_many(geometry: WgmmaGeometry, program: WgmmaProgram, blocks: int) -> WgmmaPlan:
    """The plan of `blocks` blocks of many rows: the first `geometry.whole` have one program each, the others
    `geometry.splits`. One compiled kernel, `program`, serves any number of both.
    """
    splits, split_chunks = _cut(program.chunks, geometry.splits)
    assert geometry.in_turn or splits <= MOST_SHARES
    whole = blocks if geometry.in_turn or splits == 1 else min(geometry.whole, blocks)
    shared = blocks - whole
    plan = _plan(
        geometry, program, (whole + shared * splits,), splits * shared * 16 * geometry.warps * program.block
    )
    counters = shared * (geometry.warps // program.warps)
    every = 1 if whole else splits
    return replace(plan, blocks=counters, sharing=(whole, splits, split_chunks), splits=every)


def _program(
    geometry: WgmmaGeometry, layout: PackedLayout, cols: int, rows: int, flags: WgmmaFlags, beside: int = 0
) -> WgmmaProgram:
    """The constants of a launch's programs. beside: bytes of another part's codebook in shared memory."""
    chunks, block = cols // layout.chunk, geometry.block or wgmma_block(rows)
    splits, split_chunks = _cut(chunks, geometry.splits)
    set_columns = min(geometry.columns, layout.chunk)
    stages = _stages(geometry.stages, block, set_columns, layout.staged_bytes + beside)
    program = WgmmaProgram(
        layout, cols, block, geometry.warps, splits, stages, set_columns, geometry.overlap, flags,
    )  # fmt: skip
    # If the loop has at most one iteration, the compiler may move the copy of the sums before the wait for them.
    columns = program.together * layout.chunk
    return replace(program, overlap=geometry.overlap and split_chunks > program.together and columns > 128)


def _stages(stages: int, block: int, columns: int, books: int) -> int:
    """The number of stages, of block x columns fp16 and a barrier each: `stages`, or the next number with which the
    launch also gets shared memory for the codebooks, of `books` bytes. Triton requests more than GRANTED_BYTES only if
    its own part, without `books`, is larger.
    """
    own = 2 * block * columns + 8
    while stages * own <= GRANTED_BYTES < stages * own + books:
        stages += 1
    return stages


def _cut(chunks: int, splits: int) -> tuple[int, int]:
    """The number of non-empty splits, at most `splits`, and the chunks of each but the last."""
    split_chunks = -(-chunks // splits)
    return -(-chunks // split_chunks), split_chunks


def _partial(program: WgmmaProgram, blocks: int) -> int:
    """fp32 of scratch for partial sums."""
    return program.splits * blocks * 16 * program.warps * program.block if program.splits > 1 else 0


def _plan(
    geometry: WgmmaGeometry,
    program: WgmmaProgram,
    grid: tuple[int, ...],
    partial: int,
    second: WgmmaProgram | None = None,
    more: dict[str, object] | None = None,
) -> WgmmaPlan:
    named: dict[str, object] = {
        "P": program, "num_warps": program.warps, "maxnreg": geometry.registers or None,
        "launch_pdl": program.flags.pdl, **(more or {}),
    }  # fmt: skip
    if second is not None:
        named["P_2"] = second
    return WgmmaPlan(grid, (program.block, program.columns), partial, Constants(named), grid[0])
