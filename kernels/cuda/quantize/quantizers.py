"""The quantizers that `quantize` takes on CUDA."""

from functools import partial

from quengine.kernels.cuda.quantize.nearest_entries import nearest_entries
from quengine.kernels.quantize.books import fit_books
from quengine.kernels.quantize.quantize import Quantizers

LAUNCHED = Quantizers(books=partial(fit_books, entries=nearest_entries))
"""Gives the same bits as the definitions."""
