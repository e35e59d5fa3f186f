"""The Hadamard transform of heads (kernels/hadamard.py) in CUDA kernels: by sums and differences, or matrix units."""

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch

REMAINDERS = gl.constexpr(2048.0)
"""The factor of remainders in `hadamard_terms`: it makes half of a value's last bit as large as the value, so that both
leave the range of fp16 together."""


@triton.constexpr_function
def _block(head_dim: int) -> int:
    """As `hadamard_block`; in a kernel's text an `&` of constants would be a tensor."""
    return head_dim & -head_dim


@triton.constexpr_function
def _log2(count: int) -> int:
    return count.bit_length() - 1


@triton.constexpr_function
def _norm(size: int) -> float:
    return float(size**-0.5)


@triton.jit
def hadamard_heads(x, HEAD_DIM: tl.constexpr):
    """fp32 [R, PADDED] to the transforms of its heads; elements from HEAD_DIM on are 0, and stay so."""
    R: tl.constexpr = x.shape[0]
    PADDED: tl.constexpr = x.shape[1]
    SIZE: tl.constexpr = _block(HEAD_DIM)
    BLOCKS: tl.constexpr = R * PADDED // SIZE
    y = tl.reshape(x, [BLOCKS, SIZE])
    # Each turn transforms the lowest bit of the index and makes it the highest.
    for _ in tl.static_range(_log2(SIZE)):
        near, far = tl.split(tl.reshape(y, [BLOCKS, SIZE // 2, 2]))
        y = tl.reshape(tl.permute(tl.join(near + far, near - far), [0, 2, 1]), [BLOCKS, SIZE])
    return tl.reshape(y, [R, PADDED]) * _norm(SIZE)


@DirectLaunch
@triton.jit(do_not_specialize=["count"])
def _transform_heads_kernel(out_ptr, count, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Programs (BLOCK heads)."""
    wait_then_launch(PDL)
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    head = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, PADDED)
    inside = (head < count)[:, None] & (d < HEAD_DIM)[None, :]
    place = out_ptr + head[:, None] * HEAD_DIM + d[None, :]
    y = hadamard_heads(tl.load(place, mask=inside, other=0.0).to(tl.float32), HEAD_DIM)
    tl.store(place, y.to(out_ptr.dtype.element_ty), mask=inside)


def transform_heads(out: Tensor, head_dim: int, pdl: bool = False) -> None:
    """Transforms an attention's results in place: [T, heads * head_dim], contiguous, of any float type."""
    assert out.is_contiguous()
    count, block = out.numel() // head_dim, max(1, 1024 // triton.next_power_of_2(head_dim))
    _transform_heads_kernel[(triton.cdiv(count, block),)](
        out, count, HEAD_DIM=head_dim, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
    )


@gluon.jit
def _signs(N: gl.constexpr, A: gl.constexpr):
    """The transform's matrix [N, N] without its norm, ones of either sign, as the left operand: of a pair of indices
    the sign is the product of that of their lowest four bits and of that of the others."""
    L: gl.constexpr = gl.reshape(gl.zeros([N, N], gl.float16, A), [N // 16, 16, N // 16, 16]).type.layout
    FAR: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, L))
    NEAR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    tile = gl.arange(0, N // 16, layout=gl.SliceLayout(1, FAR))
    step = gl.arange(0, N // 16, layout=gl.SliceLayout(0, FAR))
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, NEAR))
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, NEAR))
    far = _sign(gl.expand_dims(tile, 1) & gl.expand_dims(step, 0))
    near = _sign(gl.expand_dims(row, 1) & gl.expand_dims(column, 0))
    far = gl.expand_dims(gl.expand_dims(far, 1), 3)
    near = gl.expand_dims(gl.expand_dims(near, 0), 2)
    return gl.convert_layout(gl.reshape(far * near, [N, N]), A, assert_trivial=True)


@gluon.jit
def _sign(common):
    """fp16 -1 where an odd number of the lowest four bits is set, else 1."""
    common ^= common >> 2
    common ^= common >> 1
    return ((common.to(gl.int16) & 1) << 15 | 0x3C00).to(gl.float16, bitcast=True)


@gluon.jit
def hadamard_terms(terms, WARPS: gl.constexpr):
    """The transforms, fp32 [R, N], of heads in shared memory, fp16 [2 R, N]: each one's value, then its remainder times
    REMAINDERS."""
    COUNT: gl.constexpr = terms.shape[0]
    N: gl.constexpr = terms.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    heads = terms.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
    signs = _signs(N, gl.DotOperandLayout(0, MMA, 2))
    sums = mma_v2(signs, heads, gl.zeros([N, COUNT], gl.float32, MMA))
    value, remainder = gl.split(gl.reshape(sums, [N, COUNT // 2, 2]))
    return gl.permute(value + remainder * (1.0 / REMAINDERS), [1, 0]) * _norm(N)
