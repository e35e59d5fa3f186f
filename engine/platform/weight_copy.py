"""Weights in memory of this process instead of a mapped file: 2 MiB pages, which a file's pages are not.

A matrix that is read from end to end for every token passes through 512 times fewer entries of the processor's page
tables; decode is 1 to 6% faster (docs/performance.md). It costs a copy at every start, and memory that processes do
not share. Knows tensors and bytes; not what a model is.
"""

import dataclasses
import mmap
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from quengine.kernels.quant_tensor import QuantTensor
from quengine.platform.weight_loader import progress_text

HUGE_PAGE = 2 << 20
_ALIGNMENT = 64
_REPORT_EVERY = 1 / 15


def copy_weights(
    tensors: Mapping[str, QuantTensor], let_go: Callable[[], None], progress: Callable[[str], None] | None
) -> dict[str, QuantTensor]:
    """All tensors, copied into one piece of memory. `let_go` is called after each, so that no two copies of a model are
    held; `progress` is told how far it is.
    """
    sizes = {name: -(-tensor.data.nbytes // _ALIGNMENT) * _ALIGNMENT for name, tensor in tensors.items()}
    total, began, told = sum(sizes.values()), time.perf_counter(), 0.0
    room, at, copies = _huge_pages(total), 0, dict[str, QuantTensor]()
    for name, tensor in tensors.items():
        place = room[at : at + tensor.data.nbytes]
        place.copy_(tensor.data.reshape(-1).view(torch.uint8))
        copies[name] = dataclasses.replace(tensor, data=place.view(tensor.data.dtype).view(tensor.data.shape))
        at += sizes[name]
        let_go()
        now = time.perf_counter()
        if progress is not None and now - told > _REPORT_EVERY:
            told = now
            progress(progress_text(at, total, now - began))
    return copies


def _huge_pages(nbytes: int) -> torch.Tensor:
    """So many bytes at a 2 MiB boundary; in huge pages where the system has them for who asks."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: ordinary pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE
    return whole[first : first + nbytes]
