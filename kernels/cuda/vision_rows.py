"""The operations between the matrices of a vision encoder's layer, on CUDA: fp32 rows, fp16 products and inputs.

Defined in kernels/vision_rows.py. Each kernel reads a matrix's result once, and stores the next matrix's input: with
torch's own operations a layer moves some six times the bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.glu import GELU_ERF, GELU_TANH, QUICK_GELU, SILU, activate
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.vision_rows import Norm, PatchActivation, PatchRotation

_CODES: dict[PatchActivation, int] = {
    "gelu": GELU_ERF.value,
    "gelu_tanh": GELU_TANH.value,
    "gelu_quick": QUICK_GELU.value,
    "silu": SILU.value,
}
_COLUMNS = 1024
"""Columns of a feed-forward that a program holds at a time."""
_BLOCKS = 128
"""Blocks of a matrix that a program expands."""


@triton.jit
def _normed(x, weight_ptr, bias_ptr, column, inside, eps, WIDTH: tl.constexpr, CENTRED: tl.constexpr):
    """x [N] with zeros outside, normed: zeros outside."""
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, mask=inside, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0)
    return y


@DirectLaunch
@triton.jit
def _add_normed_kernel(
    x_ptr, y_ptr, y_scale_ptr, y_bias_ptr, factor_ptr, post_weight_ptr, weight_ptr, bias_ptr, out_ptr, post_eps, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """Pointers are None where there is none of what they point to. POST: an RMSNorm of what is added."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row * WIDTH + column, mask=inside, other=0.0)
    if ADDS:
        y = tl.load(y_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if y_scale_ptr is not None:
            y *= tl.load(y_scale_ptr + row)
        if y_bias_ptr is not None:
            y += tl.load(y_bias_ptr + column, mask=inside, other=0.0)
        if POST:
            y = _normed(y, post_weight_ptr, None, column, inside, post_eps, WIDTH, False)
        if factor_ptr is not None:
            y *= tl.load(factor_ptr + column, mask=inside, other=0.0)
        x += y
        tl.store(x_ptr + row * WIDTH + column, x, mask=inside)
    if NORM:
        h = _normed(x, weight_ptr, bias_ptr, column, inside, eps, WIDTH, CENTRED)
        tl.store(out_ptr + row * WIDTH + column, h.to(tl.float16), mask=inside)


def add_normed(
    x: Tensor,
    y: Tensor | None,
    norm: Norm | None,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    post: Norm | None = None,
    factor: Tensor | None = None,
) -> Tensor | None:
    """Adds `post(y * scale + bias) * factor` to x in place, and returns `norm(x)` in fp16, None without a norm.

    x: [R, D] fp32, contiguous. y: [R, D] fp16, contiguous; None: nothing is added. scale: [R] fp32. bias, factor: [D]
    fp32. post: an RMSNorm. D up to 8192.
    """
    rows, width = x.shape
    assert x.is_contiguous() and x.dtype == torch.float32 and (y is None or y.is_contiguous())
    assert post is None or not post.centred
    out = None if norm is None else torch.empty(x.shape, dtype=torch.float16, device=x.device)
    own, after = norm or Norm(None, None, 0.0, False), post or Norm(None, None, 0.0, False)
    block = triton.next_power_of_2(width)
    _add_normed_kernel[(rows,)](
        x, y, scale, bias, factor, after.weight, own.weight, own.bias, out, float(after.eps), float(own.eps),
        WIDTH=width, BLOCK=block, ADDS=y is not None, POST=post is not None, NORM=norm is not None,
        CENTRED=own.centred, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return out


@DirectLaunch
@triton.jit(do_not_specialize=["rows"])
def _heads_kernel(
    qkv_ptr, bias_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, v_weight_ptr, out_ptr, rows, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, PART: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """One row's queries, keys or values. out: [3, B, heads, rows, head_dim]."""
    row, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, dim = tl.arange(0, HEAD_BLOCK)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    inside = (head < HEADS) & (dim < DIM)
    column = kind * HEADS * DIM + head * DIM
    first = qkv_ptr + row * 3 * HEADS * DIM + column
    x = tl.load(first + dim, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column + dim, mask=inside, other=0.0)
    if NORMED:
        factor = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    rotated = kind < 2
    if PART > 0:
        other = tl.where(dim % PART < PART // 2, dim + PART // 2, dim - PART // 2)
        turned = inside & rotated
        partner = tl.load(first + other, mask=turned, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            partner += tl.load(bias_ptr + column + other, mask=turned, other=0.0)
    if NORMED:
        x *= factor
        weight_ptr = q_weight_ptr
        if kind == 1:
            weight_ptr = k_weight_ptr
        if kind == 2:
            weight_ptr = v_weight_ptr
        x *= tl.load(weight_ptr + dim, mask=dim < DIM, other=0.0)
        if PART > 0:
            partner *= factor * tl.load(weight_ptr + other, mask=dim < DIM, other=0.0)
    if PART > 0:
        at = row % rows * DIM + dim
        cos = tl.load(cos_ptr + at, mask=rotated & (dim < DIM), other=1.0)
        sin = tl.load(sin_ptr + at, mask=rotated & (dim < DIM), other=0.0)
        x = x * cos + partner * sin
    batch = row // rows
    place = ((kind * (tl.num_programs(0) // rows) + batch) * HEADS + head) * rows + row % rows
    tl.store(out_ptr + place * DIM + dim, x.to(tl.float16), mask=inside)


def split_heads(
    qkv: Tensor,
    bias: Tensor | None,
    heads: int,
    rows: int,
    rotation: PatchRotation | None,
    weights: tuple[Tensor, Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, heads, rows, head_dim] fp16, normed by head and rotated.

    qkv: [B * rows, 3 * heads * head_dim] fp16, contiguous. bias: [3 * heads * head_dim] fp32. rotation: of the queries
    and keys of `rows` rows. weights: of RMSNorms over each head's queries, keys and values, [head_dim] fp32 each.
    """
    dim = qkv.shape[1] // (3 * heads)
    assert qkv.is_contiguous() and (rotation is None or rotation.cos.shape == (rows, dim))
    out = torch.empty(3, len(qkv) // rows, heads, rows, dim, dtype=torch.float16, device=qkv.device)
    tables = (None, None) if rotation is None else (rotation.cos, rotation.sin)
    _heads_kernel[(len(qkv), 3)](
        qkv, bias, *tables, *(weights or (None, None, None)), out, rows, float(eps),
        HEADS=heads, DIM=dim, HEAD_BLOCK=triton.next_power_of_2(heads), DIM_BLOCK=triton.next_power_of_2(dim),
        PART=0 if rotation is None else rotation.part, NORMED=weights is not None, num_warps=4,
    )  # fmt: skip
    q, k, v = out.unbind(0)
    return q, k, v


@triton.jit
def _hidden_at(
    up_ptr, gate_ptr, up_bias_ptr, gate_bias_ptr, row, column, WIDTH: tl.constexpr, CODE: tl.constexpr
):
    """Columns [N] of a row of the feed-forward: activation(up), or activation(gate) * up."""
    inside = column < WIDTH
    up = tl.load(up_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if up_bias_ptr is not None:
        up += tl.load(up_bias_ptr + column, mask=inside, other=0.0)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if gate_bias_ptr is not None:
            gate += tl.load(gate_bias_ptr + column, mask=inside, other=0.0)
        y = activate(gate, CODE) * up
    else:
        y = activate(up, CODE)
    return y


@DirectLaunch
@triton.jit
def _hidden_kernel(
    up_ptr, gate_ptr, up_bias_ptr, gate_bias_ptr, out_ptr, scale_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        y = _hidden_at(up_ptr, gate_ptr, up_bias_ptr, gate_bias_ptr, row, column, WIDTH, CODE)
        most = tl.maximum(most, tl.where(column < WIDTH, tl.abs(y), 0.0))
    # The power of two above the largest value; of zeros 1, as exponents go no further here than fp16 needs.
    power = (tl.max(most, 0).to(tl.int32, bitcast=True) >> 23) - 126
    power = tl.minimum(tl.maximum(power, -60), 60)
    tl.store(scale_ptr + row, ((power + 127) << 23).to(tl.float32, bitcast=True))
    inverse = ((127 - power) << 23).to(tl.float32, bitcast=True)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        y = _hidden_at(up_ptr, gate_ptr, up_bias_ptr, gate_bias_ptr, row, column, WIDTH, CODE)
        tl.store(out_ptr + row * WIDTH + column, (y * inverse).to(tl.float16), mask=column < WIDTH)


def hidden_rows(
    up: Tensor,
    up_bias: Tensor | None,
    gate: Tensor | None,
    gate_bias: Tensor | None,
    activation: PatchActivation,
) -> tuple[Tensor, Tensor]:
    """Returns `activation(up)`, or `activation(gate) * up`, as fp16 [R, F] below 1, and fp32 [R]: the power of two
    by which each row must be multiplied.

    up, gate: [R, F] fp16, contiguous. up_bias, gate_bias: [F] fp32.
    """
    assert up.is_contiguous() and (gate is None or gate.is_contiguous())
    out, scale = torch.empty_like(up), torch.empty(len(up), dtype=torch.float32, device=up.device)
    _hidden_kernel[(len(up),)](
        up, gate, up_bias, gate_bias, out, scale,
        WIDTH=up.shape[1], BLOCK=_COLUMNS, CODE=_CODES[activation], num_warps=4,
    )  # fmt: skip
    return out, scale


@DirectLaunch
@triton.jit
def _expand_kernel(codes_ptr, scales_ptr, out_ptr, blocks, BLOCKS: tl.constexpr):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    scale = tl.load(scales_ptr + block, mask=inside, other=0.0).to(tl.float32)
    code = tl.load(codes_ptr + at, mask=inside[:, None], other=0).to(tl.float32)
    tl.store(out_ptr + at, (code * scale[:, None]).to(tl.float16), mask=inside[:, None])


def expanded_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """A Q8_0 matrix dequantized to fp16 [N, K].

    codes: int8 [N, K / 32, 32], contiguous; scales: fp16 [N, K / 32, 1], contiguous.
    """
    assert codes.is_contiguous() and scales.is_contiguous() and codes.numel() < 1 << 31
    out = torch.empty(len(codes), codes[0].numel(), dtype=torch.float16, device=codes.device)
    _expand_kernel[(triton.cdiv(scales.numel(), _BLOCKS),)](
        codes, scales, out, scales.numel(), BLOCKS=_BLOCKS, num_warps=4
    )
    return out
