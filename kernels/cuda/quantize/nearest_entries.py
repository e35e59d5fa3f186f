"""The nearest entries of a codebook on CUDA; defined in kernels/quantize/entries.py.

A vector's error grows by a sum of integers, one for the level of each weight. The sums of all entries are a product
with a matrix of zeros and ones, exact on tensor cores: each integer is two numbers of nine or ten bits.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.quantize.entries import FARTHEST, EntryBook

_COLUMNS = 128
"""Vectors of a program."""
_ENTRIES = 64
"""Entries by which the vectors are multiplied at once."""
_LOW_BITS = tl.constexpr(9)
_UNIT = tl.constexpr(512)
"""The unit of the high part of an integer."""
_ROUNDING = tl.constexpr(12582912.0)
"""Added to a number below 2^22 and taken away, it leaves the nearest integer, halves to even ones."""
_EXACT = tl.constexpr(8388608.0)
"""Added to an integer below 2^23, it leaves the integer in the low bits."""


@dataclass(frozen=True)
class _Tables:
    """The tables of a codebook on a device. Levels are those of all parts, padded with NaN to a power of two.

    levels   fp32 [levels]
    chosen   fp16 [levels * width, entries of all parts]: 1 where a weight of the entry has the level, else 0
    numbers  int32 [entries of all parts]: numbers in the codebook, in the order of combinations
    """

    levels: Tensor
    chosen: Tensor
    numbers: Tensor


@cache
def _tables(name: str, device: torch.device) -> _Tables:
    book = EntryBook(FORMATS[name], torch.device("cpu"))
    levels = torch.cat([part.levels.flatten() for part in book.books])
    size = 4 if len(levels) <= 4 else 8
    levels = torch.cat([levels, torch.full((size - len(levels),), torch.nan)])
    numbers = torch.cat([part.number[part.first * book.half + part.second] for part in book.books])
    chosen = book.values[:, numbers].unsqueeze(0) == levels.view(-1, 1, 1)
    return _Tables(
        levels.to(device), chosen.flatten(0, 1).half().contiguous().to(device), numbers.int().to(device)
    )


@triton.jit
def _added(values, WIDTH: tl.constexpr):
    """The sum of [N, WIDTH] over its columns, in the order of `layout.total`: [N]."""
    rows: tl.constexpr = values.shape[0]
    values = tl.sum(tl.reshape(values, (rows, 2, WIDTH // 2)), 1)
    if WIDTH == 8:
        values = tl.sum(tl.reshape(values, (rows, 2, 2)), 1)
    return tl.sum(values, 1)


@triton.jit
def _quotient(numerator, denominator):
    """Of a number and fp32 [N]; 0 where the denominator is 0."""
    is_zero = denominator == 0.0
    numerator = tl.full(denominator.shape, numerator, tl.float32)
    return tl.where(is_zero, 0.0, tl.div_rn(numerator, tl.where(is_zero, 1.0, denominator)))


@triton.jit
def _costs(
    target_ptr, weight_ptr, scale_ptr, levels_ptr, vector, column, columns,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr, FARTHEST: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """As `EntryBook.tables`: int32 [columns, levels, WIDTH]."""
    inside = (column < columns)[:, None, None]
    weight = vector * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    at = weight.to(tl.int64) * columns + column[:, None, None]
    scale = tl.load(scale_ptr + column, mask=column < columns, other=0.0)
    ratio = tl.load(target_ptr + at, mask=inside, other=0.0) * _quotient(1.0, scale)[:, None, None]
    ratio = tl.minimum(tl.maximum(ratio, -FARTHEST), FARTHEST)
    level = tl.load(levels_ptr + tl.arange(0, LEVELS))[None, :, None]
    distance = level - ratio
    cost = distance * distance * tl.load(weight_ptr + at, mask=inside, other=0.0)
    is_level = level == level
    least = tl.min(tl.where(is_level, cost, float("inf")), 1)
    cost = tl.where(is_level, cost - least[:, None, :], 0.0)
    factor = _quotient(LARGEST, _added(tl.max(cost, 1), WIDTH))
    return ((cost * factor[:, None, None] + _ROUNDING) - _ROUNDING).to(tl.int32)


@DirectLaunch
@triton.jit(do_not_specialize=["columns"])
def _nearest_kernel(
    target_ptr, weight_ptr, scale_ptr, levels_ptr, chosen_ptr, numbers_ptr, out_ptr, columns,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr, ENTRIES: tl.constexpr, NUMBER_BITS: tl.constexpr,
    FARTHEST: tl.constexpr, LARGEST: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (i, v): vector v of some groups. PARTS: how many results, each of so many ENTRIES."""
    column, vector = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    whole = _costs(
        target_ptr,
        weight_ptr,
        scale_ptr,
        levels_ptr,
        vector,
        column,
        columns,
        WIDTH,
        LEVELS,
        FARTHEST,
        LARGEST,
    )
    whole = tl.reshape(whole, (COLUMNS, LEVELS * WIDTH))
    high = (whole >> _LOW_BITS).to(tl.float16)
    low = (whole & (_UNIT - 1)).to(tl.float16)
    place = tl.arange(0, LEVELS * WIDTH)[:, None] * (PARTS * ENTRIES)
    for part in tl.static_range(PARTS):
        best = tl.full([COLUMNS], 0x7FFFFFFF, tl.int32)
        for start in range(0, ENTRIES, AT_ONCE):
            entry = part * ENTRIES + start + tl.arange(0, AT_ONCE)
            chosen = tl.load(chosen_ptr + place + entry[None, :])
            sums = tl.dot(high, chosen) * _UNIT + tl.dot(low, chosen)
            cost = (sums + _EXACT).to(tl.int32, bitcast=True) & 0x7FFFFF
            best = tl.minimum(best, tl.min((cost << NUMBER_BITS) | entry[None, :], 1))
        number = tl.load(numbers_ptr + (best & ((1 << NUMBER_BITS) - 1)))
        row = part * tl.num_programs(1) + vector
        tl.store(out_ptr + row.to(tl.int64) * columns + column, number, mask=column < columns)


def nearest_entries(
    book: EntryBook, target: Tensor, weights: Tensor, scale: Tensor, each_part: bool
) -> Tensor:
    """As `entries.nearest_entries`, int32."""
    tables = _tables(book.name, target.device)
    group, count = target.shape
    assert target.is_contiguous() and weights.is_contiguous() and scale.is_contiguous()
    parts, vectors = (book.parts if each_part else 1), group // book.width
    entries = len(tables.numbers)
    out = torch.empty((parts, vectors, count), dtype=torch.int32, device=target.device)
    _nearest_kernel[(triton.cdiv(count, _COLUMNS), vectors)](
        target, weights, scale, tables.levels, tables.chosen, tables.numbers, out, count,
        WIDTH=book.width, LEVELS=len(tables.levels), PARTS=parts, ENTRIES=entries // parts,
        NUMBER_BITS=entries.bit_length() - 1, FARTHEST=FARTHEST * book.top, LARGEST=float(book.largest),
        COLUMNS=_COLUMNS, AT_ONCE=_ENTRIES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
