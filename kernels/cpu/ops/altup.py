"""The kernels of alternating updates, compiled; defined in kernels/altup.py. Each has one task per token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quengine.kernels.altup_operations import AltUpSpec
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32
from quengine.kernels.cpu.runtime.kernel_table import (
    altup_add_kernel,
    altup_close_kernel,
    altup_correct_kernel,
    altup_join_kernel,
    altup_open_kernel,
    altup_predict_kernel,
    sparse_gate_kernel,
)
from quengine.kernels.cpu.runtime.threads import Launch


@dataclass
class AltUpArguments(Arguments):
    """fp32 arrays at addresses. x, out: [N, T, W], `stride` bytes from one of N to the next. y: [T, W]. scaled: [T, W],
    a place for the second result. work: [T, W + N], room for a normed row and numbers. norm, router, coefficients:
    as `AltUpSpec` has them."""

    x: int
    out: int
    stride: int
    y: int
    scaled: int
    scale: int
    work: int
    norm: int
    eps: Fp32
    router: int
    coefficients: int
    count: int
    cols: int


@dataclass
class RowsArguments(Arguments):
    """fp32 arrays at addresses. x: [N, T, W] with `stride`, or [T, W]. y, out: [T, W]; y of `open` [T, (N - 1) * W].
    number: which of the N rows is added; last: it is the last one."""

    x: int
    stride: int
    y: int
    out: int
    count: int
    cols: int
    number: int
    factor: Fp32


def _of_spec(
    x: Tensor, out: Tensor, y: Tensor, scaled: Tensor, work: Tensor, spec: AltUpSpec, coefficients: Tensor
) -> AltUpArguments:
    count, _, cols = x.shape
    assert x.is_contiguous() and out.is_contiguous() and y.stride(-1) == 1 and work.shape[1] >= cols + count
    return AltUpArguments(
        *(
            x.data_ptr(),
            out.data_ptr(),
            4 * x.stride(0),
            y.data_ptr(),
            scaled.data_ptr(),
            spec.scale.data_ptr(),
        ),
        *(work.data_ptr(), spec.norm.weight.data_ptr(), spec.norm.eps, spec.router.data_ptr()),
        *(coefficients.data_ptr(), count, cols),
    )


def predict_launch(x: Tensor, out: Tensor, work: Tensor, spec: AltUpSpec) -> Launch:
    """Predicts rows out from x, both fp32 [N, T, W]. work: fp32 [T, W + N]."""
    arguments = _of_spec(x, out, x, x, work, spec, spec.predict)
    return Launch(altup_predict_kernel(), arguments, x.shape[1], keep=(x, out, work, spec))


def correct_launch(
    x: Tensor, y: Tensor, out: Tensor, scaled: Tensor, work: Tensor, spec: AltUpSpec
) -> Launch:
    """Corrects predictions x [N, T, W] by y [T, W]: out [N, T, W], scaled [T, W]. work: [T, W + N]. All fp32."""
    arguments = _of_spec(x, out, y, scaled, work, spec, spec.correct)
    return Launch(altup_correct_kernel(), arguments, x.shape[1], keep=(x, y, out, scaled, work, spec))


def _rows(x: Tensor, y: Tensor, out: Tensor, number: int = 0, factor: float = 1.0) -> RowsArguments:
    count, _, cols = x.shape
    assert x.is_contiguous() and y.is_contiguous() and out.is_contiguous()
    return RowsArguments(
        x.data_ptr(), 4 * x.stride(0), y.data_ptr(), out.data_ptr(), count, cols, number, factor
    )


def add_launch(x: Tensor, rows: Tensor) -> Launch:
    """x [N, T, W] += rows [T, W] but for the first of N."""
    return Launch(altup_add_kernel(), _rows(x, rows, x), x.shape[1], keep=(x, rows))


def open_launch(x: Tensor, projected: Tensor, out: Tensor) -> Launch:
    """Writes embedded x [T, W] and their products [T, (N - 1) * W] to out [N, T, W]."""
    return Launch(altup_open_kernel(), _rows(out, projected, x), x.shape[0], keep=(x, projected, out))


def close_launch(x: Tensor, row: Tensor, total: Tensor, number: int) -> Launch:
    """Adds the product `row` [T, W] of row `number` (1 .. N - 1) of x [N, T, W] to total [T, W]. Number 1 starts total
    from row 0 of x, and N - 1 divides it by N."""
    return Launch(altup_close_kernel(), _rows(x, row, total, number), x.shape[1], keep=(x, row, total))


def join_launch(y: Tensor, beside: Tensor, out: Tensor) -> Launch:
    """(y + beside) / sqrt(2), all [T, W]."""
    return Launch(altup_join_kernel(), _rows(y[None], beside, out), y.shape[0], keep=(y, beside, out))


def sparse_gate_launch(gate_up: Tensor, deviations: float, out: Tensor) -> Launch:
    """out [T, F] = gelu_tanh(`above_cutoff` of the gates, see kernels/altup.py) * up, for gate_up [T, 2F]."""
    arguments = _rows(out[None], gate_up, out, factor=deviations)
    return Launch(sparse_gate_kernel(), arguments, len(out), keep=(gate_up, out))
