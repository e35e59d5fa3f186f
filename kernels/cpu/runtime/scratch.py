"""Memory for what an operation computes and reads itself, kept from one operation to the next.

Large tensors that are allocated anew come from the system page by page, each zeroed at its first use; the C library
gives those above 32 MiB back whenever they are freed: gate and up of 512 rows of a 7B model are 14,336 pages a layer.
"""

from __future__ import annotations

from math import prod
from threading import local

import torch
from torch import Tensor

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
