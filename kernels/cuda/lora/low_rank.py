"""Adds the changes of LoRA adapters (kernels/lora/low_rank.py) to the product of several rows, in one CUDA launch.
It serves any number of rows on any GPU; few rows on Hopper take rank_matmul.py.

Its first programs compute A x, each for some rows, ranks and columns. Of the programs that share rows and ranks, the
last to finish adds up the sums of all their columns:

    s[t, (p, m, r)] = sum over k of a[p, m, r, k] x[t, k]

The other programs wait until all of s has arrived, and add B s to the product, or to gate and up before their
activation:

    y[t, n] += sum over m of scale[m, t] sum over r of b[n, m, r] s[t, (p, m, r)]

After a matmul that lets it start early, the launch runs beside the matmul, and waits for its end only before it reads
y. It reads x and the scales ahead of that wait, and bypasses the multiprocessor's L1 for them. A program skips adapters
that none of its rows has, so that a step reads only the matrices of adapters in use. The scales are read when the
kernel runs: a captured step serves any mix of adapters. Products are exact where both factors are fp16; else each takes
three tf32 products (fp32 within some 2^-22). Sums are fp32, in an order fixed by the shapes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import (
    OPERAND_COLUMNS,
    Fp16Operand,
    operand_columns,
    places_offset,
)
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.glu import EPILOGUES, RESIDUAL, gated
from quengine.kernels.cuda.launch.gpu import is_hopper
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.lora.rank_words import rank_rows, rank_words
from quengine.kernels.cuda.row_forms import FP16, QUANTIZED, form_of
from quengine.kernels.cuda.weights.layout import TILE_ROWS
from quengine.kernels.cuda.weights.row_change import LAUNCH_KINDS, RowChange
from quengine.kernels.glu import Gating
from quengine.kernels.lora.low_rank import RANKS_AT_ONCE, Changes, exact_dtype

_RANKS = tl.constexpr(RANKS_AT_ONCE)
_COLUMNS = 64
"""Columns of x that a program of A takes at a time."""
_LEAST_COLUMNS = 256
"""Columns of x that a split has, at least."""
OUTPUTS = 64
"""Columns of y of a program of B."""
_MOST_ROWS = 64
"""Rows of a program."""
_MOST_SPLITS = 32
_FIXED_SPLITS, _FIXED_ROWS = 4, 16
"""Splits, and rows of a program, where a row's bits must not depend on the number of rows: for 64 rows of 16-bit
factors, another instruction (WGMMA) adds in another order."""
_PROGRAMS = 128
"""The most programs of A for one adapter that splitting the columns may make."""
_COUNTERS = 1 << 16
"""Counters that a scratch starts with: enough for 2,048 rows and 32,768 ranks."""
_SUMMED = tl.constexpr(8)
"""Splits whose sums are read at a time."""


@dataclass(frozen=True)
class CudaChanges(Changes):
    """The changes on a device. tiles: int32 [tiles, 3], for each tile of rows of b its matrix, its first row and the
    end of its matrix's rows. matrices, words, launches: see RowChange. words_of_a, rows_of_b: copies of the factors
    for Hopper's launches of several rows (rank_words.py), b only of a single matrix; else None. largest: max |b|.
    """

    tiles: Tensor
    matrices: Tensor
    words: Tensor
    launches: Tensor
    words_of_a: Tensor | None = None
    rows_of_b: Tensor | None = None
    largest: float = 0.0

    @classmethod
    def of(cls, changes: Changes, device: torch.device) -> "CudaChanges":
        placed = changes.to(exact_dtype(changes), device)
        tiles, first = list[tuple[int, int, int]](), 0
        for part, rows in enumerate(changes.parts):
            end = first + rows
            tiles += [(part, row, end) for row in range(first, end, OUTPUTS)]
            first = end
        made = torch.tensor(tiles, dtype=torch.int32).to(device)
        which = torch.repeat_interleave(torch.arange(len(changes.parts)), torch.tensor(changes.parts))
        matrices, adapters, rank, _ = changes.a.shape
        ranks = matrices * adapters * rank
        programs = ranks + sum(-(-rows // TILE_ROWS) for rows in changes.parts) + 1
        a, b = placed.a.contiguous(), placed.b.contiguous()
        takes = is_hopper(device) and a.dtype == torch.float16
        return cls(
            placed.parts,
            a,
            b,
            made,
            which.to(device, torch.int8),
            torch.zeros(ranks, dtype=torch.int64, device=device),
            torch.zeros(LAUNCH_KINDS, programs, dtype=torch.int32, device=device),
            rank_words(a.view(ranks, -1)) if takes else None,
            rank_rows(b.view(len(b), -1)) if takes and matrices == 1 else None,
            0.0 if b.is_meta else float(b.abs().max()),
        )

    def of_row(self, scales: Tensor) -> RowChange:
        """The changes of one row, with scales [M, 1] of the adapters."""
        return RowChange(self.a, self.b, self.matrices, scales, self.words, self.launches)


class LowRankScratch:
    """Sums, and counters of arrivals, reusable by every launch of one stream: each begins to write them when the one
    before it has ended. Counters are zero between launches."""

    def __init__(self, device: torch.device | str) -> None:
        self.arrivals = torch.zeros(2, dtype=torch.int32, device=device)
        self._counters = [torch.zeros(_COUNTERS, dtype=torch.int32, device=device)]
        self._sums = [torch.empty(0, dtype=torch.float32, device=device)]

    def take(self, sums: int, counters: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for `sums` fp32, `counters` counters of splits, and those of a launch. Smaller room stays allocated, as
        CUDA graphs keep its address."""
        device = self.arrivals.device
        if self._sums[-1].numel() < sums:
            self._sums.append(torch.empty(sums, dtype=torch.float32, device=device))
        if self._counters[-1].numel() < counters:
            self._counters.append(torch.zeros(counters, dtype=torch.int32, device=device))
        return self._sums[-1], self._counters[-1], self.arrivals

    @property
    def is_clear(self) -> bool:
        """Whether all counters are zero."""
        return not any(each.any() for each in (self.arrivals, *self._counters))


