"""What the kernels of the gated delta net share: sizes, gates, the convolution's past, one step of the recurrence.

Definition: kernels/gated_delta.py. All of it is fp32.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from quengine.errors import EngineError
from quengine.kernels.gated_delta import L2_EPS, GatedDeltaSpec

_L2_EPS = tl.constexpr(L2_EPS)


class Net(NamedTuple):
    """What a kernel is compiled for: heads, elements of a head, which key head a value head reads (GatedDeltaSpec),
    taps of the convolution, and positions that its history has room for."""

    key_heads: int
    value_heads: int
    head_dim: int
    tiled: bool
    taps: int
    ring: int

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.value_heads * self.head_dim


def net_of(spec: GatedDeltaSpec, ring: int) -> Net:
    """ring: rows of the history, at least the taps, so that a position is stored in a row that is no longer read."""
    assert ring >= spec.taps, f"a history of {ring} positions is too short for a convolution over {spec.taps}"
    return Net(spec.key_heads, spec.value_heads, spec.head_dim, spec.tiled, spec.taps, ring)


def check_state_head_dim(head_dim: int) -> None:
    """Raises EngineError for heads that no kernel takes."""
    if not 16 <= head_dim <= 256 or head_dim & (head_dim - 1):
        raise EngineError(
            "on CUDA a gated delta net has heads of 16, 32, 64, 128 or 256 elements, and this model's have "
            f"{head_dim}; use --device cpu"
        )


@triton.jit
def key_head_of(head, NET: tl.constexpr):
    """The key head that value head `head` reads."""
    if NET.tiled:
        found = head % NET.key_heads
    else:
        found = head // (NET.value_heads // NET.key_heads)
    return found


@triton.jit
def is_first_reader(head, NET: tl.constexpr):
    """Whether no value head before `head` reads the same key head."""
    if NET.tiled:
        first = head < NET.key_heads
    else:
        first = head % (NET.value_heads // NET.key_heads) == 0
    return first


@triton.jit
def log_decay(a, rate, bias):
    """rate * softplus(a + bias); Kahan's form of log(1 + x) keeps the bits of a small x."""
    a += bias
    x = tl.exp(-tl.abs(a))
    u = 1.0 + x
    inner = tl.where(u == 1.0, 1.0, u - 1.0)
    return rate * (tl.maximum(a, 0.0) + tl.where(u == 1.0, x, tl.log(u) * (x / inner)))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def inverse_length(squares):
    """1 / length of heads, from their sums of squares."""
    return tl.rsqrt(squares + _L2_EPS)


@triton.jit
def delta_step(memory, q, k, kq, v, decay, beta):
    """One position of one value head: its columns of S [D, N] before it, the query and key [D], their product, v [N],
    exp of the log decay, sigmoid of b. Returns S after it, and o [N].

    S^T k and S^T q are both of S before the position, in one pass over it: o = decay S^T q + (k q) delta.
    """
    seen = tl.sum(memory * k[:, None], 0)
    read = tl.sum(memory * q[:, None], 0)
    delta = beta * (v - decay * seen)
    return memory * decay + k[:, None] * delta[None, :], decay * read + kq * delta
