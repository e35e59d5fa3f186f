"""How a launch of the matmul on Hopper's warp-group matrix instruction is made up: constants of its programs, grid and
scratch, all of which follow from shapes (kept per shape: working them out takes the host longer than the launch)."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from quengine.kernels.cuda.launch.kernel import Constants
from quengine.kernels.cuda.weights.geometry import WgmmaGeometry
from quengine.kernels.cuda.weights.launch_table import MOST_FEW, wgmma_block
from quengine.kernels.cuda.weights.layout import PackedLayout
from quengine.kernels.cuda.weights.many_rows import MOST_SHARES


class WgmmaFlags(NamedTuple):
    """What a launch does, beside its shapes.

    exact: weights are rounded to fp16 once, not their scales and minimums before. producer, consumer: see
    `launch_wgmma`. epilogue: see glu.py.
    """

    epilogue: int
    paired: bool
    exact: bool
    pdl: bool
    producer: bool = False
    consumer: bool = False


@dataclass(frozen=True)
class WgmmaProgram:
    """A program: the one compile-time constant of the kernels.

    It takes 16 * `warps` rows of a weight of `cols` columns and `block` rows of x, of which `stages` sets of `columns`
    columns are in shared memory. `splits` programs share the columns; of many rows, so many splits are one program's,
    one after the other, and how many programs share the columns of a block is an argument. `at_once` of their sums are
    read at a time. `overlap`: the matrix units multiply while weights are dequantized. `groups`: see WgmmaGeometry,
    and `warps` are those of one group.
    """

    layout: PackedLayout
    cols: int
    block: int
    warps: int
    splits: int
    at_once: int
    stages: int
    columns: int
    overlap: bool
    flags: WgmmaFlags
    groups: bool = False

    @property
    def chunks(self) -> int:
        return self.cols // self.layout.chunk

    @property
    def split_chunks(self) -> int:
        return -(-self.chunks // self.splits)

    @property
    def sets(self) -> int:
        """Sets of columns a chunk."""
        return self.layout.chunk // self.columns

    @property
    def together(self) -> int:
        """Chunks of a turn of the loop. A turn that overlaps has two matrix instructions or more: the operand of one is
        in registers until the next one has begun, and one alone would be written over by the next turn's."""
        return 2 if self.layout.chunk == 128 and self.split_chunks > 2 and not self.groups else 1


@dataclass(frozen=True)
class WgmmaPlan:
    """grid; tma_block: rows and columns of x that are copied at once; partial: fp32 of scratch; constants; blocks: how
    many have several programs; sharing: of many rows, the blocks that have one program, the programs of each of the
    others, and their chunks."""

    grid: tuple[int, ...]
    tma_block: tuple[int, int]
    partial: int
    constants: Constants
    blocks: int
    sharing: tuple[int, int, int] = (0, 1, 1)


@lru_cache(1024)
def wgmma_plan(
    geometry: WgmmaGeometry, layout: PackedLayout, weight_rows: int, cols: int, rows: int, flags: WgmmaFlags
) -> WgmmaPlan:
    """One part of a weight times `rows` rows."""
    blocks = -(-weight_rows // (16 * geometry.warps))
    if rows <= MOST_FEW:
        program = _program(geometry, layout, cols, rows, flags)
        return _plan(geometry, program, (blocks, program.splits), _partial(program, blocks))
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
    """Both parts of a weight in one launch, with the geometry of the first."""
    program = _program(geometry, layouts[0], cols, rows, flags)
    blocks = sum(-(-count // (16 * geometry.warps)) for count in weight_rows)
    second = replace(program, layout=layouts[1])
    return _plan(geometry, program, (blocks, program.splits), _partial(program, blocks), second)


@lru_cache(1024)
def wgmma_plan_grouped(
    geometry: WgmmaGeometry,
    layout: PackedLayout,
    cols: int,
    grid: tuple[int, ...],
    flags: WgmmaFlags,
    early: bool,
) -> WgmmaPlan:
    """Blocks of rows, of geometry.block each, times the matrices of their experts: see moe/grouped_wgmma.py. cols:
    those of the rows, a multiple of 128."""
    program = _program(geometry, layout, cols, geometry.block, flags)
    if not geometry.ring:
        return _plan(geometry, program, grid, 0, more={"EARLY": early})
    turns = -(-cols // geometry.columns)
    stages = min(geometry.stages, turns + 1)
    program = replace(program, columns=geometry.columns, stages=stages, overlap=False)
    return _plan(geometry, program, grid, 0, more={"EARLY": early, "SLOTS": min(geometry.ring, turns + 1)})


def _plan_many(geometry: WgmmaGeometry, program: WgmmaProgram, blocks: int) -> WgmmaPlan:
    """Of `blocks` blocks of many rows the first `geometry.whole` have one program, the others `geometry.splits`. One
    compiled kernel, `program`, takes any number of both."""
    splits, split_chunks = _cut(program.chunks, geometry.splits)
    assert geometry.in_turn or splits <= MOST_SHARES
    whole = blocks if geometry.in_turn or splits == 1 else min(geometry.whole, blocks)
    shared = blocks - whole
    plan = _plan(
        geometry, program, (whole + shared * splits,), splits * shared * 16 * geometry.warps * program.block
    )
    counters = shared * (geometry.warps // program.warps)
    return replace(plan, blocks=counters, sharing=(whole, splits, split_chunks))


def _program(
    geometry: WgmmaGeometry, layout: PackedLayout, cols: int, rows: int, flags: WgmmaFlags
) -> WgmmaProgram:
    chunks, block = cols // layout.chunk, geometry.block or wgmma_block(rows)
    splits, split_chunks = _cut(chunks, geometry.splits)
    program = WgmmaProgram(
        layout, cols, block, geometry.warps, splits, _sums_at_once(splits, block, geometry), geometry.stages,
        min(geometry.columns, layout.chunk), geometry.overlap, flags,
    )  # fmt: skip
    # Where the loop has one turn at most, the compiler may copy sums in front of the wait that is behind it.
    columns = program.together * layout.chunk
    return replace(program, overlap=geometry.overlap and split_chunks > program.together and columns > 128)


def _cut(chunks: int, splits: int) -> tuple[int, int]:
    """Up to so many splits of the chunks, each of which has some, and how many chunks all but the last have."""
    split_chunks = -(-chunks // splits)
    return -(-chunks // split_chunks), split_chunks


def _sums_at_once(splits: int, block: int, geometry: WgmmaGeometry) -> int:
    """How many splits' sums are read at once: a divisor of `splits`, for whose registers, block / 2 each, there is room
    when all else has ended."""
    registers = max(64 if geometry.registers or block > 64 else 128, block // 2)
    return max(n for n in range(1, splits + 1) if splits % n == 0 and n * (block // 2) <= registers)


def _partial(program: WgmmaProgram, blocks: int) -> int:
    """fp32 that programs leave for each other."""
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
