"""Per-layer embeddings on the CPU; defined in kernels/layer_inputs.py."""

from __future__ import annotations

from torch import Tensor

from quengine.kernels.cpu.ops.rms_norm import rms_norm_launch
from quengine.kernels.cpu.runtime.threads import Launch
from quengine.kernels.rms_norm import RMSNorm


def norm_parts_launch(projected: Tensor, norm: RMSNorm) -> Launch:
    """`norm` of each n elements of projected, fp32 [T, layers * n], contiguous, in place, for weights [n]."""
    parts = projected.view(-1, norm.weight.numel())
    return rms_norm_launch(parts, norm.weight, norm.eps, parts)
