"""All-reduce and all-gather of few rows over peer memory, one launch each: the flag travels with the data.

    out = ((x_0 + x_1) + x_2) + ...          out = x_0 | x_1 | x_2 | ...

Each rank writes its fp32 values into a buffer of every rank, its own among them, as 8-byte words `sequence << 32 |
value`, and waits until its own buffer has the words of all ranks. A word is written whole, so that no barrier is
needed; and sums are taken in the order of the ranks, so that all have the same bits. Each launch of a program has a
sequence number of its own, kept on the device: a CUDA graph can be replayed. Three parts of the buffer are used in
turn: who writes one again has had words of a later launch from all ranks, which have thus read what was there.

The protocol with a flag in each word is that of NCCL ("LL", https://github.com/NVIDIA/nccl). Definition:
kernels/ranks/communicator.py. On 2 H200s (torch 2.11, Triton 3.6), in a graph, 1 x 4096 values take 2.3 us, 8 x 8192
3.8, 16 x 8192 5.3, where NCCL takes 22, 24 and 27; on 4 of them 1 x 8192 takes 4.4 us and 8 x 8192 9.6.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import launch_then_wait

TURNS = 3
"""Parts of a buffer that are used in turn."""

BLOCK = 256
"""Values of a program. The same for all launches: a program's sequence number belongs to its part of the buffer."""

WARPS = 2

GATHERED_VALUES = 1 << 19
"""Values of one rank that an all-gather pushes, at most: 8 rows of 64K logits."""


@dataclass(frozen=True)
class PeerBuffers:
    """What a rank needs to exchange up to `capacity` values.

    received: int64 [TURNS, ranks, capacity], into which all ranks write. targets: int64 [ranks], the address of the
    place in each rank's `received` where this rank's words of the first turn go. launches: int32 [programs], how often
    each program has run. All zero at first, on all ranks, before any launches.
    """

    received: Tensor
    targets: Tensor
    launches: Tensor

    @property
    def ranks(self) -> int:
        return self.received.shape[1]

    @property
    def capacity(self) -> int:
        return self.received.shape[2]


def pushed_values(ranks: int) -> int:
    """Values that an all-reduce pushes, at most: 64 rows of 8192 with 2 ranks, 16 with 8, as each writes to all. Beyond
    it NCCL moves fewer bytes."""
    return (1 << 20) // ranks


def received_buffer_shape(ranks: int, capacity: int) -> tuple[int, int, int]:
    """Of `PeerBuffers.received`."""
    return TURNS, ranks, capacity


def peer_buffers(received: Tensor, addresses: Sequence[int], rank: int) -> PeerBuffers:
    """The buffers of a rank, given its own and the addresses of those of all ranks in its address space."""
    _, _, capacity = received.shape
    places = [address + 8 * rank * capacity for address in addresses]
    targets = torch.tensor(places, dtype=torch.int64, device=received.device)
    launches = torch.zeros(triton.cdiv(capacity, BLOCK), dtype=torch.int32, device=received.device)
    return PeerBuffers(received, targets, launches)


@triton.jit
def _push(value, targets_ptr, at, inside, sequence, part, RANKS: tl.constexpr):
    """Write the words of values to all ranks, at `at` of a part of their buffers."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = (sequence.to(tl.int64) << 32) | bits
    for peer in tl.static_range(RANKS):
        place = tl.load(targets_ptr + peer).to(tl.pointer_type(tl.int64))
        tl.store(place + part + at, word, mask=inside)


@triton.jit
def _receive(words_ptr, inside, sequence):
    """The values of words that carry the sequence number, once all of them do."""
    word = tl.load(words_ptr, mask=inside, other=0, volatile=True)
    late = tl.max(tl.where(inside, ((word >> 32).to(tl.int32) != sequence).to(tl.int32), 0), 0)
    while late != 0:
        word = tl.load(words_ptr, mask=inside, other=0, volatile=True)
        late = tl.max(tl.where(inside, ((word >> 32).to(tl.int32) != sequence).to(tl.int32), 0), 0)
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@DirectLaunch
@triton.jit
def _all_reduce_kernel(
    x_ptr, out_ptr, received_ptr, targets_ptr, launches_ptr, count, capacity,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_then_wait(PDL)
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    sequence = tl.load(launches_ptr + program) + 1
    part = (sequence % 3).to(tl.int64) * RANKS * capacity
    value = tl.load(x_ptr + at, mask=inside, other=0.0)
    _push(value, targets_ptr, at, inside, sequence, part, RANKS)
    total = _receive(received_ptr + part + at, inside, sequence)
    for peer in tl.static_range(1, RANKS):
        total += _receive(received_ptr + part + peer * capacity + at, inside, sequence)
    tl.store(out_ptr + at, total, mask=inside)
    tl.store(launches_ptr + program, sequence)


@DirectLaunch
@triton.jit
def _all_gather_kernel(
    x_ptr, out_ptr, received_ptr, targets_ptr, launches_ptr, starts_ptr, rows, own, widest, width, capacity,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [rows, own], in the buffers [rows, widest]; starts [RANKS + 1]: the first column of each rank in out [rows,
    width], and the width."""
    launch_then_wait(PDL)
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    row, column = at // widest, at % widest
    inside = row < rows
    sequence = tl.load(launches_ptr + program) + 1
    part = (sequence % 3).to(tl.int64) * RANKS * capacity
    mine = inside & (column < own)
    value = tl.load(x_ptr + row * own + column, mask=mine, other=0.0)
    _push(value, targets_ptr, at, inside, sequence, part, RANKS)
    for peer in tl.static_range(RANKS):
        start, end = tl.load(starts_ptr + peer), tl.load(starts_ptr + peer + 1)
        value = _receive(received_ptr + part + peer * capacity + at, inside, sequence)
        there = inside & (column < end - start)
        tl.store(out_ptr + row.to(tl.int64) * width + start + column, value, mask=there)
    tl.store(launches_ptr + program, sequence)


def push_all_reduce(x: Tensor, buffers: PeerBuffers, pdl: bool = False) -> Tensor:
    """The sum of x over the ranks, which all launch this: fp32, contiguous, at most `buffers.capacity` values.

    `pdl` (sm_90 and later): may be launched before its predecessor has ended, which may produce x.
    """
    assert x.dtype == torch.float32 and x.is_contiguous() and x.numel() <= buffers.capacity
    out = torch.empty_like(x)
    _all_reduce_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, out, buffers.received, buffers.targets, buffers.launches, x.numel(), buffers.capacity,
        RANKS=buffers.ranks, BLOCK=BLOCK, PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return out


def push_all_gather(
    x: Tensor, widths: Sequence[int], starts: Tensor, buffers: PeerBuffers, pdl: bool = False
) -> Tensor:
    """The columns of all ranks side by side: x fp32 [rows, own], contiguous; `widths` of all ranks, whose largest takes
    rows * max(widths) values of `buffers.capacity`; starts: int32 [ranks + 1], their sums. `pdl`: see above.
    """
    rows, own = x.shape
    assert x.dtype == torch.float32 and x.is_contiguous() and rows * max(widths) <= buffers.capacity
    width = sum(widths)
    out = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    _all_gather_kernel[(triton.cdiv(rows * max(widths), BLOCK),)](
        x, out, buffers.received, buffers.targets, buffers.launches, starts, rows, own, max(widths), width,
        buffers.capacity,
        RANKS=buffers.ranks, BLOCK=BLOCK, PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return out
