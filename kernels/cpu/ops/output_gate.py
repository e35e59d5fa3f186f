"""The output gates of an attention in compiled code: the twin of `gate_output` in kernels/attention.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import output_gate_kernel
from quengine.kernels.cpu.runtime.threads import Launch, run


@dataclass
class OutputGateArguments(Arguments):
    """y: fp32 [rows, heads, width]. qkv: fp32 rows of `row_bytes`, which begin with a query and gates of each head."""

    y: int
    qkv: int
    row_bytes: int
    heads: int
    width: int


def output_gate_launch(y: Tensor, qkv: Tensor, spec: AttentionSpec) -> Launch:
    """y fp32 [T, heads * head_dim] times sigmoid of the gates in qkv fp32 [T, ...], in place; both contiguous."""
    assert spec.gated and y.is_contiguous() and qkv.stride(1) == 1
    arguments = OutputGateArguments(
        y.data_ptr(), qkv.data_ptr(), 4 * qkv.stride(0), spec.heads, spec.head_dim
    )
    return Launch(output_gate_kernel(), arguments, len(y), keep=(y, qkv))


def output_gate(y: Tensor, qkv: Tensor, spec: AttentionSpec) -> Tensor:
    """`y` itself; see `output_gate_launch`."""
    run([output_gate_launch(y, qkv.contiguous(), spec)])
    return y
