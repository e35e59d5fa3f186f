"""Sums over ranks inside a kernel: values are pushed to all ranks over peer memory, each with its flag.

Each rank writes its fp32 values into a buffer of every rank, its own included, as 8-byte words `sequence << 32 |
value`, and waits until its own buffer has the words of all ranks. A word is written atomically, so no barrier is
needed, and sums are taken in the order of the ranks, so all ranks get the same bits. Every 16 values have a sequence
number, kept on the device, so that a CUDA graph can be replayed, and kernels that divide the values differently among
programs can share a buffer. Three parts of a buffer are used in turn: a rank that writes a part again has received
words of a later launch from all ranks, which have therefore read its old content.

A program waits only for the programs of other ranks that have the same values, and programs start in order, so a
launch of more programs than fit on a device terminates, too.

The protocol with a flag in each word is NCCL's "LL" (https://github.com/NVIDIA/nccl). Defined in
kernels/ranks/communicator.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TURNS = 3
"""Parts of a buffer that are used in turn."""

UNIT = 16
"""Values that share a sequence number: a launch's programs take whole units, and each unit once."""

_UNIT = tl.constexpr(UNIT)


@dataclass(frozen=True)
class PeerBuffers:
    """Buffers of a rank to exchange up to `capacity` values.

    received: int64 [TURNS, ranks, capacity], which all ranks write. targets: int64 [ranks], the address of this rank's
    words of the first turn in each rank's `received`. launches: int32 [capacity / UNIT], the number of exchanges of
    each unit. All are zero on all ranks before the first launch.
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

    def for_rows(self, rows: int, width: int) -> "PeerBuffers | None":
        """These buffers, if they have enough capacity and a row is whole units, else None."""
        return self if rows * width <= self.capacity and width % UNIT == 0 else None

    @property
    def pointers(self) -> "Peers":
        return Peers(self.received, self.targets, self.launches)


class Peers(NamedTuple):
    """The tensors of a PeerBuffers, and in a kernel their addresses."""

    received: Any
    targets: Any
    launches: Any


def received_buffer_shape(ranks: int, capacity: int) -> tuple[int, int, int]:
    """The shape of `PeerBuffers.received`."""
    return TURNS, ranks, capacity


def peer_buffers(received: Tensor, addresses: Sequence[int], rank: int) -> PeerBuffers:
    """The buffers of a rank, from its own and the addresses of all ranks' in its address space."""
    _, _, capacity = received.shape
    places = [address + 8 * rank * capacity for address in addresses]
    targets = torch.tensor(places, dtype=torch.int64, device=received.device)
    launches = torch.zeros(-(-capacity // UNIT), dtype=torch.int32, device=received.device)
    return PeerBuffers(received, targets, launches)


@triton.jit
def next_sequence(peers, at):
    """The sequence number of this exchange, for each value."""
    return tl.load(peers.launches + at // _UNIT) + 1


@triton.jit
def turn(sequence, RANKS: tl.constexpr, CAPACITY: tl.constexpr):
    """The offset of the part of the buffers that is used in this exchange."""
    return (sequence % 3).to(tl.int64) * (RANKS * CAPACITY)


@triton.jit
def push(peers, value, at, inside, sequence, RANKS: tl.constexpr, CAPACITY: tl.constexpr):
    """Writes the words of values to all ranks."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = (sequence.to(tl.int64) << 32) | bits
    place = turn(sequence, RANKS, CAPACITY) + at
    for peer in tl.static_range(RANKS):
        target = tl.load(peers.targets + peer).to(tl.pointer_type(tl.int64))
        tl.store(target + place, word, mask=inside)


@triton.jit
def receive(words_ptr, inside, sequence):
    """The values of words [N] that carry the sequence number, once all do. Each word must be read by one
    thread only: another may see it later.
    """
    word = tl.load(words_ptr, mask=inside, other=0, volatile=True)
    late = tl.max(tl.where(inside, ((word >> 32).to(tl.int32) != sequence).to(tl.int32), 0), 0)
    while late != 0:
        word = tl.load(words_ptr, mask=inside, other=0, volatile=True)
        late = tl.max(tl.where(inside, ((word >> 32).to(tl.int32) != sequence).to(tl.int32), 0), 0)
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def receive_sum(words_ptr, inside, sequence, RANKS: tl.constexpr, CAPACITY: tl.constexpr):
    """The sum over the ranks of `receive`; words_ptr [N]: the words of the first rank."""
    total = receive(words_ptr, inside, sequence)
    for peer in range(1, RANKS):
        total += receive(words_ptr + peer * CAPACITY, inside, sequence)
    return total


@triton.constexpr_function
def _thread_sum_text(ranks, capacity):
    """PTX for a thread that waits for one word of all ranks: $0 is the sum of their values in order, $1 the
    address of the first rank's word, $2 the sequence number.
    """
    numbers = range(ranks)
    words, values, flags = ([f"{name}{n}" for n in numbers] for name in ("word", "value", "flag"))
    loads = [f"ld.volatile.global.u64 word{n}, [$1 + {8 * n * capacity}];" for n in numbers]
    parts = [f"mov.b64 {{value{n}, flag{n}}}, word{n};" for n in numbers]
    tests = [f"setp.ne.or.s32 late, flag{n}, $2, late;" for n in numbers[1:]]
    sums = [f"add.rn.f32 total, total, value{n};" for n in numbers[1:]]
    lines = [
        ".reg .pred late;",
        f".reg .b64 {', '.join(words)};",
        f".reg .b32 {', '.join([*values, *flags])}, total;",
        "again:",
        *loads,
        *parts,
        "setp.ne.s32 late, flag0, $2;",
        *tests,
        "@late bra again;",
        "mov.b32 total, value0;",
        *sums,
        "mov.b32 $0, total;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def exchange_sum(
    peers, value, at, inside, sequence, RANKS: tl.constexpr, CAPACITY: tl.constexpr, ASM: tl.constexpr
):
    """The sum over the ranks of values [1, N], at offsets `at` of the buffers, zero where not `inside`; sequence:
    their `next_sequence`.

    Where not `inside`, `at` is the offset of another value of this program. With ASM each thread waits for its own
    values: several threads may hold the same ones, but should not hold many.
    """
    push(peers, value, at, inside, sequence, RANKS, CAPACITY)
    words = peers.received + turn(sequence, RANKS, CAPACITY) + at
    if ASM:
        text: tl.constexpr = _thread_sum_text(RANKS, CAPACITY)
        total = tl.inline_asm_elementwise(
            text, "=f,l,r", [words.to(tl.int64), sequence], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        N: tl.constexpr = value.shape[1]
        total = receive_sum(
            tl.reshape(words, [N]), tl.reshape(inside, [N]), tl.reshape(sequence, [N]), RANKS, CAPACITY
        )
        total = total[None, :]
    finish_exchange(peers, at, inside, sequence)
    return tl.where(inside, total, 0.0)


@triton.jit
def finish_exchange(peers, at, inside, sequence):
    """Stores the sequence numbers, once all threads have read the previous ones."""
    tl.debug_barrier()
    tl.store(peers.launches + at // _UNIT, sequence, mask=inside & (at % _UNIT == 0))
