"""Device functions and constants shared by the matvec kernels: a few tiles of a packed matrix times one quantized row.

A program starts reading its weights, waits for the previous launch (programmatic dependent launch), multiplies, and
adds up its warps' sums.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.gemm.staged_book import begin_book, end_book
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_group, store_quantized
from quengine.kernels.cuda.gemv.q_dot import reduce_tile, start_tile, tile_dots
from quengine.kernels.cuda.weights.geometry import Geometry
from quengine.kernels.cuda.weights.layout import PackedLayout
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight


class Matrix(NamedTuple):
    """A packed part in a kernel. planes: pointers of its low, high, scale and super-scale planes."""

    planes: Any
    tiles: Any


class QuantizedRow(NamedTuple):
    """Pointers of a QuantizedActivations of one row in a kernel; squares: those of RmsPartials, if any."""

    high: Any
    low: Any
    scale: Any
    sums: Any
    squares: Any
    eps: Any


@dataclass(frozen=True)
class MatvecProgram:
    """Compile-time constants of the kernels. A program takes `tiles` tiles of a weight of `cols` columns, each shared
    by `k_warps` warps. ahead, early: see geometry.Geometry. even: no tile or chunk exceeds the matrix. partials: the
    number of sums of squares of the row's pending RMSNorm, 0 if there is none.
    """

    layout: PackedLayout
    cols: int
    tiles: int
    k_warps: int
    ahead: int
    early: bool
    even: bool
    partials: int
    pdl: bool
    asm: bool

    @classmethod
    def of(cls, part: PackedPart, geometry: Geometry, x: QuantizedActivations, pdl: bool) -> "MatvecProgram":
        even = part.tiles % geometry.tiles == 0 and part.chunks % geometry.k_warps == 0
        partials = 0 if x.rms is None else x.rms.squares.shape[1]
        return cls(
            part.layout, part.cols, geometry.tiles, geometry.k_warps, geometry.ahead, geometry.early, even, partials,
            pdl, uses_assembly(),
        )  # fmt: skip

    @property
    def chunks(self) -> int:
        return -(-self.cols // self.layout.chunk)

    @property
    def rounds(self) -> int:
        """Chunks per warp."""
        return -(-self.chunks // self.k_warps)

    @property
    def padded(self) -> bool:
        return self.chunks * self.layout.chunk != self.cols


@triton.jit
def begin_rows(matrix, tile0, P: tl.constexpr):
    """Starts reading P.tiles tiles from `tile0` on, each shared by P.k_warps warps: their first words, and the book."""
    THREADS: tl.constexpr = 32 * P.tiles * P.k_warps
    thread = tl.arange(0, THREADS)
    warp = thread >> 5
    FMT: tl.constexpr = P.layout
    begun = begin_book(matrix.planes[1], FMT, THREADS, P.asm)
    queue = start_tile(matrix, tile0 + warp // P.k_warps, warp % P.k_warps, thread & 31, P)
    return queue, end_book(begun, FMT, THREADS, P.asm)


@triton.jit
def load_squares(squares_ptr, PARTIALS: tl.constexpr):
    """The row's partial sums of squares, or a zero."""
    if PARTIALS == 0:
        return 0.0
    else:
        n = tl.arange(0, triton.next_power_of_2(PARTIALS))
        return tl.load(squares_ptr + n, mask=n < PARTIALS, other=0.0)


@triton.jit
def finish_rows(begun, squares, matrix, x, tile0, P: tl.constexpr):
    """The product, fp32 [tiles, 8, 2, 1]; with P.partials divided by the row's root mean square. begun: the result of
    `begin_rows`.
    """
    thread = tl.arange(0, 32 * P.tiles * P.k_warps)
    warp = thread >> 5
    acc = tile_dots(
        begun[0], begun[1], matrix, x, tile0 + warp // P.k_warps, warp % P.k_warps, thread & 31, P
    )
    y = reduce_tile(acc, P)
    if P.partials > 0:
        y *= tl.rsqrt(tl.sum(squares, 0) / P.cols + x.eps)
    return y


@triton.jit
def await_words(pointers, inside):
    """The int32 words at `pointers` [N], once none of those `inside` is -1."""
    words = tl.load(pointers, mask=inside, other=0, volatile=True)
    while tl.max((words == -1).to(tl.int32), 0) > 0:
        words = tl.load(pointers, mask=inside, other=0, volatile=True)
    return words


@triton.jit
def taken_words(pointers, inside):
    """The fp32 values that other programs leave as words at `pointers` [N], once all that are `inside` are there. The
    words become -1 again: no other program may read them. The rest is zero."""
    words = await_words(pointers, inside)
    tl.debug_barrier()  # all warps have read the words
    tl.store(pointers, -1, mask=inside)
    return words.to(tl.float32, bitcast=True)


@triton.jit
def leave_for_last(value, words_ptr, first):
    """Stores this program's outputs of a group of 32 that adjacent programs share: `value` [COUNT], outputs
    `first` on. All but the last program store theirs as words for `quantize_as_last`: a word is written
    atomically, so no fence or counter is needed.
    """
    COUNT: tl.constexpr = value.shape[0]
    if first % 32 < 32 - COUNT:
        tl.store(words_ptr + first + tl.arange(0, COUNT), value.to(tl.int32, bitcast=True))


