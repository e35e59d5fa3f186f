"""SwiGLU: the torch definition. Gate and up come from one matmul, side by side: gate first."""

import torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of a merged projection.

    gate_up: [..., 2F], the first F columns are the gate. Returns [..., F] in the same dtype; fp32 and fp64
    are computed as given, fp16 and bf16 in fp32 and rounded once. Source: Shazeer 2020, "GLU Variants
    Improve Transformer".
    """
    compute = gate_up.dtype if gate_up.dtype in (torch.float32, torch.float64) else torch.float32
    gate, up = gate_up.to(compute).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
