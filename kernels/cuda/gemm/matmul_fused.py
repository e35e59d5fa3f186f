"""Matmul of 2 to 127 rows with packed weights, on GPUs without warp-group matrix instructions.

Weights are read packed, in the order of the matrix instruction (m16n8k16) in which they are stored, and dequantized to
fp16 in registers. Rows are in the MMA layout (fp16_operand.py), so that a lane's operand of one step is one 16-byte
load, which the warps of a program share through the L1 cache. A warp takes several tiles of weights, so that one such
load feeds several products. The columns of a tile are split over warps and, where there are few tiles, over programs
(split-K): the last program to arrive adds up the partial sums in the order of the columns.

The order of a sum follows from the weight's shape and from the launch geometry, whose column splits (`k_warps`,
`splits`) may depend on the number of rows (launch_table.py): a row's result does not depend on the other rows' values,
only on their number, and, in batch-invariant mode, not on that either.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemm.fragments import (
    LANE_COLUMNS,
    chunk_scales,
    load_chunk,
    step_codes,
    step_column,
)
from quengine.kernels.cuda.gemm.mma import (
    SUBNORMALS,
    mma_half_step,
    scale_bytes,
    scale_bytes_once,
    uses_assembly,
)
from quengine.kernels.cuda.glu import BIAS, EPILOGUES, RESIDUAL, SILU, epilogue_adding, gated
from quengine.kernels.cuda.weights.launch_table import fused_geometry
from quengine.kernels.cuda.weights.layout import PackedLayout
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.glu import Activation


class MatmulMode(NamedTuple):
    """How a matmul is launched.

    exact: weights are rounded to fp16 once, without rounding their scales and minimums first. batch_invariant: exact,
    with an order of sums that does not depend on the number of rows. pdl: start before the previous launch has ended
    (sm_90 and later); that launch must not write the weights.
    """

    exact: bool = False
    batch_invariant: bool = False
    pdl: bool = False


@dataclass(frozen=True)
class FusedProgram:
    """The kernel's compile-time constants. A program multiplies `n_warps` * `tiles` tiles of a weight of `cols`
    columns, each shared by `k_warps` warps, by 8 * `token_tiles` rows of x. splits, ahead: see
    geometry.FusedGeometry. epilogue: see glu.py.
    """

    layout: PackedLayout
    cols: int
    token_tiles: int
    tiles: int
    n_warps: int
    k_warps: int
    splits: int
    ahead: bool
    paired: bool
    epilogue: int
    exact: bool
    pdl: bool
    asm: bool

    @property
    def chunks(self) -> int:
        return -(-self.cols // self.layout.chunk)

    @property
    def split_chunks(self) -> int:
        return -(-self.chunks // self.splits)

    @property
    def rounds(self) -> int:
        """Chunks per warp."""
        return -(-self.split_chunks // self.k_warps)

    @property
    def padded(self) -> int:
        """Columns of x in memory."""
        return -(-self.cols // 128) * 128

    @property
    def signed(self) -> bool:
        return self.layout.signed


class Output(NamedTuple):
    """Output pointers, rows of the weight, first output column, row stride, rows of x, scale of the weights."""

    row_scale_ptr: Any
    residual_ptr: Any
    ptr: Any
    weight_rows: Any
    first: Any
    stride: Any
    rows: Any
    weight_scale: Any


@triton.jit
def _step_rows(x_at, column, step: tl.constexpr, P: tl.constexpr):
    """This lane's 8 columns of a step, for its row of every token tile: two int64 of four fp16 each.

    Zeros past the last column: the weights there are zero too, but values in memory may not be finite.
    """
    TOKEN_TILES: tl.constexpr = P.token_tiles
    words = ()
    for n in tl.static_range(TOKEN_TILES):
        # In units of 4 columns of a row: a step of a token tile has 8 columns of 8 rows for each lane of a quad.
        at = x_at + (step * 64 + n * P.padded * 2)
        if P.cols % P.layout.chunk == 0:
            both = tl.load(at)
        else:
            fits = column < P.cols - step_column(step)
            both = tl.load(at, mask=fits[:, None], other=0)
        words = words + (tl.split(both),)
    return words


@triton.jit
def _scaled(codes, scale, minimum, P: tl.constexpr):
    if P.exact:
        low, high = scale_bytes_once(codes, scale, minimum, P.signed, P.asm)
    else:
        low, high = scale_bytes(codes, scale, minimum, P.signed, P.asm)
    return low, high


@triton.jit
def _step_operands(codes, scales, P: tl.constexpr):
    """The fp16 A operands of both products of a step, from the results of `step_codes` and `chunk_scales`."""
    a0, a2 = _scaled(codes[0], scales[0], scales[1], P)
    a1, a3 = _scaled(codes[1], scales[2], scales[3], P)
    b0, b2 = _scaled(codes[2], scales[0], scales[1], P)
    b1, b3 = _scaled(codes[3], scales[2], scales[3], P)
    return (a0, a1, a2, a3), (b0, b1, b2, b3)


@triton.jit
def _four(acc, i: tl.constexpr):
    return (acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3])


@triton.jit
def _join_pairs(values, COUNT: tl.constexpr):
    """Joins each of the first COUNT / 2 tensors with the one COUNT / 2 further on."""
    pairs = ()
    for i in tl.static_range(COUNT // 2):
        pairs = pairs + (tl.join(values[i], values[i + COUNT // 2]),)
    return pairs


@triton.jit
def _multiply_chunk(acc, words, x_at, column, weight_scale, P: tl.constexpr):
    """acc + a chunk of P.tiles tiles of weights times P.token_tiles tiles of rows.

    acc: four tensors per (tile, token tile), tiles outermost. words: the chunk of each tile. x_at: this lane's columns
    of the chunk's first step, [thread, 2]. Rows are loaded one step ahead.
    """
    FMT: tl.constexpr = P.layout
    SETS: tl.constexpr = P.layout.sets
    STEPS: tl.constexpr = P.layout.steps_per_set
    TILES: tl.constexpr = P.tiles
    TOKEN_TILES: tl.constexpr = P.token_tiles
    x = _step_rows(x_at, column, 0, P)
    for s in tl.static_range(SETS):
        scales = ()
        for w in tl.static_range(TILES):
            scales = scales + (chunk_scales(words[w], s, weight_scale, FMT, SUBNORMALS if P.exact else 1.0),)
        for j in tl.static_range(STEPS):
            x_now = x
            if s * STEPS + j + 1 < SETS * STEPS:
                x = _step_rows(x_at, column, s * STEPS + j + 1, P)
            result = ()
            for w in tl.static_range(TILES):
                codes = step_codes(words[w], s * STEPS + j, FMT, P.asm)
                first, last = _step_operands(codes, scales[w], P)
                for n in tl.static_range(TOKEN_TILES):
                    d = mma_half_step(
                        first, last, x_now[n][0], x_now[n][1], _four(acc, w * TOKEN_TILES + n), P.asm
                    )  # fmt: skip
                    result = result + (d[0], d[1], d[2], d[3])
            acc = result
    return acc


@triton.jit
def _load_tiles(planes, chunk, tile, tiles, inside, lane, P: tl.constexpr):
    """Starts loading chunk number `chunk` of the matrix, and the same chunk of the next P.tiles - 1 tiles."""
    FMT: tl.constexpr = P.layout
    TILES: tl.constexpr = P.tiles
    words = ()
    for w in tl.static_range(TILES):
        valid = inside & (tile < tiles - w)
        words = words + (load_chunk(planes, chunk, w * P.chunks, lane, valid, FMT, True),)
    return words


@triton.jit
def add_warps(acc, w: tl.constexpr, P: tl.constexpr):
    """Adds the sums of tile w of each warp over the warps that share its columns: fp32 [n_warps, r, q, token
    tile, rh, column], weight row 8*rh + r of the tile, row 8*(token tile) + 2*q + column of x.
    """
    COUNT: tl.constexpr = 4 * P.token_tiles
    values = ()
    for i in tl.static_range(COUNT):
        values = values + (acc[COUNT * w + i],)
    # Joining halves adds the most significant bit of the place first, so values end up in order.
    for level in tl.static_range(6):
        if 2 << level <= COUNT:
            values = _join_pairs(values, COUNT >> level)
    return tl.sum(tl.reshape(values[0], [P.n_warps, P.k_warps, 8, 4, P.token_tiles, 2, 2]), axis=1)


@triton.jit
def _store(y, w: tl.constexpr, tile0, token0, output, P: tl.constexpr):
    """Scales and stores the result of `add_warps` for tile w of each warp."""
    rows = output.weight_rows
    tile = tile0 + tl.arange(0, P.n_warps)[:, None, None, None, None, None] * P.tiles + w
    r = tl.arange(0, 8)[None, :, None, None, None, None]
    q = tl.arange(0, 4)[None, None, :, None, None, None]
    n = tl.arange(0, P.token_tiles)[None, None, None, :, None, None]
    rh = tl.arange(0, 2)[None, None, None, None, :, None]
    token = token0 + n * 8 + q * 2 + tl.arange(0, 2)[None, None, None, None, None, :]
    y *= tl.load(output.row_scale_ptr + token, mask=token < output.rows, other=0.0) / output.weight_scale
    if P.epilogue >= SILU:
        gate, up = tl.split(tl.permute(y, [0, 1, 2, 3, 5, 4]))
        out = gated(gate, up, P.epilogue)
        one_token = token0 + (
            tl.arange(0, P.token_tiles)[None, None, None, :, None] * 8
            + tl.arange(0, 4)[None, None, :, None, None] * 2
            + tl.arange(0, 2)[None, None, None, None, :]
        )
        column = (tile0 + tl.arange(0, P.n_warps)[:, None, None, None, None] * P.tiles + w) * 8 + (
            tl.arange(0, 8)[None, :, None, None, None]
        )
        inside = (column < rows // 2) & (one_token < output.rows)
        tl.store(output.ptr + one_token.to(tl.int64) * (rows // 2) + column, out, mask=inside)
    else:
        if P.paired:
            column = tile * 8 + r
            inside = (column < rows // 2) & (token < output.rows)
            column = column + rh * (rows // 2)
        else:
            column = tile * 16 + rh * 8 + r
            inside = (column < rows) & (token < output.rows)
        at = token.to(tl.int64) * output.stride + output.first + column
        if P.epilogue == RESIDUAL:
            y += tl.load(output.residual_ptr + at, mask=inside, other=0.0)
        elif P.epilogue == BIAS:
            y += tl.load(output.residual_ptr + (output.first + column), mask=column < rows, other=0.0)
        tl.store(output.ptr + at, y, mask=inside)


@triton.jit
def accumulate(planes, x_ptr, tile, tiles, lane, warp, weight_scale, P: tl.constexpr, token_block=None):
    """This program's sums, as `_multiply_chunk` returns them; weights are read before the previous launch has ended.

    token_block: index of the block of rows; by default the program's index along the first axis.
    """
    first_chunk = tl.program_id(2) * P.split_chunks
    end = tl.minimum(first_chunk + P.split_chunks, P.chunks)
    c = first_chunk + warp % P.k_warps
    if P.ahead:
        words = _load_tiles(planes, tile * P.chunks + c, tile, tiles, c < end, lane, P)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    if token_block is None:
        token0 = tl.program_id(0) * (8 * P.token_tiles)
    else:
        token0 = token_block * (8 * P.token_tiles)
    x_base = x_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + token0 * (P.padded // 4)
    x_place = (lane * 2)[:, None] + tl.arange(0, 2)[None, :]
    COUNT: tl.constexpr = 4 * P.tiles * P.token_tiles
    acc = ()
    for i in tl.static_range(COUNT):
        acc = acc + ((lane & 0).to(tl.float32),)
    for i in range(P.rounds):
        if P.ahead:
            now = words
            ahead = c + P.k_warps
            words = _load_tiles(planes, tile * P.chunks + ahead, tile, tiles, ahead < end, lane, P)
        else:
            now = _load_tiles(planes, tile * P.chunks + c, tile, tiles, c < end, lane, P)
        # Past the edge codes and scales are zero, but the rows read there must exist.
        inside = tl.minimum(c, P.chunks - 1)
        x_at = x_base + ((inside * (P.layout.chunk * 2))[:, None] + x_place)
        column = inside * P.layout.chunk + (lane & 3) * LANE_COLUMNS
        acc = _multiply_chunk(acc, now, x_at, column, weight_scale, P)
        c += P.k_warps
    return acc, token0


@triton.jit(do_not_specialize=["T"])  # any number of rows runs the same code
def _fused_kernel(
    low, high, scales, supers, x_ptr, row_scale_ptr, residual_ptr, out_ptr, partial_ptr, arrivals_ptr,
    tiles, rows, first, N, T, weight_scale, P: tl.constexpr,
):  # fmt: skip
    """Grid: (token blocks, tile blocks, splits of the columns)."""
    TILES: tl.constexpr = P.tiles
    if P.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    thread = tl.arange(0, 32 * P.n_warps * P.k_warps)
    lane = thread & 31
    tile0 = tl.program_id(1) * (P.n_warps * TILES)
    tile = tile0 + (thread >> 5) // P.k_warps * TILES
    planes = (low, high, scales, supers)
    acc, token0 = accumulate(planes, x_ptr, tile, tiles, lane, thread >> 5, weight_scale, P)
    output = Output(row_scale_ptr, residual_ptr, out_ptr, rows, first, N, T, weight_scale)
    if P.splits == 1:
        for w in tl.static_range(TILES):
            _store(add_warps(acc, w, P), w, tile0, token0, output, P)
    else:
        # Partial sums are stored in thread order, one block for each (split, tile block, token block, w).
        SIZE: tl.constexpr = P.n_warps * P.token_tiles * 128
        SPLITS: tl.constexpr = P.splits
        block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        blocks = tl.num_programs(0) * tl.num_programs(1)
        spread = tl.reshape(tl.arange(0, SIZE), [P.n_warps, 8, 4, P.token_tiles, 2, 2])
        mine = (tl.program_id(2) * blocks + block).to(tl.int64) * (SIZE * TILES)
        for w in tl.static_range(TILES):
            y = add_warps(acc, w, P)
            tl.store(partial_ptr + mine + w * SIZE + spread, y)
        tl.debug_barrier()  # all warps' stores come before the atomic that publishes them
        arrived = tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            for v in tl.static_range(TILES):
                at = partial_ptr + block.to(tl.int64) * (SIZE * TILES) + v * SIZE + spread
                # Other programs wrote these: bypass this multiprocessor's L1.
                total = tl.load(at, cache_modifier=".cg")
                for split in tl.static_range(1, SPLITS):
                    total += tl.load(at + split * (SIZE * TILES) * blocks.to(tl.int64), cache_modifier=".cg")
                _store(total, v, tile0, token0, output, P)
            tl.store(arrivals_ptr + block, 0)


_MOST_ARRIVALS = 4096


class SplitScratch:
    """Scratch for the partial sums of split-K programs, reusable by every launch of one stream, and an int32
    arrival counter for each block of results. Counters are zero between launches.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.arrivals = torch.zeros(_MOST_ARRIVALS, dtype=torch.int32, device=device)
        self._partials = [torch.empty(0, dtype=torch.float32, device=device)]

    def take(self, size: int, blocks: int) -> tuple[Tensor, Tensor]:
        """Scratch of `size` fp32, and the counters of `blocks` blocks. Smaller scratch stays allocated when
        it grows, as CUDA graphs keep its address.
        """
        assert size == 0 or blocks <= _MOST_ARRIVALS
        if self._partials[-1].numel() < size:
            self._partials.append(torch.empty(size, dtype=torch.float32, device=self.arrivals.device))
        return self._partials[-1], self.arrivals


