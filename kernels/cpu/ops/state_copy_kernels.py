"""The kernel that copies states (state_copy.py)."""

from __future__ import annotations

from quengine.kernels.cpu.ir.tile_ir import copy_floats
from quengine.kernels.cpu.ops.state_copy import StateCopyArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def state_copy_kernel() -> bytes:
    """A task is `task_floats` adjacent fp32."""

    def copy_span(args: StateCopyArguments, task: int) -> None:
        first = task * args.task_floats
        count = min(args.floats - first, args.task_floats)
        copy_floats(args.source + 4 * first, args.target + 4 * first, count)

    return compile_kernel(copy_span, StateCopyArguments)
