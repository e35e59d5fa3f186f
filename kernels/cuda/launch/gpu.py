"""The GPU that kernels are selected and compiled for: the one present, or an assumed one, which need not be present.

Kernels depend on a GPU's name, through its measured launch geometry, and on its compute capability.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Gpu:
    """name: as in torch; "" for any GPU of this capability without launch geometry of its own. capability: as
    (9, 0).
    """

    name: str
    capability: tuple[int, int]

    @property
    def arch(self) -> int:
        """The architecture number, 90 for compute capability 9.0."""
        return 10 * self.capability[0] + self.capability[1]


_assumed: Gpu | None = None


@contextmanager
def assuming(gpu: Gpu) -> Iterator[None]:
    """Within this context, kernels are selected for `gpu`, whatever device their arguments are on."""
    global _assumed
    before, _assumed = _assumed, gpu
    try:
        yield
    finally:
        _assumed = before


def gpu_of(device: "torch.device") -> Gpu | None:
    """The GPU that kernels with arguments on `device` are selected for; None for another device type."""
    return _assumed or (_present(device) if device.type == "cuda" else None)


def is_hopper(device: "torch.device") -> bool:
    """Whether kernels are selected for a GPU of compute capability 9."""
    gpu = gpu_of(device)
    return gpu is not None and gpu.capability[0] == 9


def current_gpu() -> Gpu | None:
    """The assumed GPU, or torch's current one; None without one."""
    return _assumed or _current()


def runs_together(programs: int) -> bool:
    """Whether torch's current GPU, or the part of it that MIG or MPS leaves, has at least `programs` multiprocessors:
    each runs one program or more. An assumed GPU is taken to be a whole one.
    """
    return _assumed is not None or programs <= _multiprocessors()


@cache
def _multiprocessors() -> int:
    import torch

    device = torch.cuda.current_device()
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _current() -> Gpu | None:
    import torch

    return _present(torch.device("cuda")) if torch.cuda.is_available() else None


@cache
def _present(device: "torch.device") -> Gpu:
    import torch

    return Gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
