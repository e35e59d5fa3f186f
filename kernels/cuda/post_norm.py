"""Adds a matmul's product to the residual stream, and computes the next RMSNorm, in one launch.

    residual = residual_scale * residual + rms_norm(row_scale * (product + bias), post_norm)
    out = rms_norm(residual, next_norm)

It serves products with a post-norm, a bias or row scales, each optional; the matmul itself adds a plain product to the
residual. With a branch, the post-norm reads the sum of two norms, of the product and of the branch's rows. Where ranks
share a model, the same launch also sums few rows of products over the ranks (ranks/peers.py).
Defined in kernels/rms_norm.py. A program takes one row, which stays in fp32 registers, so a row's bits follow from its
width alone.
"""

import torch
import triton
import triton.language as tl

from quengine.kernels.backend import Branch
from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    ScaledProduct,
)
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.ranks.peers import (
    PeerBuffers,
    finish_exchange,
    next_sequence,
    push,
    receive_sum,
    turn,
)
from quengine.kernels.cuda.rms_norm import geometry
from quengine.kernels.cuda.row_forms import RowForm, form_of, store_as
from quengine.kernels.rms_norm import RMSNorm

_SUM = tl.constexpr(-1)
"""No output beside the residual; else `KIND` is the form of the next norm's rows (row_forms.py)."""


@triton.jit
def post_normed(y, weight, other, first_weight, branch_weight, eps, branch_eps, WIDTH: tl.constexpr):
    """What is added to the stream for a product y [BLOCK], zeros beyond WIDTH. other: the branch's row, or None;
    weight: of the post-norm, or None."""
    if other is not None:
        y = y * tl.rsqrt(tl.sum(y * y, 0) / WIDTH + branch_eps) * first_weight
        y += other * tl.rsqrt(tl.sum(other * other, 0) / WIDTH + branch_eps) * branch_weight
    if weight is not None:
        y = y * tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps) * weight
    return y


