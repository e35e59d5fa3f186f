"""What the kernels of Mamba2 share: sizes, and steps of time. Definition: kernels/mamba2.py. All of it is fp32."""

from typing import NamedTuple

import triton
import triton.language as tl

from quengine.errors import EngineError
from quengine.kernels.cuda.gated_delta.arithmetic import log_decay
from quengine.kernels.mamba2 import Mamba2Spec


class Mamba2Net(NamedTuple):
    """What a kernel is compiled for: heads, elements of a head, groups, elements of B and of C in a group, taps of the
    convolution, and positions that its history has room for."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    ring: int

    @property
    def width(self) -> int:
        """Columns of the result, of x and of z."""
        return self.heads * self.head_dim

    @property
    def tile(self) -> int:
        """The most elements of a head for a program: the largest power of two that divides the head."""
        return self.head_dim & -self.head_dim

    @property
    def channels(self) -> int:
        return self.width + 2 * self.groups * self.state_dim


def net_of(spec: Mamba2Spec, ring: int) -> Mamba2Net:
    """ring: rows of the history, at least the taps, so that a position is stored in a row that is no longer read."""
    assert ring >= spec.taps, f"a history of {ring} positions is too short for a convolution over {spec.taps}"
    return Mamba2Net(spec.heads, spec.head_dim, spec.groups, spec.state_dim, spec.taps, ring)


def check_sizes(spec: Mamba2Spec) -> None:
    """Raises EngineError for sizes that no kernel takes."""
    if not 16 <= spec.head_dim <= 256 or spec.head_dim % 16:
        raise EngineError(
            f"on CUDA Mamba2 has heads of a multiple of 16 elements, up to 256, and this model's have {spec.head_dim}; "
            "use --device cpu"
        )
    if not 16 <= spec.state_dim <= 256 or spec.state_dim & (spec.state_dim - 1):
        raise EngineError(
            f"on CUDA Mamba2 has states of 16, 32, 64, 128 or 256 elements, and this model's have {spec.state_dim}; "
            "use --device cpu"
        )
    if spec.inner % 32:
        raise EngineError(
            f"on CUDA Mamba2 has whole groups of 32 elements, and this model has {spec.inner}; use --device cpu"
        )


@triton.jit
def step_of_time(dt, bias, low, high):
    """softplus(dt + bias) within its limits."""
    return tl.minimum(tl.maximum(log_decay(dt, 1.0, bias), low), high)
