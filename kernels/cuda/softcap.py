"""Soft caps on CUDA: of attention's scores, within its kernels, and of logits, in a launch of their own.

Defined by `softcap` of kernels/attention.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch

_BLOCK = 2048
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_capped(x, CAP: tl.constexpr):
    """`CAP * tanh(x / CAP)`, fp32: tanh(y) = 1 - 2 / (1 + exp(2 y)), which is y itself below its rounding."""
    y = x / CAP
    large = 1.0 - 2.0 / (1.0 + tl.exp2(y * (2.0 * _LOG2_E)))
    small = y - y * y * y * (1.0 / 3.0)
    return CAP * tl.where(tl.abs(y) < 0.015625, small, large)


@DirectLaunch
@triton.jit
def _softcap_kernel(y_ptr, count, CAP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_then_launch(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    y = tl.load(y_ptr + at, mask=inside, other=0.0)
    tl.store(y_ptr + at, soft_capped(y, CAP), mask=inside)


def softcap_logits(y: Tensor, cap: float, pdl: bool = False) -> Tensor:
    """`cap * tanh(y / cap)` of logits, contiguous fp32, in place; returns them."""
    assert y.is_contiguous() and cap > 0.0
    _softcap_kernel[(triton.cdiv(y.numel(), _BLOCK),)](
        y, y.numel(), CAP=cap, BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return y
