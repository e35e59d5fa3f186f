"""Changes by LoRA adapters on CUDA, defined in kernels/lora/low_rank.py: a launch for A x, and one for B of it.

    to_rank    s[split, t, (p, m, r)] = sum over a share of K of a[p, m, r, k] x[t, k]
    from_rank  y[t, n] += sum over m of scale[m, t] sum over r of b[n, m, r] (sum over splits of s[split, t, (p, m, r)])

A program takes some rows, and passes over adapters that none of these has, so that a step reads the matrices of the
adapters that its rows have, whichever. The scales are read when the kernels run: a captured step serves any mix.
Products are three of tf32 (fp32 within some 2^-22), sums are fp32, in an order fixed by the shapes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, operand_offset
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.cuda.row_forms import FP16, QUANTIZED, form_of
from quengine.kernels.cuda.weights.layout import TILE_ROWS
from quengine.kernels.cuda.weights.row_change import LAUNCH_KINDS, RowChange
from quengine.kernels.lora.low_rank import RANKS_AT_ONCE, Changes

_RANKS = tl.constexpr(RANKS_AT_ONCE)
_COLUMNS = 64
"""Columns of x that a program of `to_rank` takes at a time."""
_LEAST_COLUMNS = 256
"""Columns of x that a split has, at least."""
_OUTPUTS = 64
"""Columns of y of a program of `from_rank`."""
_MANY_ROWS = 64
"""Steps of more rows have programs of more rows."""
_MOST_SPLITS = 32
_FIXED_SPLITS = 4
"""Splits where a row's bits are not to depend on the number of rows."""


