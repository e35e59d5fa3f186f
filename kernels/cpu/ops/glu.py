"""Gated linear units in compiled code, with the quantization of the result: `kernels/glu.py`'s definition."""

from __future__ import annotations

import torch
from torch import Tensor

from quengine.kernels.backend import Activation
from quengine.kernels.cpu.runtime.kernel_table import glu_kernel
from quengine.kernels.cpu.runtime.threads import Launch, get_threads, run

_COLUMNS, _TASKS = 64, 4  # of a task where rows are many, a multiple; of a thread


def glu_launch(
    gate_up: Tensor, out: Tensor, records: Tensor | None, step: int, activation: Activation = "silu"
) -> Launch:
    """activation(gate) * up: gate_up fp32 [T, 2F], out fp32 [T, F], contiguous. A task is `step` columns of all rows.

    With `records`, uint8 [T, record_bytes(F)], contiguous, the rows are quantized into it as well; `step` and F are
    then multiples of 32.
    """
    rows, width = out.shape
    assert records is None or (step % 32 == 0 and width % 32 == 0)
    record, stride = (0, 0) if records is None else (records.data_ptr(), records.stride(0))
    parameters = (gate_up.data_ptr(), width, step, rows, out.data_ptr(), record, stride)
    return Launch(glu_kernel(activation), parameters, -(-width // step), keep=(gate_up, out, records))


def glu(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up of each row of gate_up fp32 [T, 2F]: fp32 [T, F]."""
    gate_up = gate_up.contiguous()
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    # As long runs of a row as there are tasks enough: short ones are read from a new page each.
    step = -(-out.shape[1] // (_COLUMNS * _TASKS * get_threads())) * _COLUMNS
    run([glu_launch(gate_up, out, None, step, activation)])
    return out
