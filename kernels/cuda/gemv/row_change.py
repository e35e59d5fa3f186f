"""What LoRA adapters add to the product of one row, within the launch of the product (kernels/lora/low_rank.py).

A launch has programs ahead of those of its tiles, each for some ranks of A. They compute A x while the others multiply
their weights, and leave it as words, values that carry the number of the launch. A program of tiles waits for the words
at its end, and adds B of them to its rows before anything else is done with these. It waits only for programs of lower
numbers, which have started before it. The scales are read when the kernel runs: a captured step serves any adapters,
and reads the matrices of those that its row has.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from quengine.kernels.cuda.gemm.mma import prefetch
from quengine.kernels.cuda.gemv.matvec_program import load_squares
from quengine.kernels.cuda.ranks.peers import receive
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight
from quengine.kernels.cuda.weights.row_change import LAUNCH_KINDS, RowChange

ROWS, GLU, NORM = range(LAUNCH_KINDS)
_MOST_ROOM = 64
"""Programs for the ranks of A, at most, until each has 16 of them."""
_A_THREAD = 32
"""Columns of A that a thread takes at a time."""
_RANKS = tl.constexpr(16)


@dataclass(frozen=True)
class RowChangeProgram:
    """Compile-time constants of a launch with a change: P matrices, M adapters of rank R, `together` ranks of one
    program, `columns` columns of A at a time; `most`: programs that `launches` has room for."""

    matrices: int
    adapters: int
    rank: int
    together: int
    columns: int
    most: int
    kind: int

    @property
    def programs(self) -> int:
        """Ahead of those of tiles."""
        return self.matrices * self.adapters * self.rank // self.together

    @classmethod
    def of(cls, change: RowChange | None, kind: int, warps: int) -> "RowChangeProgram | None":
        if change is None:
            return None
        matrices, adapters, rank, cols = change.a.shape
        together = 1
        while matrices * adapters * rank // together > _MOST_ROOM and together < _RANKS.value:
            together *= 2
        columns = min(triton.next_power_of_2(cols), _A_THREAD * 32 * warps)
        return cls(matrices, adapters, rank, together, columns, change.launches.shape[1], kind)


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
def begin_change(change, C: tl.constexpr):
    """Where this program keeps the number of launches of its kind, and the number of this one; of no change zeros."""
    if C is None:
        return 0, 0
    else:
        at = change.launches + C.kind * C.most + tl.program_id(0)
        return at, tl.load(at) + 1


@triton.jit
def row_to_rank(change, x, P: tl.constexpr, C: tl.constexpr):
    """Leaves the scaled products of this program's ranks of A with the row x, a QuantizedRow of P.cols columns, as
    words. P: the MatvecProgram of the launch."""
    COLS: tl.constexpr = P.cols
    COLUMNS: tl.constexpr = C.columns
    first = tl.program_id(0) * C.together
    for i in range(C.together):
        line = tl.arange(0, triton.next_power_of_2((P.cols + 63) // 64))  # 128 bytes, of 2 an element
        prefetch(change.a + (first + i).to(tl.int64) * P.cols + tl.minimum(line * 64, P.cols - 1), P.asm)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    at, number = begin_change(change, C)
    for i in range(C.together):
        rank = first + i
        scale = tl.load(change.scales + rank // C.rank % C.adapters)
        if scale != 0.0:
            total = tl.zeros([COLUMNS], tl.float32)
            for start in tl.static_range(0, COLS, COLUMNS):
                k = start + tl.arange(0, COLUMNS)
                inside = k < P.cols
                a = tl.load(change.a + rank.to(tl.int64) * P.cols + k, mask=inside, other=0.0).to(tl.float32)
                high = tl.load(x.high + k, mask=inside, other=0).to(tl.int32)
                low = tl.load(x.low + k, mask=inside, other=0).to(tl.int32)
                t = tl.load(x.scale + k // 32, mask=inside, other=0.0)
                total += a * ((high * 256 + low).to(tl.float32) * t)
            value = tl.sum(total, 0) * scale
            if P.partials > 0:
                value *= tl.rsqrt(tl.sum(load_squares(x.squares, P.partials), 0) / P.cols + x.eps)
            bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
            tl.store(change.words + rank, (_words_tag(number, C).to(tl.int64) << 32) | bits)
    tl.debug_barrier()  # all threads have read the number
    tl.store(at, number)


@triton.jit
def rows_from_rank(change, begun, y, column, inside, C: tl.constexpr):
    """y [tiles, 8, 2, 1], of rows `column` of b, those that are `inside`, plus B of the words of this launch. begun: of
    `begin_change`."""
    at, number = begun
    tag = _words_tag(number, C)
    MATRICES: tl.constexpr = triton.next_power_of_2(C.matrices)
    matrix = tl.load(change.matrices + column, mask=inside, other=0).to(tl.int32)
    for adapter in range(C.adapters):
        if tl.load(change.scales + adapter) != 0.0:
            for first in range(0, C.rank, _RANKS):
                rank = first + tl.arange(0, _RANKS)[None, None, None, :]
                b_at = change.b + ((column.to(tl.int64) * C.adapters + adapter) * C.rank + rank)
                b = tl.load(b_at, mask=inside, other=0.0).to(tl.float32)
                each = tl.arange(0, MATRICES * _RANKS)
                place = (each // _RANKS * C.adapters + adapter) * C.rank + first + each % _RANKS
                receive(change.words + place, each < C.matrices * _RANKS, tag)
                tl.debug_barrier()  # a thread has seen each word: all others see it now
                words = change.words + ((matrix * C.adapters + adapter) * C.rank + rank)
                value = tl.load(words, volatile=True).to(tl.int32).to(tl.float32, bitcast=True)
                y += tl.sum(b * value, 3, keep_dims=True)
    tl.debug_barrier()  # all threads have read the number
    tl.store(at, number)
    return y
