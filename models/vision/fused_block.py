"""A layer of a vision encoder on CUDA: fp16 matrices by torch, what stands between them by one kernel each."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quengine.kernels.cuda.vision_rows import add_normed, hidden_rows, split_heads
from quengine.kernels.vision_rows import Rotation
from quengine.models.vision.blocks import Joined, VisionAttention, VisionBlock, Windows


def fused_block(block: VisionBlock, x: Tensor, rotate: Rotation | None, windows: Windows | None) -> Tensor:
    """`block(x, rotate, windows)` of a block that `fuses`. x: [B, rows, width] fp32, overwritten."""
    attention, mlp = block.attention, block.mlp
    batch, rows, width = x.shape
    x = x.reshape(-1, width)
    q, k, v = _heads(attention, add_normed(x, None, block.norm1), rows, rotate)
    y = F.linear(attention.attended(q, k, v, windows).flatten(0, 1), attention.out.weight)
    (post, last_post), (factor, last_factor) = block.post or (None, None), block.scales or (None, None)
    normed = add_normed(x, y, block.norm2, bias=attention.out.bias, post=post, factor=factor)
    assert normed is not None
    up, gate = (
        F.linear(normed, mlp.up.weight),
        None if mlp.gate is None else F.linear(normed, mlp.gate.weight),
    )
    gate_bias = None if mlp.gate is None else mlp.gate.bias
    hidden, scale = hidden_rows(up, mlp.up.bias, gate, gate_bias, mlp.act)
    y = F.linear(hidden, mlp.down.weight)
    add_normed(x, y, None, scale=scale, bias=mlp.down.bias, post=last_post, factor=last_factor)
    return x.view(batch, rows, width)


def _heads(
    attention: VisionAttention, x: Tensor | None, rows: int, rotate: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    assert x is not None and not isinstance(attention.qkv, Joined)
    qkv = F.linear(x, attention.qkv.weight)
    q, k, v = attention.norms
    if q is None or k is None or v is None:
        return split_heads(qkv, attention.qkv.bias, attention.heads, rows, rotate)
    assert q.weight is not None and k.weight is not None and v.weight is not None
    weights = q.weight, k.weight, v.weight
    return split_heads(qkv, attention.qkv.bias, attention.heads, rows, rotate, weights, q.eps)
