"""Matmul of many rows on a processor's AMX tiles: when they may be used, and what they compute.

A tile multiplies bf16 and adds fp32. An fp32 is taken as two bf16, its upper 16 bits and the upper 16 bits of what
they leave, and a product of two such as three (the fourth is below the rounding):

    x = xh + xl,  w = wh + wl:   y = sum over k of xh*wh + xl*wh + xh*wl

The error of a product is about 2^-16 of it, a tenth of what int16 activations cost. A result depends on its two rows
alone: 32 columns at a time are added in order, one of the three kinds of product after the other.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

import torch
from torch import Tensor

from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.runtime.target import host_target

STEP = 32  # columns of an operand's tile: 16 rows of 64 bytes
TILE_BYTES = 1024
BLOCK = 32  # rows and columns of the result at once: four tiles of sums, two of each operand
MOST_ROWS = 512  # of activations in one launch: those of DEPTH columns stay in the L2 cache, and
MOST_BLOCKS = 128  # blocks of sums of one task, which lie on the stack, 512 KiB
HALF_BYTES = DEPTH // STEP * 2 * TILE_BYTES  # DEPTH columns of 16 weight rows, both terms

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = (
    158,
    0x1023,
    18,
)  # x86-64 Linux: asm/prctl.h, XFEATURE_XTILEDATA


def two_terms(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as the two bf16 that stand for it, both as fp32; neither is rounded."""
    high = _upper(x)
    return high, _upper(x - high)


def _upper(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def two_term_product(x: Tensor, w: Tensor) -> Tensor:
    """The definition: x [T, K] times w [N, K], transposed, fp32: fp64 [T, N], whose sums are not rounded."""
    (xh, xl), (wh, wl) = ([part.double() for part in two_terms(operand)] for operand in (x, w))
    return (xh + xl) @ wh.T + xh @ wl.T


@cache
def has_amx() -> bool:
    """Whether kernels may use AMX: the processor has them, and Linux grants this process their registers."""
    features = set(host_target().features.split(","))
    return {"+amx-tile", "+amx-bf16", "+avx512f"} <= features and _granted()


def _granted() -> bool:
    """Ask Linux, once for all threads of the process; a kernel before 5.16 or a sandbox refuses."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    call = ctypes.CDLL(None).syscall
    return int(call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0
