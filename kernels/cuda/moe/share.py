"""The experts that a device has, of those that a routing names (kernels/moe/experts.py, ExpertShare)."""

import triton
import triton.language as tl


@triton.jit
def own_number(expert, first, COUNT: tl.constexpr, SHARE: tl.constexpr):
    """The number of an expert among the COUNT that are here, from number `first` on; COUNT of one that is not. Without
    SHARE all are here."""
    if SHARE:
        number = expert - first
        return tl.where((number >= 0) & (number < COUNT), number, COUNT)
    else:
        return expert
