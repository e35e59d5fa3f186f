"""Runs a search's kernel in the calling thread: quantizing has threads of its own, each with other rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int64
from functools import cache
from threading import Lock
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from quengine.kernels.cpu.runtime.arguments import Arguments

LANES = 16
"""Blocks of a task."""


_compiling = Lock()


def in_lanes(values: Tensor) -> Tensor:
    """fp32 [..., blocks], contiguous, with zeros after the last block up to a multiple of 16."""
    missing = -values.shape[-1] % LANES
    return pad(values, (0, missing)) if missing else values.contiguous()


def run_here(kernel: Callable[[str], int], name: str, arguments: Arguments, tasks: int) -> None:
    """Runs all tasks of the kernel of a format, without the GIL."""
    with _compiling:  # one thread compiles it, the others wait for that
        call = _callable(kernel(name))
    memory = array("q", arguments.to_bytes())
    for task in range(tasks):
        call(memory.buffer_info()[0], task)


@cache
def _callable(kernel: int) -> Any:
    return CFUNCTYPE(None, c_int64, c_int64)(kernel)
