"""What LoRA adapters add to the product of one row, within the launch of the product (kernels/lora/low_rank.py).

The first programs of a launch compute A x, each for some ranks, while the programs of tiles multiply their weights.
They leave A x as words: values that carry the number of the launch. A program of tiles waits for the words at its end,
and adds B A x to its rows before anything else is done with the rows. It waits only for programs of lower numbers,
which have started before it. The scales are read when the kernel runs: a captured step serves any adapters, and reads
the matrices of those that its row has. It reads early those of one adapter that the row probably has, by the scales as
they are ahead of the wait, perhaps those of an earlier step.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from quengine.kernels.cuda.gemm.mma import prefetch
from quengine.kernels.cuda.gemv.matvec_program import load_squares
from quengine.kernels.cuda.weights.geometry import Geometry
from quengine.kernels.cuda.weights.many_rows import MULTIPROCESSORS
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight
from quengine.kernels.cuda.weights.row_change import LAUNCH_KINDS, RowChange

ROWS, GLU, NORM = range(LAUNCH_KINDS)
_MOST_ROOM = 64
"""The most programs for the ranks of A where the last wave has no room for them, unless each has 16 ranks already."""
_A_THREAD = 64
"""Values of A that a thread takes at a time."""
_REGISTERS, _MOST_REGISTERS = 65536, 128
"""Registers of a multiprocessor, and of a thread without a limit."""
_RANKS = tl.constexpr(16)


@dataclass(frozen=True)
class RowChangeProgram:
    """Compile-time constants of a launch with a change, of P matrices by M adapters of rank R. A program of A takes
    `together` ranks of every adapter, and `columns` columns at a time. most: the programs that `launches` has room for.
    threads: of a program."""

    matrices: int
    adapters: int
    rank: int
    together: int
    columns: int
    most: int
    kind: int
    threads: int

    @property
    def programs(self) -> int:
        """The number of programs of A, which come ahead of those of tiles."""
        return self.matrices * self.rank // self.together

    @classmethod
    def of(
        cls, change: RowChange | None, kind: int, geometry: Geometry, tiles: int
    ) -> "RowChangeProgram | None":
        """The constants of a launch with `tiles` programs of tiles. Programs of A take so many ranks each, at most 16,
        that all fit in the last wave of the programs of tiles, where 16 are enough."""
        if change is None:
            return None
        matrices, adapters, rank, cols = change.a.shape
        threads = 32 * geometry.warps
        slots = MULTIPROCESSORS * max(1, _REGISTERS // (threads * (geometry.registers or _MOST_REGISTERS)))
        room, together = -tiles % slots, 1
        room = room if 16 * room >= matrices * rank else _MOST_ROOM
        while matrices * rank // together > room and together < 16:
            together *= 2
        columns = min(triton.next_power_of_2(cols), _A_THREAD * threads // together)
        return cls(matrices, adapters, rank, together, columns, change.launches.shape[1], kind, threads)


def takes_change(weight: PackedWeight) -> bool:
    """Whether one launch multiplies the whole weight, so that it can have a change."""
    return len(weight.parts) <= 2 and all(isinstance(part, PackedPart) for part in weight.parts)


def check_change(weight: PackedWeight) -> None:
    """Raises ValueError for a weight with a change that takes several launches."""
    if weight.change is not None and not takes_change(weight):
        raise ValueError(f"a weight of {len(weight.parts)} parts has a change: it takes several launches")


@triton.jit
def _words_tag(number, C: tl.constexpr):
    """What a launch's words carry. The kinds of launches are counted apart."""
    return number * 4 + C.kind


@triton.jit
def hint_of(change, C: tl.constexpr):
    """The scales of some adapters ahead of the wait, perhaps of an earlier step, or nothing where one is alone: what
    `_near` chooses by."""
    if C is None or C.adapters == 1:
        return 0.0
    else:
        COUNT: tl.constexpr = min(32, triton.next_power_of_2(C.adapters))
        adapter = tl.arange(0, COUNT)
        return tl.load(change.scales + adapter, mask=adapter < C.adapters, other=0.0, cache_modifier=".cg")


@triton.jit
def _near(hint, C: tl.constexpr):
    """An adapter that the row probably has: what is read of it early is nearly always of use."""
    if C.adapters == 1:
        return 0
    else:
        return tl.max(tl.where(hint != 0.0, tl.arange(0, hint.shape[0]), 0), 0)


@triton.jit
def _begin(change, near, C: tl.constexpr):
    """Where this program keeps the number of launches of its kind, the number of this one, and an adapter's scale."""
    at = change.launches + C.kind * C.most + tl.program_id(0)
    return at, tl.load(at) + 1, tl.load(change.scales + near)


@triton.jit
def _load_b(change, adapter, first, column, each, inside, C: tl.constexpr):
    """Rows `column` of b, those that are `inside`, for 16 ranks of an adapter from `first` on. each: elements of a row,
    of which those beyond the ranks are zeros."""
    at = (column.to(tl.int64) * C.adapters + adapter) * C.rank + first + each
    return tl.load(change.b + at, mask=inside & (each < _RANKS), other=0.0)


