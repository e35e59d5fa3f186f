"""The gated delta net in compiled code: the twin of kernels/gated_delta.py.

There are three kernels. The first takes a head's channels through the convolution, divides queries and keys by their
lengths and makes strengths and decays of b and a, all in place. In the second, a task goes through the rows with some
columns of a value head's matrix, as no column depends on the others. The third normalizes and gates. A chunk advances
the matrix position by position, as single tokens do, so a sequence's bits do not depend on its chunks. Positions and
slots are read from memory, so that a list of kernels made once serves every token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32
from quengine.kernels.cpu.runtime.kernel_table import (
    delta_convolution_kernel,
    delta_memory_kernel,
    delta_output_kernel,
)
from quengine.kernels.cpu.runtime.threads import Launch
from quengine.kernels.gated_delta import L2_EPS, GatedDeltaSpec

COLUMNS = 32
"""Columns of a value head's matrix in a task: with 128 rows 16 KiB, which stay in a core's L1 cache."""

MOST_WIDTH = 256
"""The widest head."""


@dataclass
class GatedDeltaArguments(Arguments):
    """x: fp32 rows of qkv, z, b and a, `row_bytes` apart, overwritten but for z. out: fp32 [rows, value_heads, width].

    positions: int64, one per row. tables: int64, a row's slot first, `table_stride` bytes per row. history: fp32
    [slots, history_rows, channels]; memory: fp32 [slots, value_heads, width, width]. conv: fp32 [taps, channels];
    decay, bias: fp32 [value_heads]; norm: fp32 [width]. scale: of queries.
    """

    x: int
    row_bytes: int
    rows: int
    positions: int
    tables: int
    table_stride: int
    history: int
    history_rows: int
    memory: int
    out: int
    conv: int
    taps: int
    decay: int
    bias: int
    norm: int
    key_heads: int
    value_heads: int
    width: int
    tiled: int
    scale: Fp32
    l2_eps: Fp32
    eps: Fp32


def gated_delta_launches(
    x: Tensor, spec: GatedDeltaSpec, layer: SlotLayer, positions: Tensor, tables: Tensor, out: Tensor
) -> tuple[Launch, Launch, Launch]:
    """out [T, value_heads * head_dim] of x [T, sum of spec.widths], which is overwritten; both fp32.

    positions: int64 [T]. tables: int64 [T, ...], whose first column has the slots. Both are read when the kernels run.
    The second and third kernels need the whole result of the one before. Raises ValueError for heads of other sizes,
    and a history without a row for the newest position.
    """
    history, memory = layer.parts
    width, tensors = spec.head_dim, (spec.conv, spec.decay, spec.bias, spec.norm, history, memory, out)
    if width % 8 or width > MOST_WIDTH or history.shape[1] < spec.taps:
        raise ValueError(f"heads of {width} and a history of {history.shape[1]} rows for {spec.taps} taps")
    assert x.stride(1) == 1 and x.dtype == torch.float32 and x.shape[1] == sum(spec.widths)
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in tensors)
    arguments = GatedDeltaArguments(
        x=x.data_ptr(),
        row_bytes=4 * x.stride(0),
        rows=len(x),
        positions=positions.data_ptr(),
        tables=tables.data_ptr(),
        table_stride=8 * tables.stride(0),
        history=history.data_ptr(),
        history_rows=history.shape[1],
        memory=memory.data_ptr(),
        out=out.data_ptr(),
        conv=spec.conv.data_ptr(),
        taps=spec.taps,
        decay=spec.decay.data_ptr(),
        bias=spec.bias.data_ptr(),
        norm=spec.norm.data_ptr(),
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        width=width,
        tiled=int(spec.tiled),
        scale=width**-0.5,
        l2_eps=L2_EPS,
        eps=spec.eps,
    )
    keep = (x, spec, layer, positions, tables, out)
    wide = width % COLUMNS == 0
    tasks = spec.value_heads * (width // (COLUMNS if wide else 8))
    heads = 2 * spec.key_heads + spec.value_heads
    return (
        Launch(delta_convolution_kernel(), arguments, heads, keep=keep),
        Launch(delta_memory_kernel(wide), arguments, tasks, keep=keep),
        Launch(delta_output_kernel(), arguments, len(x), keep=keep),
    )
