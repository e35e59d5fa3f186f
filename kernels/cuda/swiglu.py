"""SwiGLU of rows of gate and up values, where no matmul does it in its epilogue. Definition: kernels/swiglu.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _swiglu_rows_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def swiglu_rows(gate_up: Tensor, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """silu(gate)*up of contiguous fp32 rows [T, 2F]: fp32 [T, F]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=torch.float32, device=gate_up.device) if out is None else out
    _swiglu_rows_kernel[(rows, triton.cdiv(width, 1024))](
        gate_up, y, width, BLOCK=1024, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return y


@triton.jit
def _swiglu_products_kernel(
    z_ptr, unscale_ptr, out_ptr, width, stride, first, inverse_gain, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    scale = tl.load(unscale_ptr + row) * inverse_gain
    gate = tl.load(z_ptr + row * 2 * width + column, mask=inside, other=0.0) * scale
    up = tl.load(z_ptr + row * 2 * width + width + column, mask=inside, other=0.0) * scale
    tl.store(out_ptr + row * stride + first + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def swiglu_products(z: Tensor, unscale: Tensor, gain: float, out: Tensor, first: int) -> None:
    """silu(gate)*up of products that still have to be scaled (half.py), into columns first .. of out fp32 [T, F].

    z: contiguous fp32 [T, 2n], n gate columns, then their up columns; they stand for z * unscale / gain.
    """
    rows, width = z.shape[0], z.shape[1] // 2
    _swiglu_products_kernel[(rows, triton.cdiv(width, 1024))](
        z, unscale, out, width, out.shape[1], first, 1.0 / gain, BLOCK=1024, num_warps=4
    )
