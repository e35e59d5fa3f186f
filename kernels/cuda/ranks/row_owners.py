"""The end of a branch for many rows that ranks share, in one launch: sum, residual, and the RMSNorm that reads it.

    residual += ((x_0 + x_1) + x_2) + ... + bias;  out = rms_norm(residual, norm)

Every N-th row is a rank's own. Each rank writes its products of a row into the memory of the row's owner; the owner
adds them up in the order of the ranks, adds the residual, which it alone keeps, and writes the normed row, in fp16,
into the memory of all. So a rank sends (4 + 2) (N - 1) / N bytes a value, where sums that all ranks have, and norm for
themselves, take 8, and each row is normed once. Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models", section 4.2.2 (sequence parallelism).

How ranks wait, and why no memory is written too early: two_shot.py, whose memory, flags and launch numbers these are.
Definition: kernels/rms_norm.py, kernels/ranks/communicator.py; a row's bits are those of post_norm.py on the sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    OperandLayout,
    fp16_row_scale,
    operand_shape,
    store_operand,
    wgmma_order,
)
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.cuda.ranks.two_shot import (
    REGISTERS,
    SharedSums,
    await_flag,
    memory_of,
    raise_flag,
)
from quengine.kernels.cuda.rms_norm import geometry
from quengine.kernels.rms_norm import RMSNorm

_WGMMA = tl.constexpr(int(OperandLayout.WGMMA))


@DirectLaunch
@triton.jit(do_not_specialize=["rank"])  # all ranks run the same code
def _row_owners_kernel(
    x_ptr, residual_ptr, norm_ptr, bias_ptr, shared_ptr, targets_ptr, launches_ptr, rows, stride, rank, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr, RANKS: tl.constexpr, PROGRAMS: tl.constexpr,
    VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes RANKS rows, one of each owner. VALUES: words of the sums in `shared`, whose first half has the
    operand here, the second its row scales."""
    launch_then_wait(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    launch = tl.load(launches_ptr + program) + 1
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    FLAGS: tl.constexpr = 2 * VALUES
    place = VALUES + (rank * programs + program).to(tl.int64) * WIDTH
    for step in tl.static_range(1, RANKS):  # each rank begins with another owner
        owner = (rank + step) % RANKS
        row = (program * RANKS + owner).to(tl.int64)
        target = memory_of(targets_ptr, owner)
        value = tl.load(x_ptr + row * WIDTH + column, mask=inside & (row < rows), other=0.0)
        tl.store(target + place + column, value, mask=inside & (row < rows))
        raise_flag(target, rank * PROGRAMS + program, launch, FLAGS)
    row = (program * RANKS + rank).to(tl.int64)
    live = inside & (row < rows)
    for step in tl.static_range(1, RANKS):
        await_flag(shared_ptr, (rank + step) % RANKS * PROGRAMS + program, launch, FLAGS)
    y = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(RANKS):
        place = VALUES + (peer * programs + program).to(tl.int64) * WIDTH
        products = tl.where(peer == rank, x_ptr + row * WIDTH, shared_ptr + place)
        # Written by others: not from this multiprocessor's own cache.
        value = tl.load(products + column, mask=live, other=0.0, cache_modifier=".cg")
        y = value if peer == 0 else y + value
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0)
    x = tl.load(residual_ptr + row * WIDTH + column, mask=live, other=0.0) + y
    tl.store(residual_ptr + row * WIDTH + column, x, mask=live)
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    z = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * norm
    scale, row_scale = fp16_row_scale(tl.max(z.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
    z *= scale
    if LAYOUT == _WGMMA:
        z = wgmma_order(z.to(tl.float16))
    for step in tl.static_range(1, RANKS + 1):
        target = memory_of(targets_ptr, (rank + step) % RANKS)
        out = target.to(tl.pointer_type(tl.float16))
        if LAYOUT == _WGMMA:
            tl.store(out + row * stride + column, z, mask=(column < stride) & (row < rows))
        else:
            store_operand(out, row, column, stride, z, live, LAYOUT)
        tl.store(target + VALUES // 2 + row, row_scale, mask=row < rows)
        if step < RANKS:
            raise_flag(target, (RANKS + rank) * PROGRAMS + program, launch, FLAGS)
    for step in tl.static_range(1, RANKS):
        await_flag(shared_ptr, (RANKS + (rank + step) % RANKS) * PROGRAMS + program, launch, FLAGS)
    tl.store(launches_ptr + program, launch)


def row_owners_add_norm(
    x: Tensor,
    residual: Tensor,
    norm: RMSNorm,
    layout: OperandLayout,
    sums: SharedSums,
    pdl: bool = False,
    bias: Tensor | None = None,
) -> Fp16Operand:
    """Add the sum of x over the ranks, plus bias fp32 [D], to the rows of `residual` that are this rank's own, in
    place, and give the norm of all rows: x and residual contiguous fp32 [T, D], for which `sums` has room.

    All ranks launch this. The result lies in `sums`, until the next launch there. `pdl`: see `two_shot_all_reduce`.
    """
    rows, width = x.shape
    assert x.shape == residual.shape and x.is_contiguous() and residual.is_contiguous()
    assert sums.for_rows(rows, width) is sums
    assert bias is None or (bias.shape == (width,) and bias.dtype == torch.float32)
    shape = operand_shape(rows, width, layout)
    operand = Fp16Operand(
        sums.shared.view(torch.float16)[: torch.Size(shape).numel()].view(shape),
        sums.shared[sums.capacity // 2 :][:rows],
        layout,
    )
    tile = geometry(1, width)
    _row_owners_kernel[(-(-rows // sums.ranks),)](
        x, residual, norm.weight, bias, sums.shared, sums.targets, sums.launches, rows, operand.stride, sums.rank,
        norm.eps,
        WIDTH=width, BLOCK=max(tile.head, 128), LAYOUT=int(layout), RANKS=sums.ranks, PROGRAMS=sums.programs,
        VALUES=sums.capacity, PDL=pdl, num_warps=tile.warps, maxnreg=REGISTERS, launch_pdl=pdl,
    )  # fmt: skip
    return operand
