"""Mamba2's state space layer: the torch definition.

A position has a row [z | xBC | dt]: a gate z [heads * d], the channels x [heads * d], B and C [groups * n each], and
for each head a number dt. xBC goes through a depthwise causal convolution (kernels/causal_conv.py).
Each head keeps a matrix S [d, n], which is 0 before the first position; head h reads B and C of group h // (heads /
groups):

    t = clamp(softplus(dt + bias), low, high)
    S = exp(decay * t) * S + t x B^T
    y = S C + skip * x,  out = rms_norm(y * silu(z)) * norm

The norm is taken over the columns of each group's heads separately. The state of a sequence has two parts. `history`
has the rows of xBC of its last positions, position p in row p mod the number of rows. `memory` has S of each head.
Sources: Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
Space Duality"; `NemotronHMamba2Mixer` in the `transformers` library.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from quengine.kernels.causal_conv import causal_conv
from quengine.kernels.forward_batch import ForwardBatch


@dataclass(frozen=True)
class Mamba2Spec:
    """The constants of one Mamba2 layer.

    Attributes:
        conv: fp32 [taps, channels], the oldest position's weights first.
        conv_bias: fp32 [channels]; zeros where a model has none.
        decay: fp32 [heads], negative: -exp(A_log).
        bias: fp32 [heads], added to dt.
        skip: fp32 [heads]: D.
        norm: fp32 [heads * head_dim].
        heads, head_dim: of x. heads is a multiple of groups.
        groups: of B and C, and of the norm.
        state_dim: n, elements of B and of C in a group.
        step_limits: the least and the largest t.
        eps: of the norm.
        cache_group: the layer's cache group, whose block tables name the sequences' slots (ForwardBatch.slots_of).
    """

    conv: Tensor
    conv_bias: Tensor
    decay: Tensor
    bias: Tensor
    skip: Tensor
    norm: Tensor
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    step_limits: tuple[float, float]
    eps: float
    cache_group: int

    @property
    def taps(self) -> int:
        return self.conv.shape[0]

    @property
    def inner(self) -> int:
        """Columns of x, of z and of the result."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of z, xBC and dt, which lie side by side in a row."""
        return self.inner, self.channels, self.heads

    def of_heads(self, x: Tensor) -> Tensor:
        """x [T, groups * n] repeated for each head of a group: [T, heads, n]."""
        ratio = self.heads // self.groups
        return x.view(len(x), self.groups, self.state_dim).repeat_interleave(ratio, dim=1)


def mamba2(batch: ForwardBatch, x: Tensor, spec: Mamba2Spec, history: Tensor, memory: Tensor) -> Tensor:
    """The result [T, heads * head_dim] of x [T, sum of spec.widths].

    history fp32 [slots, taps - 1 or more, channels] and memory fp32 [slots, heads, head_dim, state_dim] are written in
    place. A sequence's first position ignores what its slot holds. Rows of one sequence are in the order of their
    positions. The computation is in x's dtype; states are stored in their own. Checkpoints of the batch (`state_table`)
    are written too.
    """
    sequences = batch.sequences(spec.cache_group, history, memory)
    return torch.cat(
        [_of_sequence(x[rows], at, spec, history[slot], memory[slot]) for rows, at, slot in sequences]
    )


def _of_sequence(x: Tensor, start: int, spec: Mamba2Spec, history: Tensor, memory: Tensor) -> Tensor:
    """`mamba2` of one sequence's rows, from position `start` on. history and memory: its slot's."""
    z, inputs, dt = torch.split(x, list(spec.widths), dim=1)
    convolved = causal_conv(inputs, start, spec.conv, history, spec.conv_bias)
    of_b = spec.groups * spec.state_dim
    values, b, c = torch.split(convolved, [spec.inner, of_b, of_b], dim=1)
    values, b, c = values.view(len(x), spec.heads, -1), spec.of_heads(b), spec.of_heads(c)
    step = softplus(dt + spec.bias.to(x.dtype)).clamp(*spec.step_limits)
    decay = (spec.decay.to(x.dtype) * step).exp()
    state = memory.to(x.dtype) if start else torch.zeros_like(memory, dtype=x.dtype)
    out = spec.skip.to(x.dtype)[:, None] * values
    for row in range(len(x)):
        given = step[row][:, None] * values[row]
        state = decay[row][:, None, None] * state + given[:, :, None] * b[row][:, None, :]
        out[row] += torch.einsum("hdn,hn->hd", state, c[row])
    memory.copy_(state)
    return _gated_norm(out.flatten(1), z, spec)


def _gated_norm(y: Tensor, z: Tensor, spec: Mamba2Spec) -> Tensor:
    """The gated norm of y and z [T, heads * head_dim]."""
    parts = (y * silu(z)).view(len(y), spec.groups, -1)
    scale = torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + spec.eps)
    return (parts * scale).flatten(1) * spec.norm.to(y.dtype)
