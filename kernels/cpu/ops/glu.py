"""Gated linear units on the CPU, compiled, with the quantization of the result; defined in `kernels/glu.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import glu_kernel, input_glu_kernel
from quengine.kernels.cpu.runtime.threads import Launch, get_threads, run
from quengine.kernels.glu import Activation, Gating, glu_width

_COLUMNS, _TASKS = 64, 4  # columns per task are a multiple of _COLUMNS; _TASKS tasks per thread


@dataclass
class GLUArguments(Arguments):
    """gate_up: fp32 [rows, 2 * cols], without a gate [rows, cols]; out: fp32 [rows, cols]; records: quantized
    activations, or 0. All are addresses.
    """

    gate_up: int
    rows: int
    task_rows: int
    cols: int
    task_cols: int
    out: int
    records: int
    record_stride: int


def glu_launch(
    gate_up: Tensor,
    out: Tensor,
    records: Tensor | None,
    step: int,
    activation: Activation = "silu",
    task_rows: int | None = None,
) -> Launch:
    """activation(gate) * up: gate_up fp32 [T, 2F], or [T, F] without a gate, out fp32 [T, F], contiguous; without a
    gate they may be the same. A task is `step` columns of `task_rows` rows, by default of all.

    With `records`, uint8 [T, quantized_row_bytes(F)], contiguous, the rows are quantized into it as well; `step` and F
    must be multiples of 32.
    """
    rows, width = out.shape
    assert records is None or (step % 32 == 0 and width % 32 == 0)
    arguments = GLUArguments(
        gate_up=gate_up.data_ptr(),
        rows=rows,
        task_rows=task_rows or max(1, rows),
        cols=width,
        task_cols=step,
        out=out.data_ptr(),
        records=0 if records is None else records.data_ptr(),
        record_stride=0 if records is None else records.stride(0),
    )
    tasks = -(-width // step) * -(-rows // arguments.task_rows)
    return Launch(glu_kernel(activation), arguments, tasks, keep=(gate_up, out, records))


@dataclass
class InputGLUArguments(Arguments):
    """gate, up: fp32 rows at addresses, strides in bytes; the rest as of GLUArguments."""

    gate: int
    gate_stride: int
    up: int
    up_stride: int
    rows: int
    cols: int
    task_cols: int
    out: int
    records: int
    record_stride: int


def input_glu_launch(
    gate: Tensor, up: Tensor, out: Tensor, records: Tensor | None, step: int, activation: Gating
) -> Launch:
    """activation(gate) * up: gate and up fp32 [T, F] with adjacent elements and any row stride; otherwise as
    `glu_launch`."""
    rows, width = out.shape
    assert gate.shape == up.shape == out.shape and gate.stride(1) == up.stride(1) == 1
    assert records is None or (step % 32 == 0 and width % 32 == 0)
    arguments = InputGLUArguments(
        gate=gate.data_ptr(),
        gate_stride=4 * gate.stride(0),
        up=up.data_ptr(),
        up_stride=4 * up.stride(0),
        rows=rows,
        cols=width,
        task_cols=step,
        out=out.data_ptr(),
        records=0 if records is None else records.data_ptr(),
        record_stride=0 if records is None else records.stride(0),
    )
    kernel = input_glu_kernel(activation)
    return Launch(kernel, arguments, -(-width // step), keep=(gate, up, out, records))


def input_glu(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
    """activation(gate) * up, fp32 [T, F] each, rows of any stride."""
    out = torch.empty(gate.shape)
    run([input_glu_launch(gate, up, out, None, _COLUMNS, activation)])
    return out


def glu(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up of each row of gate_up fp32 [T, 2F], or [T, F] without a gate: fp32 [T, F]."""
    gate_up = gate_up.contiguous()
    out = torch.empty(gate_up.shape[0], glu_width(gate_up.shape[1], activation))
    # Whole rows where there are enough: each run of a row begins on another page.
    tasks, (rows, width) = _TASKS * get_threads(), out.shape
    if rows >= tasks:
        run([glu_launch(gate_up, out, None, width, activation, rows // tasks)])
    else:
        step = -(-width // (_COLUMNS * tasks)) * _COLUMNS
        run([glu_launch(gate_up, out, None, step, activation)])
    return out
