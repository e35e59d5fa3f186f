"""RMSNorm on the CPU, compiled; defined in kernels/rms_norm.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32
from quengine.kernels.cpu.runtime.kernel_table import rms_norm_kernel
from quengine.kernels.cpu.runtime.threads import Launch, run


@dataclass
class RMSNormArguments(Arguments):
    """fp32 arrays at addresses; strides in bytes."""

    x: int
    x_stride: int
    weight: int
    cols: int
    eps: Fp32
    out: int
    out_stride: int


def rms_norm_launch(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Launch:
    """x / sqrt(mean(x^2) + eps) * weight, row by row.

    x and out, which may be x: fp32 [T, K] with adjacent elements and any row stride; weight: fp32 [K].
    """
    assert x.stride(1) == out.stride(1) == 1 and weight.numel() == x.shape[1]
    arguments = RMSNormArguments(
        x=x.data_ptr(),
        x_stride=4 * x.stride(0),
        weight=weight.data_ptr(),
        cols=x.shape[1],
        eps=eps,
        out=out.data_ptr(),
        out_stride=4 * out.stride(0),
    )
    return Launch(rms_norm_kernel(), arguments, x.shape[0], keep=(x, weight, out))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each row of x fp32 [T, K] with weight fp32 [K]: fp32 [T, K]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    run([rms_norm_launch(x, weight, eps, out)])
    return out
