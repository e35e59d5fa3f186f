"""What LoRA adapters add to the product of one row with a packed weight, as the matvec kernels take it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

LAUNCH_KINDS = 3
"""Kinds of launches of one weight, which may differ in their numbers of programs."""


class RowChangeTensors(NamedTuple):
    """The tensors of a `RowChange`, and in a kernel their addresses."""

    a: Any
    b: Any
    matrices: Any
    scales: Any
    words: Any
    launches: Any


@dataclass(frozen=True)
class RowChange:
    """The changes of P matrices, side by side in one weight, by M adapters of rank R, a multiple of 16, and the
    adapters' scales for the row (kernels/lora/low_rank.py).

    a: [P, M, R, K]. b: [N, M, R]. matrices: int8 [N], which of the P a row of b belongs to. scales: fp32 [M]. words:
    int64 [P * M * R], and launches: int32 [LAUNCH_KINDS, most programs of a launch], both zero at first, are written by
    every launch.
    """

    a: Tensor
    b: Tensor
    matrices: Tensor
    scales: Tensor
    words: Tensor
    launches: Tensor

    @property
    def tensors(self) -> RowChangeTensors:
        return RowChangeTensors(self.a, self.b, self.matrices, self.scales, self.words, self.launches)
