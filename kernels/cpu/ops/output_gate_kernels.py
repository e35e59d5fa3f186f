"""The kernel of an attention's output gates (output_gate.py)."""

from __future__ import annotations

from quengine.kernels.cpu.ir.gate_ir import gate_row
from quengine.kernels.cpu.ops.output_gate import OutputGateArguments
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def output_gate_kernel() -> bytes:
    """A task is a row."""

    def gate_heads(args: OutputGateArguments, row: int) -> None:
        width = 4 * args.width
        gates, y = args.qkv + row * args.row_bytes + width, args.y + row * args.heads * width
        for head in range(args.heads):
            gate_row("sigmoid", gates + 2 * head * width, y + head * width, args.width)

    return compile_kernel(gate_heads, OutputGateArguments)
