"""How the wgmma matmul cuts more than 128 rows: the kind of program, and the number of programs that share a block's
columns, are those with the least predicted time.

Times are for Q4_K on one H200 (`python -m benchmarks.cuda.many_rows`); only their ratios matter, which other types
share.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quengine.kernels.cuda.weights.geometry import Shape, WgmmaGeometry

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200."""

MOST_SHARES = 4
"""The most programs that may share a block's columns."""

_TIMED_COLUMNS = 256

_APART = 4e6
"""Bytes per microsecond at which the rows of splits are written, and added by the next launch."""


@dataclass(frozen=True)
class _Program:
    """The measured speed of one kind of program. places: programs that run at a time.

    few, full: microseconds per 256 columns while at most half of the places are taken, and while all are. sharing,
    each: microseconds that split columns add to a launch, once and for each program of a split. apart: those that they
    add, once, where the next launch adds the splits.
    """

    geometry: WgmmaGeometry
    places: int
    few: float
    full: float
    sharing: float
    each: float
    apart: float

    def blocks(self, shape: Shape, rows: int) -> int:
        return -(-shape.tiles // self.geometry.warps) * -(-rows // self.geometry.block)

    def rate(self, programs: int) -> float:
        """Microseconds per 256 columns with `programs` programs running at a time."""
        beyond = min(1.0, max(0.0, 2 * programs / self.places - 1))
        return self.few + beyond * (self.full - self.few)

    def time(
        self, blocks: int, chunks: int, columns: float, whole: int, splits: int, added: float | None = None
    ) -> float:
        """Predicted microseconds of a launch: the first `whole` of `blocks` blocks have one program each,
        `splits` share each of the others. columns: columns per chunk, in units of 256. added: microseconds to store
        and add a split's rows, if the next launch adds them; else None.
        """
        waves, rest = divmod(whole, self.places)
        time = waves * chunks * self.full + (chunks * self.rate(rest) if rest else 0)
        if whole == blocks:
            return columns * time
        sharing = (blocks - whole) * splits
        waves, rest = divmod(sharing, self.places)
        time += -(-chunks // splits) * (waves * self.full + (self.rate(rest) if rest else 0))
        return columns * time + (
            self.sharing + sharing * self.each if added is None else self.apart + splits * added
        )


_PROGRAMS = (
    _Program(WgmmaGeometry(8, 1, 3, block=256, groups=True), MULTIPROCESSORS, 2.6, 3.05, 8, 0.06, 6),
    _Program(WgmmaGeometry(4, 1, 3, block=128), 2 * MULTIPROCESSORS, 1.45, 1.9, 0.5, 0.024, 3),
)


def many_rows_geometry(
    shape: Shape, rows: int, splits: int, consumer: bool, apart: bool = False
) -> WgmmaGeometry:
    """Geometry for `rows` rows. `splits`: the number summed in order, as with few rows (0: columns may be
    shared in any way). A PDL `consumer` fills the multiprocessors that its producer leaves, so half of its
    own time counts, plus the time that it keeps all of them busy. apart: the next launch adds the splits of all blocks,
    if there are several.
    """
    if splits > 1:  # in-order sums need the registers of a second sum: no blocks of 256 rows
        blocks = -(-shape.tiles // 8) * -(-rows // 128)
        return WgmmaGeometry(8 if blocks >= MULTIPROCESSORS else 4, splits, 3, block=128, in_turn=True)
    choices = _choices(shape, rows, MOST_SHARES if splits == 0 else 1, consumer, apart)
    return min(choices, key=lambda choice: choice[0])[1]


def _choices(
    shape: Shape, rows: int, most: int, consumer: bool, apart: bool
) -> Iterator[tuple[float, WgmmaGeometry]]:
    """The ways to cut, with up to `most` programs per block: predicted microseconds and geometry."""
    columns = shape.cols / shape.chunks / _TIMED_COLUMNS
    for program in _PROGRAMS:
        blocks = program.blocks(shape, rows)
        work = blocks * shape.chunks * columns * program.full / program.places
        for splits in range(1, min(most, shape.chunks) + 1):
            whole = blocks if splits == 1 else blocks // program.places * program.places
            if splits > 1 and whole == blocks:
                continue
            time = program.time(blocks, shape.chunks, columns, whole, splits)
            geometry = replace(program.geometry, splits=splits, whole=whole)
            yield work + time / 2 if consumer else time, geometry
            if apart and splits > 1:
                added = 4 * rows * shape.rows / _APART
                time = program.time(blocks, shape.chunks, columns, 0, splits, added)
                yield time, replace(geometry, whole=0)
