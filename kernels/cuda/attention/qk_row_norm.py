"""RMSNorm over all query heads of a row together, and over all its key heads, before rotation (OLMo 2).

The attention kernels normalize single heads while they load them. A norm over a whole row needs all of its heads,
which none of their programs has, so it is a separate launch.
"""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import AttentionSpec


@triton.jit
def _qk_row_norm_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, eps, stride,
    Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs: (row, 0 for queries or 1 for keys)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_ptr = qkv_ptr + tl.program_id(0).to(tl.int64) * stride
    if tl.program_id(1) == 0:
        _normalize(row_ptr, q_norm_ptr, eps, Q_WIDTH)
    else:
        _normalize(row_ptr + Q_WIDTH, k_norm_ptr, eps, K_WIDTH)


@triton.jit
def _normalize(row_ptr, norm_ptr, eps, WIDTH: tl.constexpr):
    i = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = i < WIDTH
    x = tl.load(row_ptr + i, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y = x * inverse_rms * tl.load(norm_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(row_ptr + i, y.to(row_ptr.dtype.element_ty), mask=inside)


def has_row_norms(spec: AttentionSpec) -> bool:
    """Whether a layer's query and key norms are over all heads of a row."""
    return spec.q_norm is not None and spec.q_norm.numel() != spec.head_dim


def qk_row_norm(qkv: Tensor, spec: AttentionSpec, pdl: bool = False) -> AttentionSpec:
    """Normalizes the queries and keys of qkv [T, (heads + 2 * kv_heads) * head_dim], unit inner stride, in place.

    `spec` has a q_norm of heads * head_dim and a k_norm of kv_heads * head_dim elements. Returns the spec without
    norms, for attention. With `pdl` the launch may overlap the end of the one before it.
    """
    assert spec.q_norm is not None and spec.k_norm is not None and qkv.stride(1) == 1
    assert not spec.gated, "norms of whole rows are not computed beside output gates"
    q_width, k_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    assert spec.q_norm.shape == (q_width,) and spec.k_norm.shape == (k_width,)
    _qk_row_norm_kernel[(qkv.shape[0], 2)](
        qkv, spec.q_norm, spec.k_norm, spec.eps, qkv.stride(0), Q_WIDTH=q_width, K_WIDTH=k_width, PDL=pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return replace(spec, q_norm=None, k_norm=None)