@DirectLaunch
@triton.jit
def _post_norm_add_kernel(
    product_ptr, row_scale_ptr, residual_ptr, weight_ptr, norm_ptr, out_ptr, low_ptr, scale_ptr, sums_ptr,
    bias_ptr, factor_ptr, branch_ptr, first_weight_ptr, branch_weight_ptr, peers,
    out_stride, inverse_weight_scale, residual_scale, eps, branch_eps, next_eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr, LAYOUT: tl.constexpr,
    RANKS: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """row_scale_ptr: row scales of a `ScaledProduct`. weight_ptr, bias_ptr [WIDTH], factor_ptr [rows]:
    weights of the post-norm, bias and row scales, each None if absent. branch_ptr: rows of a branch, or None, with
    weights of the norm of the product and of that of the branch. RANKS: the ranks in `peers` that share
    the product; 0: none.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight, other, first_weight, branch_weight = None, None, None, None
    # A wide row's words of the ranks take most registers: what they do not need is then read after them.
    LATE: tl.constexpr = RANKS > 0 and BLOCK > 4096
    if not LATE:
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y = tl.load(product_ptr + row * WIDTH + column, mask=inside, other=0.0)
    if not LATE:
        x = tl.load(residual_ptr + row * WIDTH + column, mask=inside, other=0.0)
    if SCALED:
        y *= tl.load(row_scale_ptr + row) * inverse_weight_scale
    if RANKS > 0:
        at = row * WIDTH + tl.minimum(column, WIDTH - 1)
        sequence = next_sequence(peers, at)
        push(peers, y, at, inside, sequence, RANKS, CAPACITY)
        words = peers.received + turn(sequence, RANKS, CAPACITY) + at
        y = receive_sum(words, inside, sequence, RANKS, CAPACITY)
        finish_exchange(peers, at, inside, sequence)
    if LATE:
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
        x = tl.load(residual_ptr + row * WIDTH + column, mask=inside, other=0.0)
    if bias_ptr is not None:
        y += bias
    if factor_ptr is not None:
        y *= tl.load(factor_ptr + row)
    if branch_ptr is not None:
        other = tl.load(branch_ptr + row * WIDTH + column, mask=inside, other=0.0)
        first_weight = tl.load(first_weight_ptr + column, mask=inside, other=0.0)
        branch_weight = tl.load(branch_weight_ptr + column, mask=inside, other=0.0)
    x *= residual_scale
    x += post_normed(y, weight, other, first_weight, branch_weight, eps, branch_eps, WIDTH)
    tl.store(residual_ptr + row * WIDTH + column, x, mask=inside)
    if KIND != _SUM:
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
        z = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + next_eps) * norm
        store_as(z, row, 0, out_ptr, low_ptr, scale_ptr, sums_ptr, out_stride, WIDTH, KIND, LAYOUT)


def branch_arguments(
    branch: Branch | None, y: torch.Tensor
) -> tuple[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], float]:
    """A kernel's arguments for a branch beside rows y: its rows, the weights of y's norm and of its own, their eps."""
    if branch is None:
        return (None, None, None), 0.0
    rows, first, second = branch.rows, branch.first_norm, branch.norm
    assert rows.shape == y.shape and rows.is_contiguous() and first.eps == second.eps
    return (rows, first.weight, second.weight), first.eps


def post_norm_add(
    product: torch.Tensor | ScaledProduct,
    residual: torch.Tensor,
    post_norm: RMSNorm | None,
    next_norm: RMSNorm | None = None,
    out: QuantizedActivations | Fp16Operand | None = None,
    pdl: bool = False,
    bias: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    peers: PeerBuffers | None = None,
    branch: Branch | None = None,
) -> None:
    """Adds `post_norm(row_scale * (product + bias))` to `residual` in place: product and residual contiguous fp32 [T,
    D], bias fp32 [D], row_scale fp32 [T] or [T, 1]. The residual is first multiplied by the post-norm's
    `residual_scale`; `branch`, whose rows are contiguous fp32 [T, D]: see `Backend.linear_add`.

    `out`: the destination of `next_norm` of the sum. `pdl` (sm_90 and later): the launch may start before its
    predecessor has ended, which may produce the product, the residual and row_scale. `product` and `out` may share
    their row scales. With `peers`, of enough capacity, the product is the sum over the ranks, which all launch this.
    """
    if not isinstance(product, ScaledProduct):
        scaled, y, product_scale, weight_scale = False, product, product, 1.0
    else:
        scaled, y, product_scale, weight_scale = True, product.values, product.row_scale, product.weight_scale
    assert y.shape == residual.shape and y.is_contiguous() and residual.is_contiguous()
    assert (out is None) == (next_norm is None)
    assert bias is None or (bias.shape == y.shape[1:] and bias.dtype == torch.float32)
    assert row_scale is None or (row_scale.numel() == y.shape[0] and row_scale.dtype == torch.float32)
    assert all(given is None or given.is_contiguous() for given in (bias, row_scale))
    assert peers is None or peers.for_rows(*y.shape) is peers
    form = RowForm(_SUM.value, (y, y, y, y), 0, 0) if out is None else form_of(out, *y.shape)
    post_weight, post_eps = (None, 0.0) if post_norm is None else (post_norm.weight, post_norm.eps)
    next_weight, next_eps = (residual, 0.0) if next_norm is None else (next_norm.weight, next_norm.eps)
    residual_scale = 1.0 if post_norm is None else post_norm.residual_scale
    branches, branch_eps = branch_arguments(branch, y)
    shape = geometry(1, y.shape[1])
    _post_norm_add_kernel[(y.shape[0],)](
        y, product_scale, residual, post_weight, next_weight, *form.planes,
        bias, row_scale, *branches, None if peers is None else peers.pointers,
        form.stride, 1.0 / weight_scale, residual_scale, post_eps, branch_eps, next_eps,
        WIDTH=y.shape[1], BLOCK=max(shape.head, 128), SCALED=scaled, KIND=form.kind, LAYOUT=form.layout,
        RANKS=0 if peers is None else peers.ranks, CAPACITY=0 if peers is None else peers.capacity, PDL=pdl,
        num_warps=shape.warps, launch_pdl=pdl,
    )  # fmt: skip
