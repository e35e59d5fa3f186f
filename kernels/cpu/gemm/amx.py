"""Prefill matmul on AMX tiles: when AMX may be used, and the definition of the result.

AMX multiplies bf16 and accumulates fp32. An fp32 operand is split into two bf16 terms, its upper 16 bits and the
upper 16 bits of the remainder. Two operands then have four products, of which the smallest is below fp32's rounding
and is left out:

    x = xh + xl,  w = wh + wl:   y = sum over k of xh*wh + xl*wh + xh*wl

Weights of the types in ONE_TERM are bf16 themselves: wl is 0 and its product is left out.

The relative error of a product is about 2^-16, a tenth of that of int16 activations. An element of the result depends
on its two rows alone: columns are added in order, 32 at a time, one kind of product after another.
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

STEP = 32  # columns of an operand tile: 16 rows of 64 bytes
TILE_BYTES = 1024
BLOCK = 32  # rows and columns of the result per step: four accumulator tiles, two tiles of each operand
ONE_TERM = frozenset({"BF16", "MXFP4", "NVFP4"})  # at most 8 significant bits, scales of group included
MOST_ROWS = 512  # activation rows per launch: their DEPTH columns stay in the L2 cache
MOST_BLOCKS = 128  # accumulator blocks per task, 512 KiB on the stack
HALF_BYTES = DEPTH // STEP * 2 * TILE_BYTES  # of DEPTH columns of 16 weight rows, both terms

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = (
    158,
    0x1023,
    18,
)  # x86-64 Linux: asm/prctl.h, XFEATURE_XTILEDATA


def two_terms(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two bf16 terms of an fp32 tensor, as fp32; both are truncated, not rounded."""
    high = _upper(x)
    return high, _upper(x - high)


def _upper(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def two_term_product(x: Tensor, w: Tensor) -> Tensor:
    """The definition: x [T, K] fp32 times w [N, K] fp32 transposed, summed in fp64: fp64 [T, N]."""
    (xh, xl), (wh, wl) = ([part.double() for part in two_terms(operand)] for operand in (x, w))
    return (xh + xl) @ wh.T + xh @ wl.T


@cache
def has_amx() -> bool:
    """Whether kernels may use AMX: the processor has it, and Linux permits the tile registers to this process."""
    features = set(host_target().features.split(","))
    return {"+amx-tile", "+amx-bf16", "+avx512f"} <= features and _granted()


def _granted() -> bool:
    """Requests the permission from Linux, once for all threads; kernels before 5.16 and some sandboxes refuse."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    call = ctypes.CDLL(None).syscall
    return int(call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0