@triton.jit
def quantize_as_last(value, words_ptr, out, first):
    """The last program of a group waits for the words of `leave_for_last` and quantizes all 32 outputs. It
    resets the words to -1, a NaN that arithmetic does not produce. It waits only for programs of lower
    numbers, which have started before it.
    """
    COUNT: tl.constexpr = value.shape[0]
    OTHERS: tl.constexpr = 32 - COUNT
    if first % 32 >= OTHERS:
        i = tl.arange(0, 32)
        group = first // 32
        words = await_words(words_ptr + group * 32 + i % OTHERS, i < 32)
        own = tl.reshape(tl.broadcast_to(value[None, :], [32 // COUNT, COUNT]), [32])
        values = tl.where(i < OTHERS, words.to(tl.float32, bitcast=True), own)
        high, low, scale, sums = quantize_group(values[None, :])
        row = tl.arange(0, 1)
        store_quantized(out.high, out.low, out.scale, out.sums, row + group, row < 1, high, low, scale, sums)
        tl.debug_barrier()  # all warps have read the words
        tl.store(words_ptr + group * 32 + i, -1, mask=i < OTHERS)


@triton.jit
def quantize_gated(value, words_ptr, out, pair, first, width, TILES: tl.constexpr):
    """Quantizes the outputs of TILES tiles of gate and up rows, 8 each, fp32 [TILES, 8, 1]: outputs `first` on of row
    `pair` of `width`. A group has 32: with fewer than 4 tiles per program, the last program of a group quantizes it.
    """
    if TILES >= 4:
        groups = width // 32
        GROUPS: tl.constexpr = TILES // 4
        high, low, scale, sums = quantize_group(tl.reshape(value, [GROUPS, 32]))
        group = first // 32 + tl.arange(0, GROUPS)
        store_quantized(
            out.high, out.low, out.scale, out.sums, pair * groups + group, group < groups, high, low, scale, sums
        )  # fmt: skip
    else:
        value = tl.reshape(value, [8 * TILES])
        leave_for_last(value, words_ptr, pair * width + first)
        quantize_as_last(value, words_ptr, out, pair * width + first)


@triton.jit
def begin_norm(
    hidden, hidden_ptr, row, column, inside, norm_ptr, out, words_ptr, N, program, programs, TILES: tl.constexpr
):  # fmt: skip
    """Stores the part of a row of the stream of program number `program` of `programs`, hidden [1, 16 * TILES], where
    hidden_ptr is not None, its sum of squares, and the part times the norm's weights, quantized. TILES is even, so that
    a program has whole groups of 32, or one, so that two programs share a group."""
    value = hidden * tl.load(norm_ptr + column, mask=inside, other=0.0)
    first = row * N + program * (16 * TILES)
    if TILES == 1:
        leave_for_last(tl.reshape(value, [16]), words_ptr, first)
    if hidden_ptr is not None:
        tl.store(hidden_ptr + row * N + column, hidden, mask=inside)
    tl.store(
        out.squares + row * programs + program + tl.arange(0, 1),
        tl.sum(hidden * hidden, 1),
    )
    if TILES == 1:
        quantize_as_last(tl.reshape(value, [16]), words_ptr, out, first)
    else:
        groups = N // 32
        GROUPS: tl.constexpr = TILES // 2
        high, low, scale, sums = quantize_group(tl.reshape(value, [GROUPS, 32]))
        group = program * GROUPS + tl.arange(0, GROUPS)
        store_quantized(
            out.high, out.low, out.scale, out.sums, row * groups + group, group < groups, high, low, scale, sums
        )  # fmt: skip


@dataclass(frozen=True)
class QuantizationScratch:
    """Memory for launches whose programs wait for each other's values, reusable by every call of one stream. Each
    output has an fp32 value and an int32 word for `leave_for_last` or `taken_words`. Between launches words are -1.
    """

    values: Tensor
    words: Tensor

    @classmethod
    def empty(cls, width: int, device: torch.device | str) -> "QuantizationScratch":
        """Scratch for up to `width` values."""
        return cls(
            torch.empty(width, dtype=torch.float32, device=device),
            torch.full((width,), -1, dtype=torch.int32, device=device),
        )

    @classmethod
    def of(
        cls, given: "QuantizationScratch | None", width: int, device: torch.device
    ) -> "QuantizationScratch":
        """The given scratch, or a new one for `width` values. Raises ValueError if the given one is too small."""
        if given is None:
            return cls.empty(width, device)
        if given.values.numel() < width:
            raise ValueError(f"scratch holds {given.values.numel()} values, needs {width}")
        return given


def check_row(x: QuantizedActivations, weight: PackedWeight) -> None:
    """Raises ValueError if x is not one row of the weight's width."""
    if x.cols != weight.cols:
        raise ValueError(f"activations of width {x.cols} for weights of width {weight.cols}")
    if x.rows != 1:
        raise ValueError(f"matvec takes 1 row, not {x.rows}; use matmul")


def row_arguments(x: QuantizedActivations) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """The arguments of a kernel for `QuantizedRow`; without a pending norm any tensor stands for the squares."""
    squares, eps = (x.scale, 0.0) if x.rms is None else (x.rms.squares, x.rms.eps)
    return x.high, x.low, x.scale, x.sums, squares, eps
