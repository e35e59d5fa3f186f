"""The parts of vision encoders, over torch's operations.

Rows between the parts are fp32 (fp64 in tests). Matrices may be fp16; they multiply rows in fp16, with fp32
accumulation. Rows that no norm bounds are first scaled below 1 by a power of two for each row, which keeps products
within fp16.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quengine.kernels.vision_rows import Norm, PatchActivation, PatchRotation, activated, scaled_below_one
from quengine.models.vision.files import Weights
from quengine.models.vision.matrix import Matrix, expanded
from quengine.models.vision.matrix import joined as joined_matrices


def rotation_of_pairs(angles: Tensor) -> PatchRotation:
    """Rotates values 2j and 2j + 1 of a head by angles[row, j]. angles: [rows, head_dim / 2]; cos and sin are fp32."""
    cos, sin = angles.float().cos(), angles.float().sin()
    return PatchRotation(torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2), 2)


def rotation_of_halves(*angles: Tensor) -> PatchRotation:
    """Rotates values j and j + n of a head, or of each of its parts, by angles[row, j]. angles: [rows, n] for each
    part; cos and sin are fp32."""
    cos = [part.float().cos() for part in angles for _ in range(2)]
    sin = [part.float().sin() * sign for part in angles for sign in (-1, 1)]
    return PatchRotation(torch.cat(cos, -1), torch.cat(sin, -1), 2 * angles[0].shape[-1])


@dataclass(frozen=True, eq=False)
class Linear:
    """A matrix [N, K] as stored, with a bias [N] or None. kind: the dtype of its products."""

    matrix: Matrix
    bias: Tensor | None
    kind: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The matrix in the type of its products."""
        return expanded(self.matrix, self.kind)

    def __call__(self, x: Tensor, bounded: bool = True) -> Tensor:
        """x [..., K] fp32 -> [..., N] fp32. bounded: every row's product stays within the range of fp16."""
        if self.kind == x.dtype:
            return F.linear(x, self.weight, self.bias)
        if bounded:
            y = F.linear(x.to(self.kind), self.weight).to(x.dtype)
        else:
            x, scale = scaled_below_one(x)
            y = F.linear(x.to(self.kind), self.weight).to(x.dtype) * scale
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, eq=False)
class ClippedLinear(Linear):
    """A matrix whose inputs and outputs are clamped. bounds: low and high of inputs, then of outputs, scalars."""

    bounds: tuple[Tensor, Tensor, Tensor, Tensor]

    def __call__(self, x: Tensor, bounded: bool = True) -> Tensor:
        low, high, out_low, out_high = self.bounds
        return super().__call__(x.clamp(low, high), bounded).clamp(out_low, out_high)


@dataclass(frozen=True, eq=False)
class Joined:
    """Matrices that multiply the same rows; their results stand side by side."""

    parts: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


HF_ACTIVATIONS: dict[str, PatchActivation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "silu": "silu",
}
"""Names of activations in config.json."""


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(act(up(x))), or down(act(gate(x)) * up(x)) with a gate."""

    up: Linear
    down: Linear
    act: PatchActivation
    gate: Linear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        up = self.up(x)
        hidden = activated(up, self.act) if self.gate is None else activated(self.gate(x), self.act) * up
        return self.down(hidden, bounded=False)


@dataclass(frozen=True, eq=False)
class Windows:
    """Square windows of an image's rows; rows attend only to those of their own window.

    index: [W, S], the rows of each window. seen: [W, S], False where a window at an edge has no row. back: [rows],
    the place of each row among the W * S of all windows.
    """

    index: Tensor
    seen: Tensor
    back: Tensor

    @classmethod
    def of(cls, height: int, width: int, side: int, device: torch.device) -> "Windows":
        """Windows of `side` x `side` rows over a grid, from its upper left."""
        down, across = -(-height // side), -(-width // side)
        rows = torch.full((down * side, across * side), -1, device=device)
        rows[:height, :width] = torch.arange(height * width, device=device).view(height, width)
        index = rows.view(down, side, across, side).transpose(1, 2).reshape(down * across, side * side)
        back = torch.argsort(index.flatten())[-height * width :]
        return cls(index.clamp(min=0), index >= 0, back)

    def split(self, x: Tensor) -> Tensor:
        """[B, heads, rows, d] -> [B * W, heads, S, d]"""
        return x[:, :, self.index].transpose(1, 2).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`."""
        count = len(self.index)
        x = x.view(-1, count, *x.shape[1:]).transpose(1, 2).flatten(2, 3)
        return x[:, :, self.back]


@dataclass(frozen=True, eq=False)
class UnitGrid:
    """A unit of `height` x `width` patches, and what follows from its size alone.

    positions: [height, width, encoder's width], added to the embedded patches. rotation: that of queries and keys.
    windows: those of layers without full attention.
    """

    height: int
    width: int
    positions: Tensor | None = None
    rotation: PatchRotation | None = None
    windows: Windows | None = None

    def placed(self, x: Tensor) -> Tensor:
        """x [B, height, width, encoder's width] with the positions added."""
        return x if self.positions is None else x + self.positions


