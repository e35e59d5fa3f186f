"""The quantizers that `quantize` takes on the CPU."""

from quengine.kernels.cpu.quantize.book_search import fit_books
from quengine.kernels.cpu.quantize.plain_blocks import plain_blocks
from quengine.kernels.cpu.quantize.range_search import fit_ranges
from quengine.kernels.cpu.quantize.scale_search import fit_scales
from quengine.kernels.quantize.quantize import Quantizers

COMPILED = Quantizers(plain_blocks, fit_books, fit_scales, fit_ranges)
"""Compiled quantizers: the same bits as the definitions, in a tenth to a fortieth of the time."""
