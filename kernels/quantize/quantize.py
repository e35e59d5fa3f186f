"""Rows of floats as rows of blocks: the definition of every quantizer, on the CPU and on CUDA.

Types whose scale is a formula have the bytes of ggml's reference quantizers. The others are searched: the result
depends on the row and its importance alone, bit for bit, whatever the device and the number of threads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS, BlockFormat
from quengine.kernels.quantize.books import BookSearch, as_books, fit_books
from quengine.kernels.quantize.importance import floored
from quengine.kernels.quantize.minimums import RangeSearch, as_ranges, fit_ranges
from quengine.kernels.quantize.pack import PACKED, pack
from quengine.kernels.quantize.plain import FORMULAS, PlainBlocks, plain_blocks
from quengine.kernels.quantize.scales import ScaleSearch, as_scales, fit_scales

SEARCHED_WITH_IMPORTANCE = frozenset(("Q4_0", "Q4_1", "Q5_0", "Q5_1"))
"""Types that have a formula's scales without importances."""
PLAIN = frozenset(FORMULAS) - SEARCHED_WITH_IMPORTANCE
"""Types that no importance changes."""
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Weights at a time: what a core's cache holds, or what fills a GPU."""


@dataclass(frozen=True)
class Quantizers:
    """Formulas of blocks, and the searches for entries, for scales, and for scales with minimums. All give the bits of
    these, the definitions."""

    plain: PlainBlocks = plain_blocks
    books: BookSearch = fit_books
    scales: ScaleSearch = fit_scales
    ranges: RangeSearch = fit_ranges


DEFINITIONS = Quantizers()


def quantize(
    fmt: BlockFormat, rows: Tensor, importance: Tensor | None = None, quantizers: Quantizers = DEFINITIONS
) -> Tensor:
    """Blocks of `fmt` for fp32 rows [R, K]: uint8 [R, row_bytes], on the rows' device.

    importance  fp32 [K], or [R, K] of rows that differ in it: what the squared error of a column counts, not negative
                (an imatrix). Without it: llama.cpp's weights for each type, functions of the row.

    Raises ValueError if K is not a whole number of blocks.
    """
    width = fmt.row_bytes(rows.shape[1])
    if not fmt.is_quantized:
        return _as_floats(fmt, rows)
    if importance is not None:
        importance = floored(importance if importance.dim() == 2 else importance.unsqueeze(0))
    out = torch.empty((rows.shape[0], width), dtype=torch.uint8, device=rows.device)
    step = max(1, _CHUNK.get(rows.device.type, 1 << 24) // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        mine = importance if importance is None or len(importance) == 1 else importance[part]
        out[part] = _quantized(fmt, rows[part], mine, quantizers)
    return out


def _as_floats(fmt: BlockFormat, rows: Tensor) -> Tensor:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[fmt.name]
    return rows.to(dtype).contiguous().view(torch.uint8)


def _quantized(fmt: BlockFormat, rows: Tensor, importance: Tensor | None, quantizers: Quantizers) -> Tensor:
    if fmt.name in (FORMULAS if importance is None else PLAIN):
        return quantizers.plain(fmt, rows)
    if fmt.book:
        return pack(as_books(fmt, quantizers.books(fmt, rows, importance), len(rows)))
    if fmt.has_min:
        return pack(as_ranges(fmt, quantizers.ranges(fmt, rows, importance), len(rows)))
    return pack(as_scales(fmt, quantizers.scales(fmt, rows, importance), len(rows)))


WRITTEN = tuple(name for name, fmt in FORMATS.items() if not fmt.is_quantized or name in PACKED)
"""Names of the types that `quantize` writes."""