@triton.jit
def begin_change(change, hint, column, inside, C: tl.constexpr):
    """Of a launch with a change, after the wait: what `rows_from_rank` takes, b of an adapter on its way."""
    if C is None:
        return 0, 0, 0.0, 0, 0.0
    else:
        near = _near(hint, C)
        # As many elements as threads, or more: each word is read by one thread.
        SPREAD: tl.constexpr = max(_RANKS, C.threads // (16 * column.shape[0]))
        each = tl.arange(0, SPREAD)[None, None, None, :]
        at, number, scale = _begin(change, near, C)
        return at, number, scale, near, _load_b(change, near, 0, column, each, inside, C)


@triton.jit
def _leave_words(change, first, values, scale, number, C: tl.constexpr):
    """Stores the products of ranks from `first` on, scaled, as words."""
    bits = (values * scale).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    to = change.words + first + tl.arange(0, C.together)
    tl.store(to, (_words_tag(number, C).to(tl.int64) << 32) | bits)


@triton.jit
def _load_a(change, first, start, P: tl.constexpr, C: tl.constexpr):
    """Columns of A from `start` on, of a program's ranks from `first` on: [together, columns]."""
    k = start + tl.arange(0, C.columns)[None, :]
    rank = (first + tl.arange(0, C.together)).to(tl.int64)[:, None]
    return tl.load(change.a + rank * P.cols + k, mask=k < P.cols, other=0.0)


@triton.jit
def _row_at(x, start, P: tl.constexpr, C: tl.constexpr):
    """Values of the row x from `start` on, fp32 [columns]."""
    k = start + tl.arange(0, C.columns)
    inside = k < P.cols
    high = tl.load(x.high + k, mask=inside, other=0).to(tl.int32)
    low = tl.load(x.low + k, mask=inside, other=0).to(tl.int32)
    return (high * 256 + low).to(tl.float32) * tl.load(x.scale + k // 32, mask=inside, other=0.0)


@triton.jit
def _times_row(change, x, early, first, P: tl.constexpr, C: tl.constexpr):
    """The products of ranks from `first` on with the row x, fp32 [together]. early: their first columns of A."""
    COLS: tl.constexpr = P.cols
    COLUMNS: tl.constexpr = C.columns
    total = tl.sum(early.to(tl.float32) * _row_at(x, 0, P, C)[None, :], 1)
    for start in tl.static_range(COLUMNS, COLS, COLUMNS):
        total += tl.sum(
            _load_a(change, first, start, P, C).to(tl.float32) * _row_at(x, start, P, C)[None, :], 1
        )
    return total


@triton.jit
def row_to_rank(change, x, P: tl.constexpr, C: tl.constexpr):
    """Leaves the scaled products of this program's ranks of A with the row x, a QuantizedRow of P.cols columns, as
    words. P: the MatvecProgram of the launch."""
    near = _near(hint_of(change, C), C)
    place = tl.program_id(0) * C.together  # among the ranks of one adapter, of all matrices
    first = place // C.rank * (C.adapters * C.rank) + place % C.rank
    early = _load_a(change, first + near * C.rank, 0, P, C)
    if P.cols > C.columns:
        line = (
            C.columns + tl.arange(0, triton.next_power_of_2((P.cols - C.columns + 63) // 64)) * 64
        )  # 128 bytes
        for i in range(C.together):
            a_at = change.a + (first + near * C.rank + i).to(tl.int64) * P.cols
            prefetch(a_at + tl.minimum(line, P.cols - 1), P.asm)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    at, number, scale = _begin(change, near, C)
    norm = 1.0
    if P.partials > 0:
        norm = tl.rsqrt(tl.sum(load_squares(x.squares, P.partials), 0) / P.cols + x.eps)
    value = _times_row(change, x, early, first + near * C.rank, P, C) * norm
    if scale != 0.0:
        _leave_words(change, first + near * C.rank, value, scale, number, C)
    if C.adapters > 1:
        for adapter in range(C.adapters):
            scale = tl.load(change.scales + adapter)
            if (scale != 0.0) & (adapter != near):
                rank = first + adapter * C.rank
                value = _times_row(change, x, _load_a(change, rank, 0, P, C), rank, P, C) * norm
                _leave_words(change, rank, value, scale, number, C)
    tl.debug_barrier()  # all threads have read the number
    tl.store(at, number)


@triton.jit
def _received(pointers, inside, tag):
    """The values of words that carry the tag, once all do that are `inside`. No word is another thread's too: that
    might see it later."""
    word = tl.load(pointers, mask=inside, other=0, volatile=True)
    while tl.max(tl.where(inside, ((word >> 32).to(tl.int32) != tag).to(tl.int32), 0)) != 0:
        word = tl.load(pointers, mask=inside, other=0, volatile=True)
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _times_words(change, b, matrix, adapter, first, each, inside, tag, C: tl.constexpr):
    """b times the words of 16 ranks of an adapter, [tiles, 8, 2, 1]."""
    words = change.words + ((matrix * C.adapters + adapter) * C.rank + first + each % _RANKS)
    return tl.sum(b.to(tl.float32) * _received(words, inside & (each >= 0), tag), 3, keep_dims=True)


@triton.jit
def rows_from_rank(change, begun, y, column, inside, C: tl.constexpr):
    """y [tiles, 8, 2, 1], of rows `column` of b, those that are `inside`, plus B of the words of this launch. begun: of
    `begin_change`."""
    at, number, scale, near, b = begun
    tag = _words_tag(number, C)
    each = tl.arange(0, b.shape[3])[None, None, None, :]
    matrix = tl.load(change.matrices + column, mask=inside, other=0).to(tl.int32)
    if scale != 0.0:
        y += _times_words(change, b, matrix, near, 0, each, inside, tag, C)
    if C.adapters > 1 or C.rank > _RANKS:
        for adapter in range(C.adapters):
            if tl.load(change.scales + adapter) != 0.0:
                for first in range(0, C.rank, _RANKS):
                    if (adapter != near) | (first > 0):
                        b = _load_b(change, adapter, first, column, each, inside, C)
                        y += _times_words(change, b, matrix, adapter, first, each, inside, tag, C)
    tl.debug_barrier()  # all threads have read the number
    tl.store(at, number)
    return y
