"""All-reduce of many rows over peer memory, in one launch of two shots.

    out = ((x_0 + x_1) + x_2) + ...

Values are cut into blocks, and each of N ranks owns every N-th. First every rank writes its values of a block to its
owner's memory; the owner adds them up in the order of the ranks, and writes the sum to the memory of all. So a rank
sends 2 (N - 1) / N of its values, where a single shot sends N - 1 times all. Data is followed by a flag of its
program: written with release, read with acquire, at system scope. A flag is the number of the launch, kept on the
device, so that a CUDA graph can be replayed.

A program takes N blocks, one of each owner, and waits only for the programs of the same number on the other ranks;
programs start in order, so a launch of more programs than fit on a device terminates, too. No memory is overwritten
too early: a rank that writes values for launch n + 1 has the sums of launch n, so their owners have read its values;
and a rank that writes sums of launch n + 1 has received values for it from all ranks, whose earlier launches have
ended.

Defined in kernels/ranks/communicator.py. Memory order: PTX ISA, "Memory consistency model".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import launch_then_wait

BLOCK = 2048
"""Values per block."""

WARPS = 4

SUMMED_VALUES = 1 << 24
"""The most values summed at a time: 2048 rows of 8192."""


@dataclass(frozen=True)
class SharedSums:
    """Buffers of a rank for sums of up to `capacity` values over `ranks` ranks.

    shared: fp32 words that all ranks write: sums [capacity]; values [ranks, programs, BLOCK] of the blocks that this
    rank owns; flags int32 [2, ranks, programs], of values and of sums. targets: int64 [ranks], the addresses of all
    ranks' `shared`. launches: int32 [programs]. Flags and launches are zero on all ranks at first.
    """

    shared: Tensor
    targets: Tensor
    launches: Tensor
    rank: int

    @property
    def ranks(self) -> int:
        return len(self.targets)

    @property
    def programs(self) -> int:
        return len(self.launches)

    @property
    def capacity(self) -> int:
        return self.programs * self.ranks * BLOCK


def programs_for(values: int, ranks: int) -> int:
    """Programs for `values` values."""
    return -(-values // (ranks * BLOCK))


def shared_words(ranks: int, values: int) -> int:
    """Words of `SharedSums.shared` for sums of `values` values."""
    return 2 * programs_for(values, ranks) * ranks * (BLOCK + 1)


def shared_sums(shared: Tensor, addresses: Sequence[int], rank: int, values: int) -> SharedSums:
    """The buffers of a rank, from its own words, all zero, and the addresses of all ranks' words."""
    targets = torch.tensor(list(addresses), dtype=torch.int64, device=shared.device)
    launches = torch.zeros(programs_for(values, len(addresses)), dtype=torch.int32, device=shared.device)
    return SharedSums(shared, targets, launches, rank)


@triton.jit
def _raise_flag(flags, at, launch):
    """Publishes all that the program's threads have written to readers of the flag."""
    tl.debug_barrier()
    tl.atomic_xchg(flags + at, launch, sem="release", scope="sys")


@triton.jit
def _await_flag(flags, at, launch):
    found = tl.atomic_add(flags + at, 0, sem="acquire", scope="sys")
    while found != launch:
        found = tl.atomic_add(flags + at, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@DirectLaunch
@triton.jit(do_not_specialize=["rank"])  # all ranks run the same code
def _two_shot_kernel(
    x_ptr, shared_ptr, targets_ptr, launches_ptr, count, rank,
    RANKS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_then_wait(PDL)
    program = tl.program_id(0)
    launch = tl.load(launches_ptr + program) + 1
    n = tl.arange(0, BLOCK)
    VALUES: tl.constexpr = RANKS * PROGRAMS * BLOCK  # after the sums, which take as much
    FLAGS: tl.constexpr = 2 * VALUES
    first = program.to(tl.int64) * RANKS * BLOCK
    for step in tl.static_range(1, RANKS):  # each rank begins with another owner
        owner = (rank + step) % RANKS
        target = tl.load(targets_ptr + owner).to(tl.pointer_type(tl.float32))
        at = first + owner * BLOCK + n
        value = tl.load(x_ptr + at, mask=at < count, other=0.0)
        place = VALUES + (rank * PROGRAMS + program).to(tl.int64) * BLOCK
        tl.store(target + place + n, value, mask=at < count)
        flags = (target + FLAGS).to(tl.pointer_type(tl.int32))
        _raise_flag(flags, rank * PROGRAMS + program, launch)
    own = (shared_ptr + FLAGS).to(tl.pointer_type(tl.int32))
    at = first + rank * BLOCK + n
    mine = tl.load(x_ptr + at, mask=at < count, other=0.0)
    for step in tl.static_range(1, RANKS):
        _await_flag(own, (rank + step) % RANKS * PROGRAMS + program, launch)
    total = mine
    for peer in tl.static_range(RANKS):
        place = VALUES + (peer * PROGRAMS + program).to(tl.int64) * BLOCK
        # Other ranks wrote these: bypass this multiprocessor's L1.
        value = tl.load(
            shared_ptr + place + n, mask=(at < count) & (peer != rank), other=0.0, cache_modifier=".cg"
        )
        value = tl.where(peer == rank, mine, value)
        total = value if peer == 0 else total + value
    for step in tl.static_range(RANKS):
        peer = (rank + step) % RANKS
        target = tl.load(targets_ptr + peer).to(tl.pointer_type(tl.float32))
        tl.store(target + at, total, mask=at < count)
        if step > 0:
            flags = (target + FLAGS).to(tl.pointer_type(tl.int32))
            _raise_flag(flags, (RANKS + rank) * PROGRAMS + program, launch)
    for step in tl.static_range(1, RANKS):
        _await_flag(own, (RANKS + (rank + step) % RANKS) * PROGRAMS + program, launch)
    tl.store(launches_ptr + program, launch)


def two_shot_all_reduce(x: Tensor, sums: SharedSums, pdl: bool = False) -> Tensor:
    """The sum of x over the ranks, which all launch this: fp32, contiguous, at most `sums.capacity` values. The result
    lies in `sums` and is valid until the next launch.

    `pdl` (sm_90 and later): the launch may start before its predecessor has ended, which may produce x.
    """
    assert x.dtype == torch.float32 and x.is_contiguous() and x.numel() <= sums.capacity
    _two_shot_kernel[(programs_for(x.numel(), sums.ranks),)](
        x, sums.shared, sums.targets, sums.launches, x.numel(), sums.rank,
        RANKS=sums.ranks, PROGRAMS=sums.programs, BLOCK=BLOCK, PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return sums.shared[: x.numel()].view_as(x)
