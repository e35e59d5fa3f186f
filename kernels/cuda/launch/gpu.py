"""Which GPU kernels are chosen and compiled for: the one that is there, or one that is assumed, which need not be.

Kernels follow from a GPU's name, by its measured launch geometry, and from its compute capability.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Gpu:
    """name: as torch has it; "" for any of this capability without launch geometry of its own. capability: (9, 0)."""

    name: str
    capability: tuple[int, int]

    @property
    def arch(self) -> int:
        """90 of compute capability 9.0."""
        return 10 * self.capability[0] + self.capability[1]


_assumed: Gpu | None = None


@contextmanager
def assuming(gpu: Gpu) -> Iterator[None]:
    """Within it, kernels are chosen for `gpu`, on whatever device their arguments are."""
    global _assumed
    before, _assumed = _assumed, gpu
    try:
        yield
    finally:
        _assumed = before


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU that kernels with arguments on `device` are chosen for; None for another device."""
    return _assumed or (_present(device) if device.type == "cuda" else None)


def current_gpu() -> Gpu | None:
    """The GPU that is assumed, or torch's current one; None without one."""
    return _assumed or _current()


@cache
def _current() -> Gpu | None:
    return _present(torch.device("cuda")) if torch.cuda.is_available() else None


@cache
def _present(device: torch.device) -> Gpu:
    return Gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