@dataclass(frozen=True)
class CudaChanges(Changes):
    """The changes on a device. tiles: int32 [tiles, 3], of each tile of rows of b its matrix, its first row and the
    row after its matrix's last. matrices, words, launches: see RowChange."""

    tiles: Tensor
    matrices: Tensor
    words: Tensor
    launches: Tensor

    @classmethod
    def of(cls, changes: Changes, device: torch.device) -> "CudaChanges":
        placed = changes.to(_exact_dtype(changes), device)
        tiles, first = list[tuple[int, int, int]](), 0
        for part, rows in enumerate(changes.parts):
            end = first + rows
            tiles += [(part, row, end) for row in range(first, end, _OUTPUTS)]
            first = end
        made = torch.tensor(tiles, dtype=torch.int32).to(device)
        which = torch.repeat_interleave(torch.arange(len(changes.parts)), torch.tensor(changes.parts))
        matrices, adapters, rank, _ = changes.a.shape
        ranks = matrices * adapters * rank
        programs = ranks + sum(-(-rows // TILE_ROWS) for rows in changes.parts) + 1
        return cls(
            placed.parts,
            placed.a.contiguous(),
            placed.b.contiguous(),
            made,
            which.to(device, torch.int8),
            torch.zeros(ranks, dtype=torch.int64, device=device),
            torch.zeros(LAUNCH_KINDS, programs, dtype=torch.int32, device=device),
        )

    def of_row(self, scales: Tensor) -> RowChange:
        """For one row, with scales [M, 1] of the adapters."""
        return RowChange(self.a, self.b, self.matrices, scales, self.words, self.launches)


def _exact_dtype(changes: Changes) -> torch.dtype:
    """The smallest type that holds the values as they are: most files have 16 bits of each."""
    if changes.a.is_meta:
        return changes.a.dtype
    for dtype in (torch.float16, torch.bfloat16):
        if all(torch.equal(values.to(dtype).to(values.dtype), values) for values in (changes.a, changes.b)):
            return dtype
    return torch.float32


def _block(rows: int) -> int:
    """Rows of a program."""
    return 16 if rows <= _MANY_ROWS else 64


@triton.jit
def _load_rows(
    x_ptr, low_ptr, scale_ptr, row, k, stride, inside, K: tl.constexpr, KIND: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """Values [T, K] of rows [T, 1] at columns [1, K], fp32, in one of the forms of row_forms.py."""
    if KIND == QUANTIZED:
        at = row * K + k
        high = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
        low = tl.load(low_ptr + at, mask=inside, other=0).to(tl.float32)
        scale = tl.load(scale_ptr + row * (K // 32) + k // 32, mask=inside, other=0.0)
        x = (high * 256.0 + low) * scale
    elif KIND == FP16:
        values = tl.load(x_ptr + operand_offset(row, k, stride, LAYOUT), mask=inside, other=0.0)
        x = values.to(tl.float32) * tl.load(scale_ptr + row, mask=inside, other=0.0)
    else:
        x = tl.load(x_ptr + row * stride + k, mask=inside, other=0.0)
    return x


@DirectLaunch
@triton.jit
def _to_rank_kernel(
    x_ptr, low_ptr, x_scale_ptr, squares_ptr, a_ptr, scales_ptr, out_ptr, rows, stride, share, eps,
    K: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    LAYOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTIALS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """WIDTH: ranks of all matrices and adapters together. share: columns of x of a split. squares_ptr: sums of squares
    of PARTIALS pieces of each row, whose norm is still to be finished; None: it is finished."""
    wait_then_launch(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = tl.program_id(1) * _RANKS
    adapter = first // RANK % ADAPTERS
    scale = tl.load(scales_ptr + adapter * rows + row, mask=row < rows, other=0.0)
    if tl.max(tl.abs(scale), 0) > 0.0:
        rank = first + tl.arange(0, _RANKS)
        begin = tl.program_id(2) * share
        total = tl.zeros([ROWS, _RANKS], tl.float32)
        for at in range(begin, tl.minimum(begin + share, K), COLUMNS):
            k = at + tl.arange(0, COLUMNS)
            inside = (row < rows)[:, None] & (k < K)[None, :]
            x = _load_rows(
                x_ptr, low_ptr, x_scale_ptr, row[:, None], k[None, :], stride, inside, K, KIND, LAYOUT
            )
            a = tl.load(a_ptr + rank[None, :] * K + k[:, None], mask=(k < K)[:, None], other=0.0)
            total = tl.dot(x, a.to(tl.float32), total, input_precision="tf32x3")
        if squares_ptr is not None:
            piece = tl.arange(0, triton.next_power_of_2(PARTIALS))
            there = (row < rows)[:, None] & (piece < PARTIALS)[None, :]
            squares = tl.load(squares_ptr + row[:, None] * PARTIALS + piece[None, :], mask=there, other=0.0)
            total *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        place = (tl.program_id(2) * rows + row) * WIDTH
        tl.store(out_ptr + place[:, None] + rank[None, :], total, mask=(row < rows)[:, None])


@DirectLaunch
@triton.jit
def _from_rank_kernel(
    y_ptr, shrunk_ptr, b_ptr, scales_ptr, tiles_ptr, rows, width,
    ADAPTERS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """width: columns of y."""
    wait_then_launch(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    tile = tiles_ptr + tl.program_id(1) * 3
    part = tl.load(tile)
    n = tl.load(tile + 1) + tl.arange(0, OUTPUTS)
    present = n < tl.load(tile + 2)
    there = row < rows
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    used = 0
    for adapter in range(ADAPTERS):
        scale = tl.load(scales_ptr + adapter * rows + row, mask=there, other=0.0)
        if tl.max(tl.abs(scale), 0) > 0.0:
            used += 1
            for first in range(0, RANK, _RANKS):
                rank = first + tl.arange(0, _RANKS)
                at = row[:, None] * WIDTH + (part * ADAPTERS + adapter) * RANK + rank[None, :]
                split = tl.arange(0, triton.next_power_of_2(SPLITS))[:, None, None]
                summed = (split < SPLITS) & there[None, :, None]
                parts = tl.load(shrunk_ptr + split * rows * WIDTH + at[None, :, :], mask=summed, other=0.0)
                s = tl.sum(parts, 0) * scale[:, None]
                place = n[None, :].to(tl.int64) * (ADAPTERS * RANK) + adapter * RANK + rank[:, None]
                b = tl.load(b_ptr + place, mask=present[None, :], other=0.0)
                total = tl.dot(s, b.to(tl.float32), total, input_precision="tf32x3")
    if used > 0:
        at = y_ptr + row[:, None] * width + n[None, :]
        inside = there[:, None] & present[None, :]
        tl.store(at, tl.load(at, mask=inside, other=0.0) + total, mask=inside)


def to_rank(
    x: Tensor | QuantizedActivations | Fp16Operand,
    changes: CudaChanges,
    scales: Tensor,
    fixed_splits: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Partial sums of A x, fp32 [splits, T, P * M * R], of rows x [T, K]: fp32 with unit inner stride, or another form.
    What belongs to an adapter that none of a program's rows has is not written.

    scales: fp32 [M, T], contiguous. fixed_splits: a row's bits do not depend on T.
    """
    parts, adapters, rank, cols = changes.a.shape
    rows, ranks = scales.shape[1], parts * adapters * rank
    assert scales.shape[0] == adapters and scales.is_contiguous() and scales.dtype == torch.float32
    rms = x.rms if isinstance(x, QuantizedActivations) else None
    squares, eps = (None, 0.0) if rms is None else (rms.squares, rms.eps)
    assert squares is None or squares.is_contiguous()
    form = form_of(x, rows, cols)
    block = _block(rows)
    tiles = triton.cdiv(rows, block)
    most = max(1, min(_MOST_SPLITS, cols // _LEAST_COLUMNS))
    splits = min(most, _FIXED_SPLITS) if fixed_splits else max(1, min(most, 64 // tiles))
    share = triton.cdiv(triton.cdiv(cols, splits), _COLUMNS) * _COLUMNS
    splits = triton.cdiv(cols, share)
    out = torch.empty(splits, rows, ranks, dtype=torch.float32, device=scales.device)
    values, low, scale, _ = form.planes
    _to_rank_kernel[(tiles, ranks // RANKS_AT_ONCE, splits)](
        values, low, scale, squares, changes.a, scales, out, rows, form.stride, share, eps,
        K=cols, ADAPTERS=adapters, RANK=rank, WIDTH=ranks, KIND=form.kind, LAYOUT=form.layout,
        ROWS=block, COLUMNS=_COLUMNS, PARTIALS=1 if squares is None else squares.shape[1],
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def from_rank(y: Tensor, shrunk: Tensor, changes: CudaChanges, scales: Tensor, pdl: bool = False) -> Tensor:
    """y fp32 [T, N], contiguous, plus the scaled B of the partial sums of `to_rank`, in place."""
    adapters, rank = changes.b.shape[1:]
    rows, width = y.shape
    assert y.is_contiguous() and y.dtype == torch.float32 and rows == scales.shape[1]
    block = _block(rows)
    _from_rank_kernel[(triton.cdiv(rows, block), len(changes.tiles))](
        y, shrunk, changes.b, scales, changes.tiles, rows, width,
        ADAPTERS=adapters, RANK=rank, WIDTH=shrunk.shape[2], SPLITS=len(shrunk), ROWS=block, OUTPUTS=_OUTPUTS,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return y
