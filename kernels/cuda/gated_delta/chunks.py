"""The relations between the rows of a prompt's chunk, for all chunks at once: two matrices for each chunk and value
head.

A chunk has C rows with queries q, keys k, gates beta and decays g; G is the running sum of g. With S the state before
the chunk, the errors d that the state takes solve a triangular system:

    d_i = beta_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_i k_j) d_j)
    o_i = exp(G_i) S^T q_i + sum over j <= i of exp(G_i - G_j) (q_i k_j) d_j

So d = (1 + L)^-1 r with L_ij = beta_i exp(G_i - G_j) (k_i k_j) below the diagonal and r_i = beta_i (v_i - exp(G_i)
S^T k_i). `solve` is (1 + L)^-1, `reach` the matrix of the second sum; neither depends on S. Source: Yang et al. 2024
(the WY form of the gated delta rule); Bischof & Van Loan 1987.

The inverse is built from inverses (') of smaller blocks on the diagonal, from 1 row to C: that of [[A, 0], [B, D]] is
[[A', 0], [-D' B A', D']]. This is as stable as substitution. A series of powers of L is not: its entries grow like
binomials where keys are alike.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.attention.prefill_tiles import TILE_FIELDS
from quengine.kernels.cuda.gated_delta.arithmetic import Net, key_head_of
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.forward_batch import PrefillTiles

PRECISION = tl.constexpr("tf32x3")
"""The precision of products: three products on the tf32 matrix units, which lose only the last two or three bits of
fp32 operands. A single one has fp16's 11 bits, and its error would add up in an inverse and in a state that is summed
over thousands of positions; "ieee" is exact, and leaves the matrix units idle."""

_FIELDS = tl.constexpr(TILE_FIELDS)


def chunk_rows(head_dim: int) -> int:
    """Rows of a chunk; the rows of a tile are a multiple of it. With heads of 256, 64 rows need more shared memory than
    sm_89 has."""
    return 64 if head_dim <= 128 else 32


@triton.jit
def _with_blocks_below(inverse, lower, C: tl.constexpr, SIZE: tl.constexpr):
    """The inverses of blocks of 2 * SIZE on the diagonal, from those of SIZE."""
    row = tl.arange(0, C)[:, None] // SIZE
    column = tl.arange(0, C)[None, :] // SIZE
    below = tl.where((row % 2 == 1) & (column == row - 1), lower, 0.0)
    part = tl.dot(inverse, below, input_precision=PRECISION)
    return inverse - tl.dot(part, inverse, input_precision=PRECISION)


@triton.jit
def _unit_inverse(lower, C: tl.constexpr):
    """(1 + lower)^-1 of a matrix [C, C] with nothing on and above its diagonal."""
    i = tl.arange(0, C)
    pair = (i[:, None] % 2 == 1) & (i[None, :] == i[:, None] - 1)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, tl.where(pair, -lower, 0.0))
    inverse = _with_blocks_below(inverse, lower, C, 2)
    inverse = _with_blocks_below(inverse, lower, C, 4)
    inverse = _with_blocks_below(inverse, lower, C, 8)
    if C > 16:
        inverse = _with_blocks_below(inverse, lower, C, 16)
    if C > 32:
        inverse = _with_blocks_below(inverse, lower, C, 32)
    return inverse


@DirectLaunch
@triton.jit
def _chunks_kernel(
    qkv_ptr, gates_ptr, tile_ptr, solve_ptr, reach_ptr,
    NET: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (chunk, value head); PARTS: chunks in a tile."""
    wait_then_launch(PDL)
    D: tl.constexpr = NET.head_dim
    BLOCK_D: tl.constexpr = 32 if D > 32 else D
    PARTS_D: tl.constexpr = D // BLOCK_D
    CHANNELS: tl.constexpr = (2 * NET.key_heads + NET.value_heads) * D
    head = tl.program_id(1)
    field = tile_ptr + tl.program_id(0) // PARTS * _FIELDS
    begin = tl.load(field + 1) + tl.program_id(0) % PARTS * C
    end = tl.load(field + 2)
    if begin < end:
        i = tl.arange(0, C)
        live = begin + i < end
        row = (tl.load(field) + begin + i).to(tl.int64)
        gate = gates_ptr + row * (2 * NET.value_heads) + head
        beta = tl.load(gate + NET.value_heads, mask=live, other=0.0)
        sums = tl.cumsum(tl.load(gate, mask=live, other=0.0), 0)
        like = tl.zeros([C, C], tl.float32)
        near = tl.zeros([C, C], tl.float32)
        place = (
            qkv_ptr + row[:, None] * CHANNELS + key_head_of(head, NET) * D + tl.arange(0, BLOCK_D)[None, :]
        )
        for part in range(PARTS_D):
            q = tl.load(place + part * BLOCK_D, mask=live[:, None], other=0.0)
            k = tl.load(place + (NET.key_heads * D + part * BLOCK_D), mask=live[:, None], other=0.0)
            like = tl.dot(k, tl.trans(k), like, input_precision=PRECISION)
            near = tl.dot(q, tl.trans(k), near, input_precision=PRECISION)
        behind = i[:, None] >= i[None, :]
        decay = tl.exp(tl.where(behind, sums[:, None] - sums[None, :], float("-inf")))
        lower = tl.where(i[:, None] > i[None, :], beta[:, None] * decay * like, 0.0)
        at = (row[:, None] * NET.value_heads + head) * C + i[None, :]
        tl.store(reach_ptr + at, decay * near, mask=live[:, None])
        tl.store(solve_ptr + at, _unit_inverse(lower, C), mask=live[:, None])


def chunk_matrices(
    qkv: Tensor, gates: Tensor, net: Net, tiles: PrefillTiles, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """`solve` and `reach`, each fp32 [T, value_heads, C]: row t of them is that row of its chunk's matrices. Rows
    outside of all chunks are not written."""
    size = chunk_rows(net.head_dim)
    assert tiles.block_rows % size == 0
    parts = tiles.block_rows // size
    shape = (len(qkv), net.value_heads, size)
    solve, reach = (torch.empty(shape, dtype=torch.float32, device=qkv.device) for _ in range(2))
    _chunks_kernel[(tiles.tiles.shape[0] * parts, net.value_heads)](
        qkv, gates, tiles.tiles, solve, reach,
        NET=net, C=size, PARTS=parts, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return solve, reach
