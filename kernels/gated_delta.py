"""The gated delta net: the torch definition.

A position has a row of qkv, [key_heads * d | key_heads * d | value_heads * d], a gate z [value_heads * d], and for each
value head two numbers b and a. The rows of qkv go through a depthwise causal convolution (kernels/causal_conv.py). In
its result, each head's query and key are divided by their length, `x / sqrt(sum x^2 + L2_EPS)`, and queries are
multiplied by d**-0.5. Each value head keeps a matrix S [d of the key, d of the value], which is 0 before the first
position:

    S = exp(decay * softplus(a + bias)) * S
    S = S + k (sigmoid(b) * (v - S^T k))^T
    o = S^T q,  y = rms_norm(o) * norm * silu(z)

A value head reads the query and key of one key head; `tiled` says which. The state of a sequence has two parts.
`history` has the rows of qkv of its last positions, position p in row p mod the number of rows. `memory` has S of each
value head. Sources: Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule";
`Qwen3NextGatedDeltaNet` in the `transformers` library.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from quengine.kernels.causal_conv import causal_conv
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.rms_norm import rms_norm

L2_EPS = 1e-6
"""Added to the sum of squares of a query or key; llama.cpp takes the larger of the length and a file's norm epsilon."""


@dataclass(frozen=True)
class GatedDeltaSpec:
    """The constants of one layer's gated delta net.

    Attributes:
        conv: fp32 [taps, channels], the oldest position's weights first.
        decay: fp32 [value_heads], negative: -exp(A_log).
        bias: fp32 [value_heads], added to a.
        norm: fp32 [head_dim].
        key_heads, value_heads: value_heads is a multiple of key_heads.
        head_dim: of queries, keys and values alike.
        tiled: value head j reads key head `j % key_heads`, as in GGUF files; else `j // (value_heads // key_heads)`.
        eps: of the gated norm.
        cache_group: the layer's cache group, whose block tables name the sequences' slots (ForwardBatch.slots_of).
    """

    conv: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor
    key_heads: int
    value_heads: int
    head_dim: int
    tiled: bool
    eps: float
    cache_group: int

    @property
    def taps(self) -> int:
        return self.conv.shape[0]

    @property
    def inner(self) -> int:
        """Columns of z and of the result."""
        return self.value_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of queries, keys and values."""
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Columns of qkv, z, b and a, which lie side by side in a row."""
        return self.channels, self.inner, self.value_heads, self.value_heads

    def of_value_heads(self, x: Tensor) -> Tensor:
        """x [T, key_heads, d] repeated for each value head that reads the key head: [T, value_heads, d]."""
        ratio = self.value_heads // self.key_heads
        return x.repeat(1, ratio, 1) if self.tiled else x.repeat_interleave(ratio, dim=1)


def gated_delta(
    batch: ForwardBatch, x: Tensor, spec: GatedDeltaSpec, history: Tensor, memory: Tensor
) -> Tensor:
    """y [T, value_heads * head_dim] of x [T, sum of spec.widths].

    history fp32 [slots, taps - 1 or more, channels] and memory fp32 [slots, value_heads, head_dim, head_dim] are
    written in place. A sequence's first position ignores what its slot holds. Rows of one sequence are in the order of
    their positions. The computation is in x's dtype; states are stored in their own. Checkpoints of the batch
    (`state_table`) are written too. With `batch.pending` the states stay as they are until they are advanced.
    """
    if batch.pending is not None:
        batch.pending.append(PendingMemory(batch, x.clone(), spec, history, memory))
        history, memory = history.clone(), memory.clone()
    sequences = batch.sequences(spec.cache_group, history, memory)
    return torch.cat(
        [_of_sequence(x[rows], at, spec, history[slot], memory[slot]) for rows, at, slot in sequences]
    )


@dataclass(frozen=True)
class PendingMemory:
    """The states of a step that verifies drafts. `advance` computes them from the accepted rows of x [T, sum of
    spec.widths]."""

    batch: ForwardBatch
    x: Tensor
    spec: GatedDeltaSpec
    history: Tensor
    memory: Tensor

    def advance(self, accepted: Tensor) -> None:
        rows = len(self.x) // len(accepted)
        pieces = list(self.batch.sequences(self.spec.cache_group))
        for sequence, count in enumerate(accepted.tolist()):
            for row, at, slot in pieces[sequence * rows : sequence * rows + count + 1]:
                _of_sequence(self.x[row], at, self.spec, self.history[slot], self.memory[slot])


def _of_sequence(x: Tensor, start: int, spec: GatedDeltaSpec, history: Tensor, memory: Tensor) -> Tensor:
    """`gated_delta` of one sequence's rows, from position `start` on. history and memory: its slot's."""
    qkv, z, b, a = torch.split(x, list(spec.widths), dim=1)
    convolved = causal_conv(qkv, start, spec.conv, history)
    heads = convolved.view(len(x), -1, spec.head_dim)
    q, k, v = torch.split(heads, [spec.key_heads, spec.key_heads, spec.value_heads], dim=1)
    q, k = (spec.of_value_heads(_unit(each)) for each in (q, k))
    decay = (spec.decay.to(x.dtype) * softplus(a + spec.bias.to(x.dtype))).exp()
    state = memory.to(x.dtype) if start else torch.zeros_like(memory, dtype=x.dtype)
    out = torch.empty_like(v)
    for row in range(len(x)):
        state = state * decay[row][:, None, None]
        delta = b[row].sigmoid()[:, None] * (v[row] - _read(state, k[row]))
        state = state + k[row][:, :, None] * delta[:, None, :]
        out[row] = _read(state, q[row]) * spec.head_dim**-0.5
    memory.copy_(state)
    return (rms_norm(out, spec.norm, spec.eps) * silu(z.view_as(out))).reshape(len(x), -1)


def _unit(x: Tensor) -> Tensor:
    """x [T, heads, d], each head divided by its length."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)


def _read(state: Tensor, x: Tensor) -> Tensor:
    """S^T x of each head: S [heads, d, d], x [heads, d]."""
    return torch.einsum("hkv,hk->hv", state, x)
