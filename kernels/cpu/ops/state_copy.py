"""Copies of a sequence's recurrent state to another slot, as kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import state_copy_kernel
from quengine.kernels.cpu.runtime.threads import Launch, run

_TASK_FLOATS = 1 << 14


@dataclass
class StateCopyArguments(Arguments):
    """Copies `floats` fp32, `task_floats` per task, from address source to address target."""

    source: int
    target: int
    floats: int
    task_floats: int


def state_copy_launches(parts: Iterable[Tensor], slot: int, block: int) -> list[Launch]:
    """Copies each part [slots, ...] of a layer's state, fp32 and contiguous, from row `slot` to row `block`.
    They wait for nothing."""
    launches = []
    for part in parts:
        assert part.is_contiguous() and part.dtype == torch.float32
        source, target = part[slot], part[block]
        arguments = StateCopyArguments(source.data_ptr(), target.data_ptr(), source.numel(), _TASK_FLOATS)
        tasks = -(-source.numel() // _TASK_FLOATS)
        launches.append(Launch(state_copy_kernel(), arguments, tasks, after_previous=False, keep=(part,)))
    return launches


def copy_states(part: Tensor, source: int, target: int) -> None:
    """part[:, target] = part[:, source] of the states of all layers, fp32 [layers, slots, ...], contiguous."""
    run(state_copy_launches(part, source, target))
