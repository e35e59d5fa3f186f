"""Rows of a causal convolution in kernels that are compiled: some channels of a position, with its history."""

from __future__ import annotations

from llvmlite import ir
from numba import njit

from quengine.kernels.cpu.ir.gate_ir import gate_row
from quengine.kernels.cpu.ir.row_ir import scale_row
from quengine.kernels.cpu.ir.tile_ir import clear_floats
from quengine.kernels.cpu.ir.vector_code import vector_code
from quengine.kernels.cpu.ir.vector_ir import F32, Emitter, vec


@njit(inline="always")  # type: ignore[untyped-decorator]
def convolve_row(
    x: int, count: int, position: int, history: int, rows: int, stride: int, weight: int, taps: int, bias: int
) -> None:
    """See kernels/causal_conv.py: `count` channels of a position at address x go to its row of the history, and become
    silu of their convolution.

    history: address of a sequence's first row of these channels, `rows` rows of `stride` bytes. weight: of `taps` rows,
    as far apart. bias: address, or 0.
    """
    scale_row(x, 1.0, count, history + position % rows * stride)
    if bias:
        scale_row(bias, 1.0, count, x)
    else:
        clear_floats(x, count)
    for tap in range(taps):
        read = position - taps + 1 + tap
        if read >= 0:
            _add_product(weight + tap * stride, history + read % rows * stride, x, count)
    gate_row("sigmoid", x, x, count)


@vector_code
def _add_product(e: Emitter, x: ir.Value, y: ir.Value, out: ir.Value, count: ir.Value) -> None:
    """Adds `count` fp32 at address x times those at address y to those at address out."""

    def add(i: ir.Value, lanes: int) -> None:
        at, lane = e.b.mul(i, e.i64(4)), vec(F32, lanes)
        product = e.load(lane, e.at(x, at)), e.load(lane, e.at(y, at))
        e.store(e.fma(*product, e.load(lane, e.at(out, at))), e.at(out, at))

    e.spans(e.i64(0), count, add)
