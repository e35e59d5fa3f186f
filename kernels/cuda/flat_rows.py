"""Rows of the residual stream as one vector of words, to send to the device that computes the next layers."""

import torch
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemv.activations import GROUP, QuantizedActivations, RmsPartials
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.rms_norm import RMSNorm

_ALIGNED = 4
"""Words: each part of the vector begins at a multiple of 16 bytes."""


def flattened(x: Tensor | RmsNormed) -> Tensor:
    """The rows of the stream as an fp32 vector, for another device.

    A single row is followed by the words of its quantized form and by the sums of squares of its pending norm. An fp16
    operand is left out: the other device recomputes it from the rows.
    """
    if isinstance(x, Tensor):
        return x.flatten()
    normed = x.rms_normed
    if isinstance(normed, Fp16Operand):
        return x.hidden.flatten()
    planes = (x.hidden, normed.high, normed.low, normed.scale, normed.sums)
    squares = [] if normed.rms is None else [normed.rms.squares.flatten()]
    return torch.cat([*map(_words, planes), *squares])


def unflattened(flat: Tensor, rows: int, norm: RMSNorm | None) -> Tensor | RmsNormed:
    """The `rows` rows from which `flattened` made `flat`. norm: the pending norm, which gives the epsilon."""
    if rows > 1 or norm is None or len(flat) == len(norm.weight):
        return flat.view(rows, -1)
    cols = len(norm.weight)
    sizes = [cols, cols // 4, cols // 4, cols // GROUP, cols // 16]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
    hidden, high, low, scale, sums = (
        flat[start : start + size].view(1, -1) for start, size in zip(starts, sizes, strict=False)
    )
    squares = flat[starts[-1] :].view(1, -1)
    rms = RmsPartials(squares, norm.eps) if squares.numel() else None
    rounded = QuantizedActivations(
        high.view(torch.int8), low.view(torch.int8), scale, sums.view(torch.int32), rms
    )
    return RmsNormed(hidden, rounded)


def _words(part: Tensor) -> Tensor:
    """The 4-byte words of a tensor, padded to a multiple of 16 bytes."""
    words = part.contiguous().view(1, -1).view(torch.float32)
    return torch.nn.functional.pad(words, (0, -words.numel() % _ALIGNED)).flatten()
