"""The normalized Hadamard transform of heads: the torch definition.

A head's elements are transformed in blocks of the largest power of two that divides its size: by H / sqrt(n), with
H[i, j] = -1 to the number of ones that i and j have in common. The matrix is symmetric and its own inverse, so products
of two transformed heads are those of the heads. An element that is much larger than the others is spread over its
block, which then rounds well to a few bits. Source: Ashkboos et al. 2024, "QuaRot" (rotations before quantizing).
"""

import torch
from torch import Tensor


def hadamard_block(head_dim: int) -> int:
    """Elements that are transformed together: the largest power of two that divides a head's size."""
    return head_dim & -head_dim


def hadamard(x: Tensor) -> Tensor:
    """The transform of each row of x [..., head_dim], in its dtype: sums and differences of elements 1, 2, 4, ...
    apart, in this order, then a product, so that kernels give the same bits."""
    size = hadamard_block(x.shape[-1])
    y, apart = x, 1
    while apart < size:
        near, far = y.reshape(-1, 2, apart).unbind(1)
        y = torch.stack([near + far, near - far], dim=1)
        apart *= 2
    return y.mul(size**-0.5).reshape(x.shape)
