"""A matrix of a vision encoder in its file's type, expanded for each product into the product's type.

Expanding takes a hundredth of the time of a product with the thousands of rows of an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from quengine.kernels.vision_rows import expanded_blocks

_BLOCK, _BLOCK_BYTES = 32, 34


@dataclass(frozen=True, eq=False)
class Q8Matrix:
    """A Q8_0 matrix. codes: int8 [N, K / 32, 32]; scales: fp16 [N, K / 32, 1], one for each block of 32 columns."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def of_blocks(cls, data: Tensor) -> "Q8Matrix":
        """The matrix of `data`, uint8 [N, bytes of a row]: Q8_0 blocks of a scale and 32 codes each."""
        blocks = data.view(len(data), -1, _BLOCK_BYTES)
        scales = blocks[..., :2].contiguous().view(torch.float16)
        return cls(blocks[..., 2:].contiguous().view(torch.int8), scales)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.codes), self.codes.shape[1] * _BLOCK

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device) -> "Q8Matrix":
        return Q8Matrix(self.codes.to(device), self.scales.to(device))

    def expanded(self, kind: torch.dtype) -> Tensor:
        """The matrix [N, K] in float type `kind`, each value rounded once."""
        if self.codes.is_cuda and kind == torch.float16:
            from quengine.kernels.cuda.vision_rows import expanded_blocks as on_cuda  # imports Triton

            return on_cuda(self.codes, self.scales)
        return expanded_blocks(self.codes, self.scales, kind)


Matrix: TypeAlias = Tensor | Q8Matrix
"""[N, K]: floats of any type, or blocks."""


def expanded(matrix: Matrix, kind: torch.dtype) -> Tensor:
    """The matrix in a float type."""
    return matrix.expanded(kind) if isinstance(matrix, Q8Matrix) else matrix.to(kind)


def joined(matrices: Sequence[Matrix], kind: torch.dtype) -> Matrix:
    """Matrices with the same columns as one, below each other; in `kind` if their types differ."""
    blocks = [each for each in matrices if isinstance(each, Q8Matrix)]
    if len(blocks) == len(matrices):
        return Q8Matrix(
            torch.cat([each.codes for each in blocks]), torch.cat([each.scales for each in blocks])
        )
    floats = [each for each in matrices if isinstance(each, Tensor)]
    if len({each.dtype for each in floats}) == 1 and not blocks:
        return torch.cat(floats)
    return torch.cat([expanded(each, kind) for each in matrices])
