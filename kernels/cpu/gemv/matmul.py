"""Matmul and embedding on the CPU, on weights as stored.

Decode uses q-dot: activations are rounded to int16 in groups of 32, and weights are read block by block where they
lie, usually in the mapped file. A result depends on its activation row and weight row alone: not on the number of
threads or on the other rows of the batch. Several rows share the unpacking of a weight; AMX multiplies many of them on
tiles, with the same bits (amx_rows.py).

Prefill multiplies in fp32, on AMX or on int16, see tile_matmul.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cpu.gemm.tile_matmul import tile_matmul_launches
from quengine.kernels.cpu.gemv.amx_rows import uses_amx_rows
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32
from quengine.kernels.cpu.runtime.kernel_table import (
    amx_matvec_kernel,
    dequantize_kernel,
    float_matvec_kernel,
    matvec_kernel,
    quantize_kernel,
)
from quengine.kernels.cpu.runtime.threads import Launch, run
from quengine.kernels.quant_tensor import QuantTensor


@dataclass
class QuantizeArguments(Arguments):
    """fp32 rows x, and the quantized activations (`records`) that they are rounded into."""

    x: int
    x_stride: int
    cols: int
    records: int
    record_stride: int


@dataclass
class MatvecArguments(Arguments):
    """Weight rows times activations.

    length: blocks per weight row, or columns of a float weight. x: quantized activations, or fp32 for a float weight;
    last_x: the index of their last row. y: fp32, `y_stride` bytes per row of x.
    """

    weights: int
    row_bytes: int
    rows: int
    task_rows: int
    length: int
    x: int
    x_stride: int
    last_x: int
    y: int
    y_stride: int


@dataclass
class DequantizeArguments(Arguments):
    """rows: int64 indices of weight rows; out: fp32, a row for each."""

    weights: int
    row_bytes: int
    blocks: int
    rows: int
    out: int
    out_stride: int
    scale: Fp32


# Weight bytes per task of a matvec. Each task begins with cache misses, as its first rows have not been prefetched.
_TASK_BYTES = 512 << 10


def prompt_linear(
    x: Tensor, parts: Sequence[QuantTensor], addend: Tensor | None = None, y: Tensor | None = None
) -> Tensor:
    """x [T, K] fp32 times weights [N_i, K] transposed, side by side, plus an addend [T or 1, sum of N_i], by the
    prefill kernels: fp32 [T, sum of N_i], contiguous, in `y` if given.

    A row's bits do not depend on the other rows or on their number. Raises ValueError when a weight's width is
    not K.
    """
    for w in parts:
        check_width(x, w)
    if y is None:
        y = torch.empty(x.shape[0], sum(w.rows for w in parts))
    run(tile_matmul_launches(x.contiguous(), parts, y, addend))
    return y


def quantize_launch(x: Tensor, records: Tensor) -> Launch:
    """The kernel that rounds x fp32 [T, K] into quantized activations, uint8 [T, quantized_row_bytes(K)]."""
    arguments = QuantizeArguments(
        x=x.data_ptr(),
        x_stride=4 * x.stride(0),
        cols=x.shape[1],
        records=records.data_ptr(),
        record_stride=records.stride(0),
    )
    return Launch(quantize_kernel(), arguments, x.shape[0], keep=(x, records))


def task_rows(w: QuantTensor) -> int:
    """Number of weight rows per task of a matvec: 1, or an even number."""
    rows = min(w.rows, _TASK_BYTES // w.data.shape[1])
    return rows // 2 * 2 if rows > 1 else 1


def matvec_launch(
    source: Tensor,
    w: QuantTensor,
    y: Tensor,
    column: int,
    after_previous: bool = True,
    step: int | None = None,
) -> Launch:
    """y[:, column : column + N] = quantized activations times w transposed; a float weight takes fp32 x as source.

    A task is `step` weight rows, by default `task_rows(w)`.
    """
    count = source.shape[0]
    step = step or task_rows(w)
    if uses_amx_rows(w, count):
        kernel, length = amx_matvec_kernel(w.format.name), w.cols // w.format.block
    elif w.format.is_quantized:
        kernel, length = matvec_kernel(w.format.name, count > 1), w.cols // w.format.block
    else:
        kernel, length = float_matvec_kernel(w.format.name), w.cols
    arguments = MatvecArguments(
        weights=w.data.data_ptr(),
        row_bytes=w.data.shape[1],
        rows=w.rows,
        task_rows=step,
        length=length,
        x=source.data_ptr(),
        x_stride=source.stride(0) * source.element_size(),
        last_x=count - 1,
        y=y.data_ptr() + 4 * column,
        y_stride=4 * y.stride(0),
    )
    task_bytes = step * w.data.shape[1]
    tasks = -(-w.rows // step)
    return Launch(kernel, arguments, tasks, after_previous, (source, w, y), w.data.data_ptr(), task_bytes)


def embed_launch(w: QuantTensor, rows: Tensor, out: Tensor, scale: float) -> Launch:
    """Rows (int64 [T], read when the kernel runs, not checked) of a weight [N, K] as fp32 [T, K], times `scale`."""
    arguments = DequantizeArguments(
        weights=w.data.data_ptr(),
        row_bytes=w.data.shape[1],
        blocks=w.cols // w.format.block,
        rows=rows.data_ptr(),
        out=out.data_ptr(),
        out_stride=4 * out.stride(0),
        scale=scale,
    )
    return Launch(dequantize_kernel(w.format.name), arguments, rows.shape[0], keep=(w, rows, out))


def check_width(x: Tensor, w: QuantTensor) -> None:
    """Raises ValueError if x [T, K] is not as wide as w [N, K]."""
    if w.cols != x.shape[1]:
        raise ValueError(f"{w.name} has width {w.cols}; the activations have {x.shape[1]}")
