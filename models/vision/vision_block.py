"""A pre-norm layer of a vision encoder: by torch's operations, or on CUDA with one kernel between two fp16 matrices."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quengine.kernels.vision_rows import Norm, PatchRotation
from quengine.models.vision.blocks import Joined, Linear, Mlp, UnitGrid, VisionAttention, Windows


@dataclass(frozen=True, eq=False)
class VisionBlock:
    """A pre-norm layer: attention, then a feed-forward, each added to the rows.

    scales, post: factors [width] and norms of what attention and feed-forward add.
    """

    norm1: Norm
    attention: VisionAttention
    norm2: Norm
    mlp: Mlp
    scales: tuple[Tensor, Tensor] | None = None
    post: tuple[Norm, Norm] | None = None

    def __call__(
        self, x: Tensor, rotate: PatchRotation | None = None, windows: Windows | None = None
    ) -> Tensor:
        """x [B, rows, width], which may be overwritten -> [B, rows, width]"""
        if x.device.type != "cpu" and self.fuses:
            return fused_block(self, x, rotate, windows)
        x = x + self._added(self.attention(self.norm1(x), rotate, windows), 0)
        return x + self._added(self.mlp(self.norm2(x)), 1)

    @property
    def fuses(self) -> bool:
        """Whether kernels/cuda/vision_rows.py has kernels for all between its matrices, which must be fp16."""
        matrices = (self.attention.qkv, self.attention.out, self.mlp.up, self.mlp.down, self.mlp.gate)
        norms = self.attention.norms
        normed = all(norms) and self.attention.norm_heads and len({norm.eps for norm in norms if norm}) == 1
        plain = all(type(each) is Linear and each.kind == torch.float16 for each in matrices if each)
        return plain and (normed or not any(norms))

    def _added(self, y: Tensor, part: int) -> Tensor:
        if self.post is not None:
            y = self.post[part](y)
        return y if self.scales is None else y * self.scales[part]


def through(blocks: Iterable[VisionBlock], x: Tensor, grid: UnitGrid) -> Generator[None, None, Tensor]:
    """x [B, rows, width] through all layers; yields after each."""
    for block in blocks:
        x = block(x, grid.rotation, grid.windows)
        yield
    return x


def fused_block(
    block: VisionBlock, x: Tensor, rotate: PatchRotation | None, windows: Windows | None
) -> Tensor:
    """`block(x, rotate, windows)` of a block that `fuses`. x: [B, rows, width] fp32, overwritten."""
    from quengine.kernels.cuda.vision_rows import add_normed, hidden_rows  # imports Triton

    attention, mlp = block.attention, block.mlp
    batch, rows, width = x.shape
    x = x.reshape(-1, width)
    q, k, v = _heads(attention, add_normed(x, None, block.norm1), rows, rotate)
    y = F.linear(attention.attended(q, k, v, windows).flatten(0, 1), attention.out.weight)
    (post, last_post), (factor, last_factor) = block.post or (None, None), block.scales or (None, None)
    normed = add_normed(x, y, block.norm2, bias=attention.out.bias, post=post, factor=factor)
    assert normed is not None
    up, gate, gate_bias = F.linear(normed, mlp.up.weight), None, None
    if mlp.gate is not None:
        gate, gate_bias = F.linear(normed, mlp.gate.weight), mlp.gate.bias
    hidden, scale = hidden_rows(up, mlp.up.bias, gate, gate_bias, mlp.act)
    y = F.linear(hidden, mlp.down.weight)
    add_normed(x, y, None, scale=scale, bias=mlp.down.bias, post=last_post, factor=last_factor)
    return x.view(batch, rows, width)


def _heads(
    attention: VisionAttention, x: Tensor | None, rows: int, rotate: PatchRotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    from quengine.kernels.cuda.vision_rows import split_heads

    assert x is not None and not isinstance(attention.qkv, Joined)
    qkv = F.linear(x, attention.qkv.weight)
    q, k, v = attention.norms
    if q is None or k is None or v is None:
        return split_heads(qkv, attention.qkv.bias, attention.heads, rows, rotate)
    assert q.weight is not None and k.weight is not None and v.weight is not None
    weights = q.weight, k.weight, v.weight
    return split_heads(qkv, attention.qkv.bias, attention.heads, rows, rotate, weights, q.eps)