@dataclass(frozen=True, eq=False)
class VisionAttention:
    """Attention of all rows of a unit, or of a window, to one another.

    qkv: [3 * heads * head_dim, width], queries first. norms: of queries, keys and values; of each head by itself if
    `norm_heads`, else of all heads at once. scale: that of scores; None: 1 / sqrt(head_dim).
    """

    qkv: Linear | Joined
    out: Linear
    heads: int
    scale: float | None = None
    norms: tuple[Norm | None, Norm | None, Norm | None] = (None, None, None)
    norm_heads: bool = True

    def __call__(self, x: Tensor, rotate: PatchRotation | None, windows: Windows | None) -> Tensor:
        """x [B, rows, width] -> [B, rows, width]"""
        parts = zip(self.qkv(x).chunk(3, -1), self.norms, strict=True)
        q, k, v = (self._heads(part, norm) for part, norm in parts)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        kind = self.out.kind
        return self.out(self.attended(q.to(kind), k.to(kind), v.to(kind), windows).to(x.dtype))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows | None) -> Tensor:
        """q, k, v [B, heads, rows, head_dim] -> [B, rows, heads * head_dim], by torch's attention."""
        if windows is None:
            y = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        else:
            mask = windows.seen[:, None, None].repeat(len(q), 1, 1, 1)
            q, k, v = windows.split(q), windows.split(k), windows.split(v)
            y = windows.join(F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale))
        return y.transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor, norm: Norm | None) -> Tensor:
        """[B, rows, heads * head_dim] -> [B, heads, rows, head_dim]"""
        if norm is not None and not self.norm_heads:
            x = norm(x)
        x = x.view(*x.shape[:-1], self.heads, -1)
        if norm is not None and self.norm_heads:
            x = norm(x)
        return x.transpose(1, 2)


def linear(weights: Weights, name: str, rows: int, cols: int) -> Linear:
    """`name`.weight [rows, cols], with `name`.bias where there is one."""
    bias = weights.tensor(f"{name}.bias", rows) if weights.has(f"{name}.bias") else None
    return Linear(weights.stored(f"{name}.weight", rows, cols), bias, weights.matrix)


def joined(parts: tuple[Linear, ...]) -> Linear | Joined:
    """Matrices that multiply the same rows, as one matrix; as `Joined` if one of them has a bias or clamps."""
    if all(type(part) is Linear and part.bias is None for part in parts):
        kind = parts[0].kind
        return Linear(joined_matrices([part.matrix for part in parts], kind), None, kind)
    return Joined(parts)


def clipped_linear(weights: Weights, name: str, rows: int, cols: int) -> Linear:
    """`name`.weight [rows, cols], clamped where the file has bounds."""
    plain = linear(weights, name, rows, cols)
    ends = [f"{name}.{part}" for part in ("input_min", "input_max", "output_min", "output_max")]
    if not weights.has(ends[0]):
        return plain
    low, high, out_low, out_high = (weights.tensor(end) for end in ends)
    return ClippedLinear(plain.matrix, plain.bias, plain.kind, (low, high, out_low, out_high))


def qkv_linear(weights: Weights, name: str, rows: int, cols: int) -> Linear:
    """Query, key and value matrices, [rows, cols] each, as one: `name`.attn_qkv, or attn_q, attn_k, attn_v joined."""
    if weights.has(f"{name}.attn_qkv.weight"):
        return linear(weights, f"{name}.attn_qkv", 3 * rows, cols)
    parts = [linear(weights, f"{name}.attn_{part}", rows, cols) for part in "qkv"]
    biases = [part.bias for part in parts]
    bias = None
    if any(each is not None for each in biases):
        zeros = torch.zeros_like(next(each for each in biases if each is not None))
        bias = torch.cat([zeros if each is None else each for each in biases])
    return Linear(joined_matrices([part.matrix for part in parts], weights.matrix), bias, weights.matrix)


def norm(weights: Weights, name: str, size: int, eps: float, centred: bool = True) -> Norm:
    """`name`.weight [size], with `name`.bias where there is one."""
    bias = weights.tensor(f"{name}.bias", size) if weights.has(f"{name}.bias") else None
    return Norm(weights.tensor(f"{name}.weight", size), bias, eps, centred)


def patch_linear(weights: Weights, width: int, patch: int) -> Linear:
    """The patch embedding [width, 3, patch, patch] as a matrix over a patch's values in that order."""
    shape = (width, 3, patch, patch)
    bias = weights.tensor("v.patch_embd.bias", width) if weights.has("v.patch_embd.bias") else None
    matrix = weights.tensor("v.patch_embd.weight", *shape, dtype=weights.matrix).flatten(1)
    return Linear(matrix, bias, weights.matrix)


def patch_linear_of_two(weights: Weights, width: int, patch: int) -> Linear:
    """The patch embedding over two frames as one matrix, the sum of both: the two frames of an image are the same."""
    first = patch_linear(weights, width, patch)
    second = weights.tensor("v.patch_embd.weight.1", width, 3, patch, patch, dtype=weights.matrix)
    both = first.weight.to(weights.vector) + second.flatten(1).to(weights.vector)
    return Linear(both.to(weights.matrix), first.bias, weights.matrix)


def axial_angles(height: int, width: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Angles [height * width, head_dim / 2] of patches: head_dim / 4 frequencies turn by the row, the same number by
    the column."""
    size = head_dim // 2
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    down = torch.arange(height, dtype=torch.float32)[:, None, None] * frequencies
    across = torch.arange(width, dtype=torch.float32)[None, :, None] * frequencies
    both = [part.expand(height, width, -1) for part in (down, across)]
    return torch.cat(both, -1).flatten(0, 1).to(device)


def patches(pixels: Tensor, patch: int) -> Tensor:
    """pixels [B, 3, H, W] as patches [B, H/patch, W/patch, 3 * patch * patch], channels first within each."""
    batch, channels, height, width = pixels.shape
    cut = pixels.view(batch, channels, height // patch, patch, width // patch, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3)


def merged(x: Tensor, side: int) -> Tensor:
    """x [B, H, W, D] -> [B, H/side, W/side, side * side * D]: the rows of each square, in raster order, as one row."""
    batch, height, width, size = x.shape
    cut = x.view(batch, height // side, side, width // side, side, size)
    return cut.permute(0, 1, 3, 2, 4, 5).flatten(3)
