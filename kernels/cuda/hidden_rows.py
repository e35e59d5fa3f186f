"""Hidden rows on CUDA: stores rows by position, reads those of the position before, and joins embeddings with them.

Defined in kernels/hidden_rows.py. A program takes a whole row, or a whole half of a joined row.
"""

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.rms_norm import RMSNorm

_BLOCK_SIZE = tl.constexpr(BLOCK_SIZE)


@triton.jit
def _place(row, position, tables_ptr, sequences_ptr, table_stride):
    """The kept row of a position in the sequence of a step's row."""
    sequence = row
    if sequences_ptr is not None:
        sequence = tl.load(sequences_ptr + row)
    block = tl.load(tables_ptr + sequence * table_stride + position // _BLOCK_SIZE)
    return block.to(tl.int64) * _BLOCK_SIZE + position % _BLOCK_SIZE


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight


@DirectLaunch
@triton.jit
def _keep_kernel(
    x_ptr, weight_ptr, kept_ptr, positions_ptr, tables_ptr, sequences_ptr, rows, x_stride, table_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NEWEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + column, mask=inside, other=0.0)
    position = tl.load(positions_ptr + row)
    place = _place(row, position, tables_ptr, sequences_ptr, table_stride)
    y = x
    if weight_ptr is not None:
        y = _normed(x, tl.load(weight_ptr + column, mask=inside, other=0.0), eps, WIDTH)
    if NEWEST:  # the row after is of the same sequence where it has the place of the position after
        other = tl.minimum(row + 1, rows - 1)
        theirs = tl.load(positions_ptr + other)
        after = tl.minimum(position + 1, table_stride * _BLOCK_SIZE - 1)
        beside = _place(row, after, tables_ptr, sequences_ptr, table_stride)
        inside &= (row == other) | (beside != _place(other, theirs, tables_ptr, sequences_ptr, table_stride))
    tl.store(kept_ptr + place * WIDTH + column, y.to(kept_ptr.dtype.element_ty), mask=inside)


@DirectLaunch
@triton.jit
def _join_kernel(
    x_ptr, weight_ptr, kept_ptr, kept_weight_ptr, out_ptr, positions_ptr, tables_ptr, sequences_ptr, x_stride,
    table_stride, eps, kept_eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    row, half = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    out = out_ptr + row.to(tl.int64) * (2 * WIDTH) + half * WIDTH + column
    if half == 0:
        x = tl.load(x_ptr + row.to(tl.int64) * x_stride + column, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
        tl.store(out, _normed(x, weight, eps, WIDTH), mask=inside)
    else:
        position = tl.load(positions_ptr + row)
        place = _place(row, tl.maximum(position - 1, 0), tables_ptr, sequences_ptr, table_stride)
        read = inside & (position > 0)
        x = tl.load(kept_ptr + place * WIDTH + column, mask=read, other=0.0).to(tl.float32)
        weight = tl.load(kept_weight_ptr + column, mask=inside, other=0.0)
        tl.store(out, _normed(x, weight, kept_eps, WIDTH), mask=inside)


@DirectLaunch
@triton.jit
def _before_kernel(
    kept_ptr, weight_ptr, out_ptr, positions_ptr, tables_ptr, sequences_ptr, table_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    position = tl.load(positions_ptr + row)
    place = _place(row, tl.maximum(position - 1, 0), tables_ptr, sequences_ptr, table_stride)
    x = tl.load(kept_ptr + place * WIDTH + column, mask=inside & (position > 0), other=0.0).to(tl.float32)
    if weight_ptr is not None:
        x = _normed(x, tl.load(weight_ptr + column, mask=inside, other=0.0), eps, WIDTH)
    tl.store(out_ptr + row.to(tl.int64) * WIDTH + column, x, mask=inside)


def keep_hidden(
    batch: ForwardBatch,
    x: torch.Tensor,
    norm: RMSNorm | None,
    kept: torch.Tensor,
    sequences: torch.Tensor | None,
    newest: bool = False,
    pdl: bool = False,
) -> None:
    """Stores `norm` of x fp32 [T, K], or x itself, to kept [rows, K] at the step's positions; with `newest`, only each
    sequence's last row. sequences: int32 [T], the sequence of each of a prompt's rows; None: each row has its own block
    table."""
    rows, width = x.shape
    tables = batch.block_tables_of(0)
    assert x.stride(1) == 1 and kept.is_contiguous() and kept.shape[1] == width
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    _keep_kernel[(rows,)](
        x, weight, kept, batch.positions, tables, sequences, rows, x.stride(0),
        tables.stride(0), eps, WIDTH=width, NEWEST=newest, PDL=pdl, launch_pdl=pdl, **_geometry(width),
    )  # fmt: skip


def hidden_before(
    batch: ForwardBatch,
    kept: torch.Tensor,
    norm: RMSNorm | None,
    sequences: torch.Tensor | None,
    pdl: bool = False,
) -> torch.Tensor:
    """For each row of the step, the kept row of the position before it, or `norm` of that: fp32 [T, K]; zeros at
    position 0. Other parameters: see `keep_hidden`."""
    rows, width = len(batch), kept.shape[1]
    tables = batch.block_tables_of(0)
    assert kept.is_contiguous()
    out = torch.empty(rows, width, dtype=torch.float32, device=kept.device)
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    _before_kernel[(rows,)](
        kept, weight, out, batch.positions, tables, sequences, tables.stride(0), eps,
        WIDTH=width, PDL=pdl, launch_pdl=pdl, **_geometry(width),
    )  # fmt: skip
    return out


def joined(
    batch: ForwardBatch,
    x: torch.Tensor,
    norm: RMSNorm,
    kept: torch.Tensor,
    kept_norm: RMSNorm,
    sequences: torch.Tensor | None,
    pdl: bool = False,
) -> torch.Tensor:
    """[norm(x) | kept_norm(the kept row of the position before)]: fp32 [T, 2K], from x fp32 [T, K]. Other
    parameters: see `keep_hidden`."""
    rows, width = x.shape
    tables = batch.block_tables_of(0)
    assert x.stride(1) == 1 and kept.is_contiguous() and kept.shape[1] == width
    out = torch.empty(rows, 2 * width, dtype=torch.float32, device=x.device)
    _join_kernel[(rows, 2)](
        x, norm.weight, kept, kept_norm.weight, out, batch.positions, tables, sequences, x.stride(0),
        tables.stride(0), norm.eps, kept_norm.eps, WIDTH=width, PDL=pdl, launch_pdl=pdl, **_geometry(width),
    )  # fmt: skip
    return out


def _geometry(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(32, max(1, block // 256))}
