"""Memory that prompts compute in, kept from one operation and one prompt to the next.

Large tensors that are allocated anew come from the system page by page, each page zeroed at its first use, and the C
library gives most of them back when they are freed: a prompt of 512 tokens took 24,000 such page faults. The C library
is set to keep freed memory. It still gives back tensors of more than 32 MiB, such as gate and up of 512 rows of a 7B
model, 14,336 pages a layer, so `scratch` keeps these.
"""

from __future__ import annotations

import sys
from ctypes import CDLL
from functools import cache
from math import prod
from threading import local

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of the GNU C library
_KEPT = 1 << 29  # bytes that stay with the process at the end of its heap
_MAPPED = 1 << 25  # bytes from which each allocation is a mapping, the most that the library allows

_LARGEST = 1 << 28  # bytes that are kept, of each role and thread


class _Held(local):
    """The memory of one thread, by role."""

    def __init__(self) -> None:
        self.by_role: dict[str, Tensor] = {}


_held = _Held()


def scratch(role: str, *shape: int) -> Tensor:
    """Uninitialised fp32 of a shape, which this thread's next request of the same role overwrites."""
    count = prod(shape)
    held = _held.by_role.get(role)
    if held is None or held.numel() < count:
        held = torch.empty(count)
        if 4 * count <= _LARGEST:
            _held.by_role[role] = held
    return held[:count].view(shape)


@cache
def keep_freed_memory() -> None:
    """Sets the C library to keep freed memory, where it is GNU's; see above."""
    mallopt = getattr(CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED)
