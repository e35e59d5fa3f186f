"""Adding a residual or a bias to matvec results in compiled code, in the tasks of the matvec itself.

Does not know: which of the two it adds.
"""

from __future__ import annotations

from torch import Tensor

from quengine.kernels.cpu.runtime.kernel_table import add_kernel
from quengine.kernels.cpu.runtime.threads import Launch


def add_launch(y: Tensor, addend: Tensor, column: int, count: int, step: int) -> Launch:
    """y[:, column : column + count] += the same part of addend; a task takes `step` columns of all rows.

    y is fp32 [T, N], addend fp32 [T, N] or of N elements, which all rows get; both contiguous.
    """
    rows, width = y.shape
    assert addend.numel() in (width, rows * width)
    stride = 4 * width if addend.numel() == rows * width else 0
    addresses = (y.data_ptr() + 4 * column, addend.data_ptr() + 4 * column)
    parameters = (*addresses, count, step, rows, 4 * width, stride)
    return Launch(add_kernel(), parameters, -(-count // step), keep=(y, addend))
