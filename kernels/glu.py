"""Gated linear units: the torch definition. Gate and up come from one matmul, side by side: gate first."""

from typing import Literal

import torch
from torch.nn.functional import gelu, silu


def glu(gate_up: torch.Tensor, activation: Literal["silu", "gelu_tanh"] = "silu") -> torch.Tensor:
    """`activation(gate) * up` of a merged projection.

    gate_up: [..., 2F], the first F columns are the gate. activation: SiLU (SwiGLU), or GELU in its tanh form (GeGLU).
    Returns [..., F] in the same dtype; fp32 and fp64 are computed as given, fp16 and bf16 in fp32 and rounded once.
    Sources: Shazeer 2020, "GLU Variants Improve Transformer"; Hendrycks & Gimpel 2016, "Gaussian Error Linear Units".
    """
    compute = gate_up.dtype if gate_up.dtype in (torch.float32, torch.float64) else torch.float32
    gate, up = gate_up.to(compute).chunk(2, dim=-1)
    gate = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
    return (gate * up).to(gate_up.dtype)
