"""All-reduce and all-gather of few rows over peer memory, one launch each.

    out = ((x_0 + x_1) + x_2) + ...                out = x_0 | x_1 | x_2 | ...

The exchange is described in peers.py. Defined in kernels/ranks/communicator.py. On 2 H200s (torch 2.11, Triton 3.6) a
sum of 8 x 4096 values, with the residual, takes 2.9 us of a decode step (`python -m benchmarks.parallel.by_ranks
mistral-7b --ranks 2 --profile`); NCCL takes 24.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.cuda.ranks.peers import (
    PeerBuffers,
    exchange_sum,
    finish_exchange,
    next_sequence,
    push,
    receive,
    turn,
)

BLOCK = 256
"""Values per program."""

SUM_WARPS, GATHER_WARPS = 8, 2
"""Warps of a program. In a sum each thread has one value, for which it waits by itself."""

GATHERED_VALUES = 1 << 19
"""The most values of one rank that an all-gather pushes: 8 rows of 64K logits."""


def pushed_values(ranks: int) -> int:
    """The most values that an all-reduce pushes: 64 rows of 8192 with 2 ranks, 16 with 8, as each writes to
    all. Beyond it NCCL moves fewer bytes.
    """
    return (1 << 20) // ranks


@DirectLaunch
@triton.jit
def _all_reduce_kernel(
    x_ptr, residual_ptr, out_ptr, peers, count,
    RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual_ptr: what is added to the sum, or None."""
    launch_then_wait(PDL)
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = at < count
    at = tl.minimum(at, count - 1)
    sequence = next_sequence(peers, at)
    value = tl.load(x_ptr + at, mask=inside, other=0.0)
    total = exchange_sum(peers, value, at, inside, sequence, RANKS, CAPACITY, ASM)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, total, mask=inside)


@DirectLaunch
@triton.jit
def _all_gather_kernel(
    x_ptr, out_ptr, peers, starts_ptr, rows, own, widest, width,
    RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [rows, own], in the buffers [rows, widest]; starts [RANKS + 1]: each rank's first column in out
    [rows, width], then the width.
    """
    launch_then_wait(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // widest, at % widest
    inside = row < rows
    sequence = next_sequence(peers, at)
    mine = inside & (column < own)
    value = tl.load(x_ptr + row * own + column, mask=mine, other=0.0)
    push(peers, value, at, inside, sequence, RANKS, CAPACITY)
    words = peers.received + turn(sequence, RANKS, CAPACITY) + at
    for peer in tl.static_range(RANKS):
        start, end = tl.load(starts_ptr + peer), tl.load(starts_ptr + peer + 1)
        value = receive(words + peer * CAPACITY, inside, sequence)
        there = inside & (column < end - start)
        tl.store(out_ptr + row.to(tl.int64) * width + start + column, value, mask=there)
    finish_exchange(peers, at, inside, sequence)


def push_all_reduce(
    x: Tensor, buffers: PeerBuffers, pdl: bool = False, residual: Tensor | None = None
) -> Tensor:
    """The sum of x over the ranks, which all launch this: fp32, contiguous, at most `buffers.capacity` values. With a
    `residual` of x's shape the sum is added to it, in place.

    `pdl` (sm_90 and later): the launch may start before its predecessor has ended, which may produce x and residual.
    """
    assert x.dtype == torch.float32 and x.is_contiguous() and x.numel() <= buffers.capacity
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    out = torch.empty_like(x) if residual is None else residual
    _all_reduce_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, residual, out, buffers.pointers, x.numel(),
        RANKS=buffers.ranks, CAPACITY=buffers.capacity, BLOCK=BLOCK, ASM=uses_assembly(), PDL=pdl,
        num_warps=SUM_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return out


def push_all_gather(
    x: Tensor, widths: Sequence[int], starts: Tensor, buffers: PeerBuffers, pdl: bool = False
) -> Tensor:
    """The columns of all ranks side by side, fp32 [rows, sum(widths)]. x: this rank's, fp32 [rows, own], contiguous.

    `widths`: columns of each rank; rows * max(widths) values must fit `buffers.capacity`. starts: int32 [ranks + 1],
    the cumulative sums of widths. `pdl`: as for `push_all_reduce`.
    """
    rows, own = x.shape
    assert x.dtype == torch.float32 and x.is_contiguous() and rows * max(widths) <= buffers.capacity
    width = sum(widths)
    out = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    _all_gather_kernel[(triton.cdiv(rows * max(widths), BLOCK),)](
        x, out, buffers.pointers, starts, rows, own, max(widths), width,
        RANKS=buffers.ranks, CAPACITY=buffers.capacity, BLOCK=BLOCK, PDL=pdl, num_warps=GATHER_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return out
