"""How programs of the matmul kernels cut a matrix: warps, rows of weights and of x, splits of the columns."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Geometry:
    """A program of the matvec kernels: `tiles` tiles of 16 weight rows, each shared by `k_warps` warps (powers of
    two) that split its columns; `ahead` chunks are read before they are needed; `registers` is a limit per thread
    (0: none) that leaves room on a multiprocessor for more programs, also for those of the next kernel;
    `early`: see q_dot.py.

    `k_warps` fixes the order in which a row is summed, so it may follow from the weight alone, never from the batch.
    """

    tiles: int
    k_warps: int
    ahead: int
    registers: int = 0
    early: bool = False

    @property
    def warps(self) -> int:
        return self.tiles * self.k_warps


@dataclass(frozen=True)
class FusedGeometry:
    """A program of the fused matmul: 8 * `token_tiles` rows by `n_warps` * `tiles` tiles of 16 weight rows, `tiles` a
    warp, each shared by `k_warps` warps; `splits` programs share the columns. All are powers of two but `splits`.
    `ahead`: a chunk of weights is read ahead of the one that is multiplied.

    `k_warps` and `splits` fix the order in which a row is summed.
    """

    token_tiles: int
    tiles: int
    n_warps: int
    k_warps: int
    splits: int = 1
    ahead: bool = True
    registers: int = 0


@dataclass(frozen=True)
class WgmmaGeometry:
    """A program of the fused matmul on Hopper: `warps` (a multiple of 4) tiles of 16 weight rows by `block` rows of x,
    up to 256 (0: see `wgmma_block`). `stages` sets of `columns` columns (128 or 256, no more than a chunk) of the rows
    are in shared memory; `overlap`: the matrix units work on 128 columns while the next ones are dequantized.
    `registers` is a limit per thread (0: none). `ring`: weights come through so many slots in shared memory, each of
    `columns` columns (0: through registers). `groups`: of 8 warps, two groups of 4 dequantize and multiply without
    waiting for each other.

    `splits` programs share the columns of every block but the first `whole`, or, `in_turn`, each program takes one
    split after the other: this fixes the order in which a row is summed.
    """

    warps: int
    splits: int = 1
    stages: int = 4
    overlap: bool = True
    registers: int = 0
    columns: int = 128
    ring: int = 0
    block: int = 0
    whole: int = 0
    groups: bool = False
    in_turn: bool = False


class Shape(NamedTuple):
    """What the geometry of a matmul follows from in a matrix, beside what is done with its products."""

    format: str
    rows: int
    cols: int
    chunks: int

    @property
    def tiles(self) -> int:
        return -(-self.rows // 16)