def launch_fused(
    x: Fp16Operand,
    part: PackedPart,
    paired: bool,
    out: Tensor,
    first: int,
    scratch: SplitScratch,
    mode: MatmulMode,
    residual: Tensor | None = None,
    activation: Activation | None = None,
) -> None:
    """Stores rows x, in the MMA layout, times a packed part to the columns of out fp32 [T, N] from `first` on, plus
    the same columns of `residual`, [T, N] or a bias [N]. With an activation, for a paired part, it stores
    activation(gate) * up to out [T, N / 2] instead.
    """
    geometry = fused_geometry(part, "swiglu" if activation else "rows", x.rows, mode.batch_invariant)
    block_tiles = geometry.tiles * geometry.n_warps
    grid = (
        -(-x.rows // (8 * geometry.token_tiles)), -(-part.tiles // block_tiles), geometry.splits
    )  # fmt: skip
    blocks = grid[0] * grid[1]
    size = 0 if geometry.splits == 1 else geometry.splits * blocks * block_tiles * geometry.token_tiles * 128
    epilogue = EPILOGUES[activation] if activation else epilogue_adding(residual)
    program = FusedProgram(
        part.layout, part.cols, geometry.token_tiles, geometry.tiles, geometry.n_warps, geometry.k_warps,
        geometry.splits, geometry.ahead, paired, epilogue, mode.exact or mode.batch_invariant, mode.pdl,
        uses_assembly(),
    )  # fmt: skip
    assert x.is_mma
    _fused_kernel[grid](
        *part.planes, x.values, x.row_scale, out if residual is None else residual, out, *scratch.take(size, blocks),
        part.tiles, part.rows, first, out.shape[1], x.rows, part.weight_scale, P=program,
        num_warps=geometry.n_warps * geometry.k_warps, maxnreg=geometry.registers or None, launch_pdl=mode.pdl,
    )  # fmt: skip