@triton.jit
def _load_rows(
    x_ptr, low_ptr, scale_ptr, row, place, stride, inside, K: tl.constexpr, KIND: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """Values [T, N] of rows [T, 1] at places [1, N] (`operand_columns`), in one of the forms of row_forms.py: fp32, or
    of an fp16 operand fp16 without the rows' scales."""
    if KIND == QUANTIZED:
        at = row * K + place
        high = tl.load(x_ptr + at, mask=inside, other=0, cache_modifier=".cg").to(tl.float32)
        low = tl.load(low_ptr + at, mask=inside, other=0, cache_modifier=".cg").to(tl.float32)
        scale = tl.load(scale_ptr + row * (K // 32) + place // 32, mask=inside, other=0.0)
        x = (high * 256.0 + low) * scale
    elif KIND == FP16:
        at = places_offset(row, place, stride, LAYOUT)
        x = tl.load(x_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        x = tl.load(x_ptr + row * stride + place, mask=inside, other=0.0, cache_modifier=".cg")
    return x


@triton.jit
def used_adapters(row, scales_ptr, rows, ADAPTERS: tl.constexpr):
    """The adapters that any of these rows has, as bits: that of an adapter is its number modulo 32."""
    AT_ONCE: tl.constexpr = min(32, triton.next_power_of_2(ADAPTERS))
    bits = 0
    for first in range(0, ADAPTERS, AT_ONCE):
        adapter = first + tl.arange(0, AT_ONCE)
        there = (adapter < ADAPTERS)[:, None] & (row < rows)[None, :]
        at = scales_ptr + adapter[:, None] * rows + row[None, :]
        most = tl.max(tl.abs(tl.load(at, mask=there, other=0.0, cache_modifier=".cg")), 1)
        bits |= tl.sum(tl.where(most > 0.0, 1 << tl.arange(0, AT_ONCE), 0), 0)
    return bits


@triton.jit
def _rows_to_rank(
    row, x_ptr, low_ptr, x_scale_ptr, squares_ptr, a_ptr, scales_ptr, sums_ptr, counter_ptr, arrivals_ptr, part, rows,
    stride, share, splits, eps,
    K: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    LAYOUT: tl.constexpr, COLUMNS: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """Stores the sums of 16 ranks, number `part` of ranks and splits, ranks innermost, and says that they are there:
    those of one split, and of the last one to finish those of all. squares_ptr: sums of squares of PARTIALS pieces of
    each row, whose norm is still to be finished; None: it is finished."""
    first = part % (WIDTH // _RANKS) * _RANKS
    split = part // (WIDTH // _RANKS)
    rank = first + tl.arange(0, _RANKS)
    here = (row < rows)[:, None]
    to = row[:, None] * WIDTH + rank[None, :]
    if (used_adapters(row, scales_ptr, rows, ADAPTERS) >> first // RANK % ADAPTERS % 32) & 1 != 0:
        begin = split * share
        total = tl.zeros([row.shape[0], _RANKS], tl.float32)
        for at in range(begin, tl.minimum(begin + share, (K + 127) // 128 * 128), COLUMNS):
            place = at + tl.arange(0, COLUMNS)
            column = operand_columns(place, LAYOUT)
            present = place < K if K % 128 == 0 else column < K
            x = _load_rows(
                x_ptr, low_ptr, x_scale_ptr, row[:, None], place[None, :], stride, here & present[None, :], K, KIND,
                LAYOUT,
            )  # fmt: skip
            a_at = rank[None, :].to(tl.int64) * K + column[:, None]
            a = tl.load(a_ptr + a_at, mask=present[:, None], other=0.0)
            if x.dtype == tl.float16 and a.dtype == tl.float16:
                total = tl.dot(x, a, total)
            else:
                total = tl.dot(x.to(tl.float32), a.to(tl.float32), total, input_precision="tf32x3")
        tl.store(sums_ptr + (1 + split) * rows * WIDTH + to, total, mask=here)
        tl.debug_barrier()  # all warps' stores come before the atomic that publishes them
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(counter_ptr, 0)
            total = tl.zeros([row.shape[0], _RANKS], tl.float32)
            for at in range(1, splits + 1, _SUMMED):
                for i in tl.static_range(_SUMMED):
                    # Other programs wrote these: bypass this multiprocessor's L1.
                    there = here & (at + i <= splits)
                    of_split = sums_ptr + (at + i) * rows * WIDTH
                    total += tl.load(of_split + to, mask=there, other=0.0, cache_modifier=".cg")
            if KIND == FP16:
                total *= tl.load(x_scale_ptr + row, mask=row < rows, other=0.0, cache_modifier=".cg")[:, None]
            if squares_ptr is not None:
                piece = tl.arange(0, triton.next_power_of_2(PARTIALS))
                there = here & (piece < PARTIALS)[None, :]
                squares = tl.load(
                    squares_ptr + row[:, None] * PARTIALS + piece[None, :], mask=there, other=0.0
                )
                total *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
            tl.store(sums_ptr + to, total, mask=here)
            tl.debug_barrier()
            tl.atomic_add(arrivals_ptr, 1, sem="release", scope="gpu")
    elif split == 0:
        tl.atomic_add(arrivals_ptr, 1, sem="release", scope="gpu")


@triton.jit
def _rows_from_rank(
    row, n, present, part, used, b_ptr, scales_ptr, sums_ptr, rows,
    ADAPTERS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What is added to columns n of these rows, where `present`, of matrix number `part`. used: of `used_adapters`."""
    there = row < rows
    total = tl.zeros([row.shape[0], n.shape[0]], tl.float32)
    for adapter in range(ADAPTERS):
        if (used >> adapter % 32) & 1 != 0:
            scale = tl.load(scales_ptr + adapter * rows + row, mask=there, other=0.0, cache_modifier=".cg")
            for first in range(0, RANK, _RANKS):
                rank = first + tl.arange(0, _RANKS)
                at = row[:, None] * WIDTH + (part * ADAPTERS + adapter) * RANK + rank[None, :]
                s = tl.load(sums_ptr + at, mask=there[:, None], other=0.0, cache_modifier=".cg")
                place = n[None, :].to(tl.int64) * (ADAPTERS * RANK) + adapter * RANK + rank[:, None]
                b = tl.load(b_ptr + place, mask=present[None, :], other=0.0)
                total = tl.dot(s * scale[:, None], b.to(tl.float32), total, input_precision="tf32x3")
    return total


@DirectLaunch
@triton.jit(do_not_specialize=["rows", "of_rank", "splits"])
def _low_rank_kernel(
    y_ptr, out_ptr, known_x_ptr, known_low_ptr, known_x_scale_ptr, known_squares_ptr, a_ptr, b_ptr, known_scales_ptr,
    tiles_ptr, own_sums_ptr, own_counters_ptr, own_arrivals_ptr, rows, of_rank, stride, share, splits, width, eps,
    K: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr,
    PARTIALS: tl.constexpr, EPILOGUE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs of A: (block of rows, ranks, split), `of_rank` of them; then those of B: (block of rows, tile). width:
    columns of y. WIDTH: ranks of all matrices and adapters together. EARLY: what `known_*` and `own_*` point at is left
    alone by the launch in front."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    blocks = tl.cdiv(rows, ROWS)
    program, groups = tl.program_id(0), blocks * (WIDTH // _RANKS)
    row = (program % blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    if program < of_rank:
        _rows_to_rank(
            row, known_x_ptr, known_low_ptr, known_x_scale_ptr, known_squares_ptr, a_ptr, known_scales_ptr,
            own_sums_ptr, own_counters_ptr + program % groups, own_arrivals_ptr, program // blocks, rows, stride, share,
            splits, eps, K, ADAPTERS, RANK, WIDTH, KIND, LAYOUT, COLUMNS, PARTIALS,
        )  # fmt: skip
        if PDL and EARLY:
            tl.extra.cuda.gdc_wait()
    else:
        row = ((program - of_rank) % blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        tile = tiles_ptr + (program - of_rank) // blocks * 3
        n = tl.load(tile + 1) + tl.arange(0, OUTPUTS)
        present = n < tl.load(tile + 2)
        used = used_adapters(row, known_scales_ptr, rows, ADAPTERS)
        arrived = tl.atomic_add(own_arrivals_ptr, 0, sem="acquire", scope="gpu")
        while arrived < groups:
            arrived = tl.atomic_add(own_arrivals_ptr, 0, sem="acquire", scope="gpu")
        inside = (row < rows)[:, None] & present[None, :]
        at = row[:, None] * width + n[None, :]
        if EPILOGUE == RESIDUAL:
            if used != 0:
                total = _rows_from_rank(
                    row, n, present, tl.load(tile), used, b_ptr, known_scales_ptr, own_sums_ptr, rows,
                    ADAPTERS, RANK, WIDTH,
                )  # fmt: skip
                if PDL and EARLY:
                    tl.extra.cuda.gdc_wait()
                tl.store(y_ptr + at, tl.load(y_ptr + at, mask=inside, other=0.0) + total, mask=inside)
            elif PDL and EARLY:
                tl.extra.cuda.gdc_wait()
        else:
            gate = _rows_from_rank(
                row, n, present, 0, used, b_ptr, known_scales_ptr, own_sums_ptr, rows, ADAPTERS, RANK, WIDTH
            )
            up = _rows_from_rank(
                row, n + width // 2, present, 1, used, b_ptr, known_scales_ptr, own_sums_ptr, rows,
                ADAPTERS, RANK, WIDTH,
            )  # fmt: skip
            if PDL and EARLY:
                tl.extra.cuda.gdc_wait()
            gate += tl.load(y_ptr + at, mask=inside, other=0.0)
            up += tl.load(y_ptr + width // 2 + at, mask=inside, other=0.0)
            to = out_ptr + row[:, None] * (width // 2) + n[None, :]
            tl.store(to, gated(gate, up, EPILOGUE), mask=inside)
        tl.debug_barrier()
        others = tl.num_programs(0) - of_rank - 1
        if tl.atomic_add(own_arrivals_ptr + 1, 1, sem="acq_rel", scope="gpu") == others:
            tl.store(own_arrivals_ptr, 0)
            tl.store(own_arrivals_ptr + 1, 0)


def add_low_rank(
    y: Tensor,
    x: Tensor | QuantizedActivations | Fp16Operand,
    changes: CudaChanges,
    scales: Tensor,
    scratch: LowRankScratch,
    *,
    activation: Gating | None = None,
    fixed_splits: bool = False,
    early: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Adds the changes of rows x [T, K] to y fp32 [T, N], contiguous, in place, and returns y. With an activation, y is
    [T, 2F], and the result is a new tensor, activation(gate) * up of the sum, [T, F].

    x: fp32 with unit inner stride, or another form. scales: fp32 [M, T], contiguous. fixed_splits: a row's bits do not
    depend on T. early: the previous launch let this one start once x and the scales were written, and writes neither.
    """
    parts, adapters, rank, cols = changes.a.shape
    (rows, width), ranks = y.shape, parts * adapters * rank
    assert scales.shape == (adapters, rows) and scales.is_contiguous() and scales.dtype == torch.float32
    assert y.is_contiguous() and y.dtype == torch.float32 and sum(changes.parts) == width
    assert activation is None or (parts == 2 and changes.parts[0] == changes.parts[1])
    rms = x.rms if isinstance(x, QuantizedActivations) else None
    squares, eps = (None, 0.0) if rms is None else (rms.squares, rms.eps)
    assert squares is None or squares.is_contiguous()
    form = form_of(x, rows, cols)
    block = _FIXED_ROWS if fixed_splits else min(_MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    blocks, groups = triton.cdiv(rows, block), ranks // RANKS_AT_ONCE
    share, splits = _shares(blocks * groups // adapters, cols, fixed_splits)
    of_rank = blocks * groups * splits
    tiles = len(changes.tiles) if activation is None else len(changes.tiles) // 2
    values, low, scale, _ = form.planes
    out = y if activation is None else torch.empty(rows, width // 2, dtype=torch.float32, device=y.device)
    _low_rank_kernel[(of_rank + blocks * tiles,)](
        y, out, values, low, scale, squares, changes.a, changes.b, scales, changes.tiles,
        *scratch.take((1 + splits) * rows * ranks, blocks * groups), rows, of_rank, form.stride, share, splits, width,
        eps, K=cols, ADAPTERS=adapters, RANK=rank, WIDTH=ranks, KIND=form.kind, LAYOUT=form.layout,
        ROWS=block, COLUMNS=_COLUMNS if form.kind == FP16.value else _COLUMNS // 2, OUTPUTS=OUTPUTS,
        PARTIALS=1 if squares is None else squares.shape[1],
        EPILOGUE=RESIDUAL.value if activation is None else EPILOGUES[activation], EARLY=early, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _shares(groups: int, cols: int, fixed: bool) -> tuple[int, int]:
    """The columns of a split, and the number of splits, for `groups` groups of rows and ranks of one adapter."""
    splits = _FIXED_SPLITS if fixed else min(_MOST_SPLITS, _PROGRAMS // groups)
    splits = max(1, min(splits, cols // _LEAST_COLUMNS))
    share = triton.cdiv(triton.cdiv(cols, splits), OPERAND_COLUMNS) * OPERAND_COLUMNS
    return share, triton.cdiv(cols, share)
