"""The kernel of soft-capped logits (softcap.py)."""

from __future__ import annotations

from quengine.kernels.cpu.ir.gate_ir import cap_floats
from quengine.kernels.cpu.ops.softcap import SoftcapArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def softcap_kernel() -> bytes:
    """A task is `task_cols` columns of all rows."""

    def softcap_span(args: SoftcapArguments, task: int) -> None:
        first, last = task * args.task_cols, min(args.cols, (task + 1) * args.task_cols)
        for row in range(args.rows):
            cap_floats(args.y + row * args.y_stride, first, last, args.cap)

    return compile_kernel(softcap_span, SoftcapArguments)
