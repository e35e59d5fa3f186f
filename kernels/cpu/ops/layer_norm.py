"""LayerNorm on the CPU, compiled; defined in kernels/layer_norm.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cpu.ops.rms_norm import rms_norm_launch
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32
from quengine.kernels.cpu.runtime.kernel_table import layer_norm_kernel
from quengine.kernels.cpu.runtime.threads import Launch, run
from quengine.kernels.layer_norm import LayerNorm, Norm


@dataclass
class LayerNormArguments(Arguments):
    """fp32 arrays at addresses; strides in bytes. bias: 0 without one."""

    x: int
    x_stride: int
    weight: int
    bias: int
    cols: int
    eps: Fp32
    out: int
    out_stride: int


def layer_norm_launch(x: Tensor, norm: LayerNorm, out: Tensor) -> Launch:
    """LayerNorm row by row: x and out, which may be x, fp32 [T, K] with adjacent elements and any row stride."""
    assert x.stride(1) == out.stride(1) == 1 and norm.weight.numel() == x.shape[1]
    arguments = LayerNormArguments(
        x=x.data_ptr(),
        x_stride=4 * x.stride(0),
        weight=norm.weight.data_ptr(),
        bias=0 if norm.bias is None else norm.bias.data_ptr(),
        cols=x.shape[1],
        eps=norm.eps,
        out=out.data_ptr(),
        out_stride=4 * out.stride(0),
    )
    return Launch(layer_norm_kernel(), arguments, x.shape[0], keep=(x, norm, out))


def norm_launch(x: Tensor, norm: Norm, out: Tensor) -> Launch:
    """The launch of a norm of either kind, from x to out."""
    if isinstance(norm, LayerNorm):
        return layer_norm_launch(x, norm, out)
    return rms_norm_launch(x, norm.weight, norm.eps, out)


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    """A norm of each row of x fp32 [T, K], or x itself."""
    if norm is None:
        return x
    x = x.contiguous()
    out = torch.empty_like(x)
    run([norm_launch(x, norm, out)])
    return out
