"""Gated linear units: the torch definition. One matmul computes gate and up, side by side, gate first."""

from typing import Literal, TypeAlias, get_args

import torch
from torch.nn.functional import gelu, silu

from quengine.kernels.pointwise import Pointwise, pointwise

Gating: TypeAlias = Literal["silu", "gelu_tanh", "gelu_erf", "clamped_swish"]
"""The activation of a gated feed-forward: SiLU (SwiGLU); GELU in its tanh form, or exact (GeGLU); or, in gpt-oss, a
swish of the gate clamped from above, times one more than the clamped up value.
"""

Activation: TypeAlias = Gating | Pointwise
"""The activation of experts, with a gate or without."""

GATELESS: frozenset[str] = frozenset(get_args(Pointwise))
"""Activations of the up value alone: the first matrix has up rows, and no gate rows."""

_APPROXIMATIONS = {"gelu_tanh": "tanh", "gelu_erf": "none"}

SWISH_SLOPE, CLAMP = 1.702, 7.0
"""The constants of `clamped_swish`: `alpha` and `limit` in OpenAI's gpt-oss."""


def glu_width(columns: int, activation: Activation) -> int:
    """Columns of the activation's result, from a projection to `columns` columns."""
    return columns if activation in GATELESS else columns // 2


def glu(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """`activation(gate) * up` of a merged projection, or without a gate activation(up).

    gate_up: [..., 2F], the first F columns are the gate, or without one [..., F]. activation: SiLU (SwiGLU), GELU in
    its tanh form or exact (GeGLU), `clamped_swish`: g sigmoid(1.702 g) (u + 1), where g = min(gate, 7) and u = up
    clamped to [-7, 7], or one of kernels/pointwise.py, which has no gate.
    Returns [..., F] in the same dtype; fp32 and fp64 are computed as given, fp16 and bf16 in fp32 and rounded once.
    Sources: Shazeer 2020, "GLU Variants Improve Transformer"; Hendrycks & Gimpel 2016, "Gaussian Error Linear Units";
    OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card" and its reference implementation.
    """
    if activation == "relu2" or activation == "gelu":
        return pointwise(gate_up, activation)
    compute = gate_up.dtype if gate_up.dtype in (torch.float32, torch.float64) else torch.float32
    gate, up = gate_up.to(compute).chunk(2, dim=-1)
    if activation == "clamped_swish":
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return (gate * torch.sigmoid(SWISH_SLOPE * gate) * (up + 1.0)).to(gate_up.dtype)
    gate = silu(gate) if activation == "silu" else gelu(gate, approximate=_APPROXIMATIONS[activation])
    return (gate * up).to(gate_up.dtype)
