"""The kernel of an attention's output gates (output_gate.py)."""

from __future__ import annotations

from quengine.kernels.cpu.ir.gate_ir import gate_row
from quengine.kernels.cpu.ops.output_gate import OutputGateArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def output_gate_kernel() -> bytes:
    """Task i is head i % heads of row i // heads."""

    def gate_head(args: OutputGateArguments, task: int) -> None:
        width = 4 * args.width
        row, head = task // args.heads, task % args.heads
        gates = args.qkv + row * args.row_bytes + (2 * head + 1) * width
        gate_row("sigmoid", gates, args.y + task * width, args.width)

    return compile_kernel(gate_head, OutputGateArguments)
