"""Launch geometry of the matmul kernels: warps, rows of weights and of x per program, splits of the columns."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Geometry:
    """A program of the matvec kernels: `tiles` tiles of 16 weight rows, each shared by `k_warps` warps (powers of two)
    that split its columns; `ahead` chunks are loaded before they are needed; `registers` limits registers per thread
    (0: no limit), so that more programs, also of the next kernel, fit on a multiprocessor; `early`: see q_dot.py.

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
    """A program of the fused matmul: 8 * `token_tiles` rows by `n_warps` * `tiles` tiles of 16 weight rows, `tiles`
    per warp, each shared by `k_warps` warps; `splits` programs share the columns. All are powers of two but `splits`.
    `ahead`: one chunk of weights is loaded ahead.

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
    """A program of the wgmma matmul: `warps` (a multiple of 4) tiles of 16 weight rows by `block` rows of x, up to 256
    (0: see `wgmma_block`).

    `stages` sets of `columns` columns of the rows (128 or 256, at most a chunk) are in shared memory; `overlap`: the
    matrix units work on 128 columns while the next are dequantized. `registers` limits registers per thread (0: no
    limit). `ring`: slots of a shared-memory ring buffer for weights, each of `columns` columns (0: weights pass
    through registers). `per_warp`: in a grouped matmul of few rows each warp multiplies by itself, with m16n8k16, which
    gives the same bits. `groups`: 8 warps form two groups of 4 that dequantize and multiply without waiting for each
    other.

    `splits` programs share the columns of every block but the first `whole`, or, with `in_turn`, each program takes
    one split after another: this fixes the order in which a row is summed.
    """

    warps: int
    splits: int = 1
    stages: int = 4
    overlap: bool = True
    registers: int = 0
    columns: int = 128
    ring: int = 0
    per_warp: bool = False
    block: int = 0
    whole: int = 0
    groups: bool = False
    in_turn: bool = False


class Shape(NamedTuple):
    """The properties of a matrix that a matmul's geometry depends on."""

    format: str
    rows: int
    cols: int
    chunks: int

    @property
    def tiles(self) -> int:
        return -(-self.rows // 16)
