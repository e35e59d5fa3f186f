"""Gated linear units: the torch definition. One matmul computes gate and up, side by side, gate first."""

from typing import Literal, TypeAlias

import torch
from torch.nn.functional import gelu, silu

Activation: TypeAlias = Literal["silu", "gelu_tanh", "clamped_swish"]
"""The activation of a gated feed-forward: SiLU (SwiGLU); GELU in its tanh form (GeGLU); or, in gpt-oss, a
swish of the gate clamped from above, times one more than the clamped up value.
"""

SWISH_SLOPE, CLAMP = 1.702, 7.0
"""The constants of `clamped_swish`: `alpha` and `limit` in OpenAI's gpt-oss."""


def glu(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """`activation(gate) * up` of a merged projection.

    gate_up: [..., 2F], the first F columns are the gate. activation: SiLU (SwiGLU), GELU in its tanh form (GeGLU), or
    `clamped_swish`: g sigmoid(1.702 g) (u + 1), where g = min(gate, 7) and u = up clamped to [-7, 7].
    Returns [..., F] in the same dtype; fp32 and fp64 are computed as given, fp16 and bf16 in fp32 and rounded once.
    Sources: Shazeer 2020, "GLU Variants Improve Transformer"; Hendrycks & Gimpel 2016, "Gaussian Error Linear Units";
    OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card" and its reference implementation.
    """
    compute = gate_up.dtype if gate_up.dtype in (torch.float32, torch.float64) else torch.float32
    gate, up = gate_up.to(compute).chunk(2, dim=-1)
    if activation == "clamped_swish":
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return (gate * torch.sigmoid(SWISH_SLOPE * gate) * (up + 1.0)).to(gate_up.dtype)
    gate = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
    return (gate * up).to(gate_up.dtype)
