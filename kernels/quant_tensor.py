"""A weight as stored: its name, block format, shape and bytes, usually a view of the mapped file."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor, uint8

from quengine.kernels.block_formats import BlockFormat


@dataclass(frozen=True)
class QuantTensor:
    """A tensor of `shape` (torch order: the last dimension is the columns, all others count rows).

    data: uint8 [rows, row_bytes], contiguous rows of `format` blocks; never written to. Raises ValueError if the bytes
    do not fit the shape.
    """

    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    data: Tensor

    def __post_init__(self) -> None:
        expected = (self.rows, self.format.row_bytes(self.cols))
        if self.data.dtype != uint8 or tuple(self.data.shape) != expected or not self.data.is_contiguous():
            raise ValueError(
                f"{self.name}: {self.format.name} {list(self.shape)} needs contiguous uint8 "
                f"{list(expected)}, not {self.data.dtype} {list(self.data.shape)}"
            )

    @cached_property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def first_rows(self, rows: int) -> "QuantTensor":
        """A view of the first `rows` rows of a matrix."""
        return QuantTensor(self.name, self.format, (rows, self.cols), self.data[:rows])

    def row_slices(self, rows: int) -> "list[QuantTensor]":
        """Views of `rows` rows each, in order."""
        shape = (rows, *self.shape[1:])
        starts = range(0, self.rows, rows)
        return [QuantTensor(self.name, self.format, shape, self.data[i : i + rows]) for i in starts]

    def matrices(self) -> "list[QuantTensor]":
        """Views of the E matrices [N, K] of a tensor [E, N, K]."""
        count, rows, cols = self.shape
        data = self.data.view(count, rows, -1)
        return [QuantTensor(self.name, self.format, (rows, cols), data[i]) for i in range(count)]
