"""The parts that vision encoders are made of, over torch's operations.

Rows between the parts are fp32 (fp64 in tests); matrices may be fp16, and then multiply rows in fp16 with fp32
accumulation. Inputs that no norm bounds are brought below 1 by a power of two for each row before, which keeps products
within fp16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quengine.models.vision.files import Weights

Rotation: TypeAlias = Callable[[Tensor], Tensor]
"""Rotates queries or keys [B, heads, rows, head_dim] by their rows' positions."""


@dataclass(frozen=True, eq=False)
class Linear:
    """weight: [N, K]; bias: [N] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, bounded: bool = True) -> Tensor:
        """x [..., K] fp32 -> [..., N] fp32. bounded: no row's product can leave the range of fp16."""
        if self.weight.dtype == x.dtype:
            return F.linear(x, self.weight, self.bias)
        if bounded:
            y = F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)
        else:
            _, exponent = torch.frexp(x.abs().amax(-1, keepdim=True))
            scale = torch.ldexp(torch.ones_like(x[..., :1]), exponent)
            y = F.linear((x / scale).to(self.weight.dtype), self.weight).to(x.dtype) * scale
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, eq=False)
class Norm:
    """LayerNorm, or RMSNorm where `centred` is False. weight, bias: [D] or None."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D], in x's dtype."""
        if self.centred:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}
HF_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "silu": "silu",
}
"""Names of activations in config.json."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    return _ACTIVATIONS[name]


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(act(up(x))), or down(act(gate(x)) * up(x)) with a gate."""

    up: Linear
    down: Linear
    act: Callable[[Tensor], Tensor]
    gate: Linear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        up = self.up(x)
        hidden = self.act(up) if self.gate is None else self.act(self.gate(x)) * up
        return self.down(hidden, bounded=False)


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention of all rows of a unit to one another. q, k, v: [width, width] each; norms: of each head, or of all."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    heads: int
    scale: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    norm_heads: bool = True

    def __call__(self, x: Tensor, rotate: Rotation | None, mask: Tensor | None) -> Tensor:
        """x [B, rows, width]; mask: [rows, rows] bool, True where a row sees another. Returns [B, rows, width]."""
        q = self._split(self.q(x), self.q_norm)
        k = self._split(self.k(x), self.k_norm)
        v = self._split(self.v(x), self.v_norm)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        kind = self.out.weight.dtype
        y = F.scaled_dot_product_attention(q.to(kind), k.to(kind), v.to(kind), mask, scale=self.scale)
        return self.out(y.transpose(1, 2).flatten(2).to(x.dtype))

    def _split(self, x: Tensor, norm: Norm | None) -> Tensor:
        """[B, rows, heads * head_dim] -> [B, heads, rows, head_dim]"""
        if norm is not None and not self.norm_heads:
            x = norm(x)
        x = x.view(*x.shape[:-1], self.heads, -1)
        if norm is not None and self.norm_heads:
            x = norm(x)
        return x.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Block:
    """A pre-norm layer: attention, then a feed-forward, each added to the rows.

    scales: factors [width] of what is added; post: norms of it.
    """

    norm1: Norm
    attention: Attention
    norm2: Norm
    mlp: Mlp
    scales: tuple[Tensor, Tensor] | None = None
    post: tuple[Norm, Norm] | None = None

    def __call__(self, x: Tensor, rotate: Rotation | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self._added(self.attention(self.norm1(x), rotate, mask), 0)
        return x + self._added(self.mlp(self.norm2(x)), 1)

    def _added(self, y: Tensor, part: int) -> Tensor:
        if self.post is not None:
            y = self.post[part](y)
        return y if self.scales is None else y * self.scales[part]


def linear(weights: Weights, name: str, rows: int, cols: int) -> Linear:
    """`name`.weight [rows, cols], with `name`.bias where there is one."""
    bias = weights.tensor(f"{name}.bias", rows) if weights.has(f"{name}.bias") else None
    return Linear(weights.tensor(f"{name}.weight", rows, cols, dtype=weights.matrix), bias)


def norm(weights: Weights, name: str, size: int, eps: float, centred: bool = True) -> Norm:
    """`name`.weight [size], with `name`.bias where there is one."""
    bias = weights.tensor(f"{name}.bias", size) if weights.has(f"{name}.bias") else None
    return Norm(weights.tensor(f"{name}.weight", size), bias, eps, centred)


def patch_linear(weights: Weights, width: int, patch: int, name: str = "v.patch_embd.weight") -> Linear:
    """The patch embedding [width, 3, patch, patch] as a matrix over a patch's values in that order."""
    shape = (width, 3, patch, patch)
    bias = weights.tensor("v.patch_embd.bias", width) if weights.has("v.patch_embd.bias") else None
    return Linear(weights.tensor(name, *shape, dtype=weights.matrix).flatten(1), bias)


def patches(pixels: Tensor, patch: int) -> Tensor:
    """pixels [B, 3, H, W] as patches [B, H/patch, W/patch, 3 * patch * patch], channels first within each."""
    batch, channels, height, width = pixels.shape
    cut = pixels.view(batch, channels, height // patch, patch, width // patch, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3)


def merged(x: Tensor, side: int) -> Tensor:
    """x [B, H, W, D] -> [B, H/side, W/side, side * side * D]: the rows of each square, row by row, in one."""
    batch, height, width, size = x.shape
    cut = x.view(batch, height // side, side, width // side, side, size)
    return cut.permute(0, 1, 3, 2, 4, 5).flatten(3)
