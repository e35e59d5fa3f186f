"""Matrix times 2 to 127 rows, on packed weights: batched decode, and short prompts.

Weights are dequantized to fp16 in registers, in the order of the matrix instruction (m16n8k16) in which they are
stored: read packed, never written. Rows come tiled (half.py), so that what a lane multiplies in one step is one
16-byte load, which the warps of a program share through the L1 cache. A warp takes several tiles of weights, so that
one such load feeds several products. The columns of a tile are split over warps, and over programs where there are
few tiles: the last program to end adds up what all have left, in the order of the columns.

The order of a sum follows from the weight's shape and from the launch geometry, whose share of the columns
(`k_warps`, `splits`) may follow from the number of rows (launch_table.py): a row's result does not depend on what
the other rows hold, only on that number, and, where the launch is `fixed`, not on that either.
Does not know: where rows come from, or when this way pays (matmul.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import Activation
from quengine.kernels.cuda.gemm.fragments import (
    LANE_COLUMNS,
    chunk_scales,
    load_chunk,
    step_codes,
    step_column,
)
from quengine.kernels.cuda.gemm.half import HalfRows
from quengine.kernels.cuda.gemm.mma import (
    SUBNORMALS,
    mma_half_step,
    scale_bytes,
    scale_bytes_once,
    uses_assembly,
)
from quengine.kernels.cuda.glu import EPILOGUES, RESIDUAL, ROWS, SILU, gated
from quengine.kernels.cuda.weights.launch_table import fused_geometry
from quengine.kernels.cuda.weights.packed import PackedPart


@triton.jit
def _step_rows(
    x_at, column, step: tl.constexpr, FMT: tl.constexpr, K: tl.constexpr, TOKEN_TILES: tl.constexpr
):
    """This lane's 8 columns of a step, for its row of every token tile: two int64 of four fp16 each.

    Zeros past column K: the weights there are zero too, but what lies in memory need not be finite.
    """
    PADDED: tl.constexpr = (K + 127) // 128 * 128
    words = ()
    for n in tl.static_range(TOKEN_TILES):
        # Units of 4 columns of a row: a step of a token tile is 8 columns of 8 rows for each lane of a quad.
        at = x_at + (step * 64 + n * PADDED * 2)
        if K % FMT.chunk == 0:
            both = tl.load(at)
        else:
            fits = column < K - step_column(step)
            both = tl.load(at, mask=fits[:, None], other=0)
        words = words + (tl.split(both),)
    return words


@triton.jit
def _scaled(codes, scale, minimum, SIGNED: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr):
    if EXACT:
        low, high = scale_bytes_once(codes, scale, minimum, SIGNED, ASM)
    else:
        low, high = scale_bytes(codes, scale, minimum, SIGNED, ASM)
    return low, high


@triton.jit
def step_halves(codes, scales, FMT: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr):
    """The A operands of both products of a step, fp16: codes as `step_codes`, scales as `chunk_scales` gives them.
    EXACT: rounded once."""
    SIGNED: tl.constexpr = FMT.offset > 0 or FMT.table > 0 or FMT.low == 8
    a0, a2 = _scaled(codes[0], scales[0], scales[1], SIGNED, EXACT, ASM)
    a1, a3 = _scaled(codes[1], scales[2], scales[3], SIGNED, EXACT, ASM)
    b0, b2 = _scaled(codes[2], scales[0], scales[1], SIGNED, EXACT, ASM)
    b1, b3 = _scaled(codes[3], scales[2], scales[3], SIGNED, EXACT, ASM)
    return (a0, a1, a2, a3), (b0, b1, b2, b3)


@triton.jit
def _four(totals, i: tl.constexpr):
    return (totals[4 * i], totals[4 * i + 1], totals[4 * i + 2], totals[4 * i + 3])


@triton.jit
def _join_halves(values, COUNT: tl.constexpr):
    """Each of the first COUNT / 2 tensors beside the one COUNT / 2 further on."""
    pairs = ()
    for i in tl.static_range(COUNT // 2):
        pairs = pairs + (tl.join(values[i], values[i + COUNT // 2]),)
    return pairs


@triton.jit
def _multiply_chunk(
    totals, words, x_at, column, gain,
    FMT: tl.constexpr, K: tl.constexpr, TOKEN_TILES: tl.constexpr, TILES: tl.constexpr, EXACT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """totals + a chunk of TILES tiles of weights times TOKEN_TILES tiles of rows.

    totals: four a (tile, token tile), tiles outermost. words: the chunk of each tile. x_at: this lane's columns of the
    chunk's first step, [thread, 2]. Rows are read one step before they are multiplied.
    """
    SETS: tl.constexpr = FMT.sets
    STEPS: tl.constexpr = FMT.steps_per_set
    x = _step_rows(x_at, column, 0, FMT, K, TOKEN_TILES)
    for s in tl.static_range(SETS):
        scales = ()
        for w in tl.static_range(TILES):
            scales = scales + (chunk_scales(words[w], s, gain, FMT, SUBNORMALS if EXACT else 1.0),)
        for j in tl.static_range(STEPS):
            x_now = x
            if s * STEPS + j + 1 < SETS * STEPS:
                x = _step_rows(x_at, column, s * STEPS + j + 1, FMT, K, TOKEN_TILES)
            result = ()
            for w in tl.static_range(TILES):
                codes = step_codes(words[w], s * STEPS + j, FMT, ASM)
                first, last = step_halves(codes, scales[w], FMT, EXACT, ASM)
                for n in tl.static_range(TOKEN_TILES):
                    d = mma_half_step(
                        first, last, x_now[n][0], x_now[n][1],
                        _four(totals, w * TOKEN_TILES + n), ASM,
                    )  # fmt: skip
                    result = result + (d[0], d[1], d[2], d[3])
            totals = result
    return totals


@triton.jit
def _load_tiles(
    planes, chunk, tile, tiles, inside, lane, FMT: tl.constexpr, CHUNKS: tl.constexpr, TILES: tl.constexpr
):
    """Start reading chunk number `chunk` of the matrix and the same one of the TILES - 1 tiles behind it."""
    words = ()
    for w in tl.static_range(TILES):
        valid = inside & (tile < tiles - w)
        words = words + (load_chunk(planes, chunk, w * CHUNKS, lane, valid, FMT, True),)
    return words


@triton.jit
def _add_warps(
    totals, w: tl.constexpr, TOKEN_TILES: tl.constexpr, N_WARPS: tl.constexpr, K_WARPS: tl.constexpr
):  # fmt: skip
    """The sums of tile w of each warp over the warps that share its columns: fp32 [N_WARPS, r, q, token tile, rh,
    column], weight row 8*rh + r of the tile, row 8*(token tile) + 2*q + column of x."""
    values = ()
    for i in tl.static_range(4 * TOKEN_TILES):
        values = values + (totals[4 * TOKEN_TILES * w + i],)
    # Joining halves adds the most significant bit of the place first: values stand in their order at the end.
    for level in tl.static_range(6):
        if 2 << level <= 4 * TOKEN_TILES:
            values = _join_halves(values, 4 * TOKEN_TILES >> level)
    return tl.sum(tl.reshape(values[0], [N_WARPS, K_WARPS, 8, 4, TOKEN_TILES, 2, 2]), axis=1)


@triton.jit
def _store(
    y, w: tl.constexpr, tile0, token0, unscale_ptr, residual_ptr, out_ptr, rows, first, N, T, gain,
    TILES: tl.constexpr, TOKEN_TILES: tl.constexpr, N_WARPS: tl.constexpr, PAIRED: tl.constexpr,
    EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Finish and store what `_add_warps` gave for tile w of each warp."""
    tile = tile0 + tl.arange(0, N_WARPS)[:, None, None, None, None, None] * TILES + w
    r = tl.arange(0, 8)[None, :, None, None, None, None]
    q = tl.arange(0, 4)[None, None, :, None, None, None]
    n = tl.arange(0, TOKEN_TILES)[None, None, None, :, None, None]
    rh = tl.arange(0, 2)[None, None, None, None, :, None]
    token = token0 + n * 8 + q * 2 + tl.arange(0, 2)[None, None, None, None, None, :]
    y *= tl.load(unscale_ptr + token, mask=token < T, other=0.0) / gain
    if EPILOGUE >= SILU:
        gate, up = tl.split(tl.permute(y, [0, 1, 2, 3, 5, 4]))
        out = gated(gate, up, EPILOGUE)
        one_token = token0 + (
            tl.arange(0, TOKEN_TILES)[None, None, None, :, None] * 8
            + tl.arange(0, 4)[None, None, :, None, None] * 2
            + tl.arange(0, 2)[None, None, None, None, :]
        )
        column = (tile0 + tl.arange(0, N_WARPS)[:, None, None, None, None] * TILES + w) * 8 + (
            tl.arange(0, 8)[None, :, None, None, None]
        )
        inside = (column < rows // 2) & (one_token < T)
        tl.store(out_ptr + one_token.to(tl.int64) * (rows // 2) + column, out, mask=inside)
    else:
        if PAIRED:
            column = tile * 8 + r
            inside = (column < rows // 2) & (token < T)
            column = column + rh * (rows // 2)
        else:
            column = tile * 16 + rh * 8 + r
            inside = (column < rows) & (token < T)
        at = token.to(tl.int64) * N + first + column
        if EPILOGUE == RESIDUAL:
            y += tl.load(residual_ptr + at, mask=inside, other=0.0)
        tl.store(out_ptr + at, y, mask=inside)


@triton.jit(do_not_specialize=["T"])  # any number of rows runs the same code
def _fused_kernel(
    low, high, scales, supers, x_ptr, unscale_ptr, residual_ptr, out_ptr, partial_ptr, tickets_ptr,
    tiles, rows, first, N, T, gain,
    FMT: tl.constexpr, K: tl.constexpr, TOKEN_TILES: tl.constexpr, TILES: tl.constexpr, N_WARPS: tl.constexpr,
    K_WARPS: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, PAIRED: tl.constexpr,
    EPILOGUE: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """N_WARPS * TILES tiles of weights by 8*TOKEN_TILES rows a program, which K_WARPS warps each share; programs
    (token block, tile block, share of the columns)."""
    CHUNKS: tl.constexpr = (K + FMT.chunk - 1) // FMT.chunk
    SHARE: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    ROUNDS: tl.constexpr = (SHARE + K_WARPS - 1) // K_WARPS
    PADDED: tl.constexpr = (K + 127) // 128 * 128
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    thread = tl.arange(0, 32 * N_WARPS * K_WARPS)
    lane = thread & 31
    tile0 = tl.program_id(1) * (N_WARPS * TILES)
    tile = tile0 + (thread >> 5) // K_WARPS * TILES
    first_chunk = tl.program_id(2) * SHARE
    end = tl.minimum(first_chunk + SHARE, CHUNKS)
    c = first_chunk + (thread >> 5) % K_WARPS
    planes = (low, high, scales, supers)
    if AHEAD:
        words = _load_tiles(planes, tile * CHUNKS + c, tile, tiles, c < end, lane, FMT, CHUNKS, TILES)
    if PDL:
        tl.extra.cuda.gdc_wait()
    token0 = tl.program_id(0) * (8 * TOKEN_TILES)
    x_base = x_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + token0 * (PADDED // 4)
    x_place = (lane * 2)[:, None] + tl.arange(0, 2)[None, :]
    totals = ()
    for i in tl.static_range(4 * TILES * TOKEN_TILES):
        totals = totals + ((lane & 0).to(tl.float32),)
    for i in range(ROUNDS):
        if AHEAD:
            now = words
            ahead = c + K_WARPS
            words = _load_tiles(
                planes, tile * CHUNKS + ahead, tile, tiles, ahead < end, lane, FMT, CHUNKS, TILES
            )
        else:
            now = _load_tiles(planes, tile * CHUNKS + c, tile, tiles, c < end, lane, FMT, CHUNKS, TILES)
        # Past the edge codes and scales are zero; the rows read there must still exist.
        inside = tl.minimum(c, CHUNKS - 1)
        x_at = x_base + ((inside * (FMT.chunk * 2))[:, None] + x_place)
        column = inside * FMT.chunk + (lane & 3) * LANE_COLUMNS
        totals = _multiply_chunk(totals, now, x_at, column, gain, FMT, K, TOKEN_TILES, TILES, EXACT, ASM)
        c += K_WARPS
    if SPLITS == 1:
        for w in tl.static_range(TILES):
            y = _add_warps(totals, w, TOKEN_TILES, N_WARPS, K_WARPS)
            _store(
                y, w, tile0, token0, unscale_ptr, residual_ptr, out_ptr, rows, first, N, T, gain,
                TILES, TOKEN_TILES, N_WARPS, PAIRED, EPILOGUE,
            )  # fmt: skip
    else:
        # Partial sums lie as the threads hold them, a block for each (share, tile block, token block, w).
        SIZE: tl.constexpr = N_WARPS * TOKEN_TILES * 128
        block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        blocks = tl.num_programs(0) * tl.num_programs(1)
        spread = tl.reshape(tl.arange(0, SIZE), [N_WARPS, 8, 4, TOKEN_TILES, 2, 2])
        mine = (tl.program_id(2) * blocks + block).to(tl.int64) * (SIZE * TILES)
        for w in tl.static_range(TILES):
            y = _add_warps(totals, w, TOKEN_TILES, N_WARPS, K_WARPS)
            tl.store(partial_ptr + mine + w * SIZE + spread, y)
        tl.debug_barrier()  # all warps' stores come before the one atomic that publishes them
        ticket = tl.atomic_add(tickets_ptr + block, 1, sem="acq_rel", scope="gpu")
        if ticket == SPLITS - 1:
            for v in tl.static_range(TILES):
                at = partial_ptr + block.to(tl.int64) * (SIZE * TILES) + v * SIZE + spread
                # Other programs wrote these: not from this multiprocessor's own cache.
                total = tl.load(at, cache_modifier=".cg")
                for split in tl.static_range(1, SPLITS):
                    total += tl.load(at + split * (SIZE * TILES) * blocks.to(tl.int64), cache_modifier=".cg")
                _store(
                    total, v, tile0, token0, unscale_ptr, residual_ptr, out_ptr, rows, first, N, T, gain,
                    TILES, TOKEN_TILES, N_WARPS, PAIRED, EPILOGUE,
                )  # fmt: skip
            tl.store(tickets_ptr + block, 0)


_TICKETS = 4096


class FusedScratch:
    """What programs that share columns meet in, reusable by every launch of one stream: their sums, and a ticket,
    int32, for each block of results. Tickets are zero between launches."""

    def __init__(self, device: torch.device | str) -> None:
        self.tickets = torch.zeros(_TICKETS, dtype=torch.int32, device=device)
        self._partials = [torch.empty(0, dtype=torch.float32, device=device)]

    def partial(self, size: int) -> Tensor:
        """Room for `size` fp32. What it was before it grew stays allocated: CUDA graphs keep its address."""
        if self._partials[-1].numel() < size:
            self._partials.append(torch.empty(size, dtype=torch.float32, device=self.tickets.device))
        return self._partials[-1]


def launch_fused(
    x: HalfRows,
    part: PackedPart,
    paired: bool,
    out: Tensor,
    first: int,
    scratch: FusedScratch,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    pdl: bool = False,
    exact: bool = False,
    fixed: bool = False,
) -> None:
    """Tiled rows x times a packed part, into columns first .. of out fp32 [T, N], plus those of `residual`; or, of a
    paired part, activation(gate) * up into out [T, N / 2]. `exact`: weights are rounded to fp16
    once, not their scales and minimums before. `fixed`: exact, with sums in an order that no number of rows changes."""
    geometry = fused_geometry(part, "swiglu" if activation else "rows", x.rows, fixed)
    block_tiles = geometry.tiles * geometry.n_warps
    grid = (
        -(-x.rows // (8 * geometry.token_tiles)), -(-part.tiles // block_tiles), geometry.splits
    )  # fmt: skip
    blocks = grid[0] * grid[1]
    assert x.tiled and (geometry.splits == 1 or blocks <= _TICKETS)
    size = 0 if geometry.splits == 1 else geometry.splits * blocks * block_tiles * geometry.token_tiles * 128
    epilogue = EPILOGUES[activation] if activation else (ROWS if residual is None else RESIDUAL).value
    _fused_kernel[grid](
        part.low, part.high, part.scales, part.supers, x.values, x.unscale, out if residual is None else residual,
        out, scratch.partial(size), scratch.tickets, part.tiles, part.rows, first, out.shape[1], x.rows, part.gain,
        FMT=part.layout, K=part.cols, TOKEN_TILES=geometry.token_tiles, TILES=geometry.tiles,
        N_WARPS=geometry.n_warps, K_WARPS=geometry.k_warps, SPLITS=geometry.splits, AHEAD=geometry.ahead,
        PAIRED=paired, EPILOGUE=epilogue, EXACT=exact or fixed, PDL=pdl, ASM=uses_assembly(),
        num_warps=geometry.n_warps * geometry.k_warps, maxnreg=geometry.registers or None, launch_pdl=pdl,
    )  # fmt: skip
