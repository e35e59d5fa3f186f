"""Matrix times 1 to 128 rows, or more, on Hopper's warp-group matrix instruction, on packed weights.

As in matmul_fused.py, weights are read packed and dequantized to fp16 in registers, now as the left operand of wgmma;
the rows, the right operand, are staged in shared memory by the copy engine, some sets of 128 or 256 columns ahead, so
that all warps of a program share them and no register waits for them. The stored order of the weights fixes which
columns meet in an instruction; rows come with their columns in that order (half.py, "ordered").

Programs take 16 rows of weights a warp and up to 128 rows of x. Where such programs are too few, `splits` of them share
the columns, and the last to end adds up what all have left, in the order of the columns. Where rows are more than 128,
a program takes all shares itself, one after the other, and adds them up in the same order: a row's sums are the same,
to the last bit, whatever the number of rows.
Does not know: where rows come from, or when this way pays (matmul.py).
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quengine.kernels.cuda.attention_prefill import is_hopper
from quengine.kernels.cuda.fragments import chunk_scales, load_chunk, step_codes
from quengine.kernels.cuda.half import ORDERED_16, ORDERED_32, HalfRows, half_place
from quengine.kernels.cuda.launch_table import WgmmaGeometry, wgmma_block, wgmma_geometry
from quengine.kernels.cuda.matmul_fused import FusedScratch
from quengine.kernels.cuda.mma import pack_halves, scale_small
from quengine.kernels.cuda.packed import PackedPart
from quengine.kernels.cuda.swiglu import product_scales, reach_of

_ROWS = gl.constexpr(0)
_RESIDUAL = gl.constexpr(1)
_SWIGLU = gl.constexpr(2)
_STAGED = gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def _halves_apart(words, COUNT: gl.constexpr):
    """COUNT int32 tensors [thread] of two fp16: fp16 [thread, COUNT, 2]."""
    for level in gl.static_range(8):
        if 1 << level < COUNT:
            pairs = ()
            for i in gl.static_range(COUNT >> (level + 1)):
                pairs = pairs + (gl.join(words[i], words[i + (COUNT >> (level + 1))]),)
            words = pairs
    all_words = words[0]
    near = all_words.to(gl.int16).to(gl.float16, bitcast=True)
    far = (all_words >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.join(near, far)


@gluon.jit
def _twice(x):
    """fp32 rounded to fp16, twice in an int32: one instruction where `pack_halves` takes two and a slow conversion."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _fp16_scales(scale, minimum, SIGNED: gl.constexpr):
    """What `scale_small` takes. Signed bytes become unsigned by adding 128, which the minimum takes off: exactly, since
    it follows from the rounded scale."""
    if SIGNED:
        # Not `_twice`: with it, kernels of Q6_K take 20 registers more, and those of 128 rows overlap nothing.
        rounded = (scale * 16777216.0).to(gl.float16).to(gl.float32)
        minimum = rounded * (128.0 / 16777216.0)
        return pack_halves(rounded, rounded), pack_halves(-minimum, -minimum)
    else:
        return _twice(scale * 16777216.0), _twice(-minimum)


@gluon.jit
def _weights(words, half: gl.constexpr, gain, FMT: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr):
    """128 columns of this program's weights, half `half` of a chunk: fp16 [16*WARPS, 128] as wgmma's left operand."""
    STEPS: gl.constexpr = FMT.steps_per_set
    SETS: gl.constexpr = 128 // (4 * FMT.group)
    SIGNED: gl.constexpr = FMT.offset > 0 or FMT.table > 0 or FMT.low == 8
    operand = ()
    for s in gl.static_range(SETS):
        scales = chunk_scales(words, half * SETS + s, gain, FMT)
        near, near_min = _fp16_scales(scales[0], scales[1], SIGNED)
        far, far_min = _fp16_scales(scales[2], scales[3], SIGNED)
        for j in gl.static_range(STEPS):
            codes = step_codes(words, (half * SETS + s) * STEPS + j, FMT, True)
            for part in gl.static_range(2):
                near_codes = codes[2 * part]
                far_codes = codes[2 * part + 1]
                if SIGNED:
                    near_codes = near_codes ^ -2139062144
                    far_codes = far_codes ^ -2139062144
                near_low, near_high = scale_small(near_codes, near, near_min)
                far_low, far_high = scale_small(far_codes, far, far_min)
                operand = operand + (near_low, far_low, near_high, far_high)
    apart = _halves_apart(operand, 32)  # [thread, 8 blocks of 16 columns, pair, rh, e]: see below
    apart = gl.reshape(apart, [WARPS, 8, 4, 8, 2, 2, 2])  # warp, r, q, block, pair, rh, e
    return gl.convert_layout(
        gl.reshape(gl.permute(apart, [0, 5, 1, 3, 4, 2, 6]), [16 * WARPS, 128]), A, assert_trivial=True
    )


@gluon.jit
def _copy(
    x_rows, stages, ready, n, begin, count, token0, TB: gl.constexpr, SET: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Start copying set number n of this program's `count`, the first one being set `begin` of the rows from token0."""
    on = n < count
    bar = ready.index(n % STAGES)
    mbarrier.expect(bar, TB * SET * 2, pred=on)
    tma.async_copy_global_to_shared(
        x_rows, [token0, (begin + n) * SET], bar, stages.index(n % STAGES), pred=on
    )


@gluon.jit
def _pair(values, WARPS: gl.constexpr, TB: gl.constexpr):
    """The values [16*WARPS, TB] of rows r and of rows r + 8 of the tiles, which lie in the same threads."""
    return gl.split(gl.permute(gl.reshape(values, [WARPS, 2, 8, TB]), [0, 2, 3, 1]))


@gluon.jit
def _store_gated(
    y, row, token, scale, out_ptr, unscale_ptr, width, copy, T, reach, WARPS: gl.constexpr, TB: gl.constexpr
):  # fmt: skip
    """silu(gate)*up of fp32 [16*WARPS, TB], as scaled fp16 rows in both orders of columns, and their unscale.

    row, token: of the packed matrix and of x, along their axes; scale: what x's rows are scaled by.
    """
    out_scale, out_unscale = product_scales(scale, reach)
    gl.store(unscale_ptr + token, out_unscale, mask=(token < T) & (gl.program_id(1) == 0))
    far = gl.expand_dims((row >> 3) & 1, 1)
    gate, up = _pair(y * gl.where(far == 1, gl.expand_dims(out_scale, 0), 1.0), WARPS, TB)
    values = (gate / (1.0 + gl.exp(-gate)) * up).to(gl.float16)
    column = gl.expand_dims((row >> 4) * 8 + (row & 7), 1)
    token = gl.expand_dims(token, 0)
    live, _ = _pair(((column < width) & (token < T)).to(gl.int32), WARPS, TB)
    near_place, _ = _pair(half_place(token, column, width, ORDERED_32), WARPS, TB)
    far_place, _ = _pair(half_place(token, column, width, ORDERED_16), WARPS, TB)
    gl.store(out_ptr + near_place, values, mask=live != 0)
    gl.store(out_ptr + copy + far_place, values, mask=live != 0)


@gluon.jit
def _store(
    y, block_row, token0, unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, rows, first, N, copy, T, gain, reach,
    MMA: gl.constexpr, WARPS: gl.constexpr, TB: gl.constexpr, PAIRED: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Finish and store fp32 [16*WARPS, TB], whose first row is row `block_row` of the packed matrix, whose first column
    is row `token0` of x."""
    row = block_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, MMA))
    token = token0 + gl.arange(0, TB, layout=gl.SliceLayout(0, MMA))
    scale = gl.load(unscale_ptr + token, mask=token < T, other=0.0)
    y = y * gl.expand_dims(scale / gain, 0)
    if EPILOGUE == _SWIGLU:
        _store_gated(y, row, token, scale, out_ptr, out_unscale_ptr, N, copy, T, reach, WARPS, TB)
    else:
        token = gl.expand_dims(token, 0)
        if PAIRED:
            column = (row >> 4) * 8 + (row & 7)
            inside = gl.expand_dims(column < rows // 2, 1) & (token < T)
            column = column + ((row >> 3) & 1) * (rows // 2)
        else:
            column = row
            inside = gl.expand_dims(row < rows, 1) & (token < T)
        at = token * N + (first + gl.expand_dims(column, 1))
        if EPILOGUE == _RESIDUAL:
            y += gl.load(residual_ptr + at, mask=inside, other=0.0)
        gl.store(out_ptr + at, y, mask=inside)


@gluon.jit
def _share(
    planes, words, x_rows, stages, ready, tile, tiles, lane, begin, first, last, end, token0, gain,
    FMT: gl.constexpr, CHUNKS: gl.constexpr, TB: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    SET: gl.constexpr, ASYNC: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Chunks first .. last - 1 of a program's begin .. end - 1: fp32 [16*WARPS, TB], and the words of the chunk behind.

    `words`: those of chunk `first`. All shares of a program are one queue of copied sets.
    """
    SETS: gl.constexpr = FMT.chunk // SET
    HALVES: gl.constexpr = SET // 128
    first_set = begin * SETS
    count = (end - begin) * SETS
    acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
    for c in range(first, last):
        later = load_chunk(planes, tile * CHUNKS + c + 1, 0, lane, (tile < tiles) & (c + 1 < end), FMT, True)
        for number in gl.static_range(SETS):
            n = (c - begin) * SETS + number
            rows = stages.index(n % STAGES)
            for half in gl.static_range(HALVES):
                a = _weights(words, number * HALVES + half, gain, FMT, WARPS, A)
                if half == 0:
                    mbarrier.wait(ready.index(n % STAGES), (n // STAGES) & 1)
                x = rows if HALVES == 1 else rows.slice(half * 128, 128, 1)
                acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=ASYNC)
                if ASYNC:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    if half == 0:
                        tl.debug_barrier()  # all warps have read the set before this, which the next is copied over
                        if n > 0:
                            _copy(
                                x_rows,
                                stages,
                                ready,
                                n - 1 + STAGES,
                                first_set,
                                count,
                                token0,
                                TB,
                                SET,
                                STAGES,
                            )
            if not ASYNC:
                tl.debug_barrier()
                _copy(x_rows, stages, ready, n + STAGES, first_set, count, token0, TB, SET, STAGES)
        words = later
    if ASYNC:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, words


@gluon.jit
def _places(WARPS: gl.constexpr, TB: gl.constexpr, MMA: gl.constexpr):
    """Where programs leave fp32 [16*WARPS, TB] for each other: as the threads hold it, two values of each side by side,
    so that a warp writes 256 bytes in a row."""
    row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, MMA))
    token = gl.arange(0, TB, layout=gl.SliceLayout(0, MMA))
    of_row = ((row // 8) % 2) * (64 * WARPS) + (row // 16) * 64 + (row % 8) * 8
    return gl.expand_dims(of_row, 1) + gl.expand_dims(token // 8 * (128 * WARPS) + token % 8, 0)


@gluon.jit(do_not_specialize=["T"])  # any number of rows up to TB runs the same code
def _wgmma_kernel(
    low, high, scales, supers, x_rows, unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, partial_ptr, tickets_ptr,
    tiles, rows, first, N, copy, T, gain, reach,
    FMT: gl.constexpr, K: gl.constexpr, TB: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, SET: gl.constexpr, ASYNC: gl.constexpr, MANY: gl.constexpr, PAIRED: gl.constexpr,
    EPILOGUE: gl.constexpr, PDL: gl.constexpr, BEFORE: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Programs (TB rows of x, 16*WARPS rows of weights, share of the columns). MANY: rows are more than TB, and all
    shares one program's. BEFORE, BEHIND: see `launch_wgmma`."""
    CHUNKS: gl.constexpr = K // FMT.chunk
    SHARE: gl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    SETS: gl.constexpr = FMT.chunk // SET
    JOINED: gl.constexpr = MANY and SPLITS > 1
    THREAD: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TB, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    X: gl.constexpr = x_rows.layout
    if PDL and not BEFORE:
        tl.extra.cuda.gdc_launch_dependents()
    thread = gl.arange(0, 32 * WARPS, layout=THREAD)
    lane = thread & 31
    token0 = 0
    if MANY:
        token0 = gl.program_id(0) * TB
    tile0 = gl.program_id(1) * WARPS
    tile = tile0 + (thread >> 5)
    if MANY:
        begin = 0
        end = CHUNKS
    else:
        begin = gl.program_id(2) * SHARE
        end = gl.minimum(begin + SHARE, CHUNKS)
    planes = (low, high, scales, supers)
    words = load_chunk(planes, tile * CHUNKS + begin, 0, lane, tile < tiles, FMT, True)
    stages = gl.allocate_shared_memory(gl.float16, [STAGES, TB, SET], X)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    if PDL and not BEHIND:
        tl.extra.cuda.gdc_wait()
        if BEFORE:
            tl.extra.cuda.gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        _copy(x_rows, stages, ready, i, begin * SETS, (end - begin) * SETS, token0, TB, SET, STAGES)
    if JOINED:
        acc = gl.zeros([16 * WARPS, TB], gl.float32, MMA)
        for share in range(SPLITS):
            last = gl.minimum((share + 1) * SHARE, CHUNKS)
            one, words = _share(
                planes, words, x_rows, stages, ready, tile, tiles, lane, begin, share * SHARE, last, end, token0, gain,
                FMT, CHUNKS, TB, WARPS, STAGES, SET, ASYNC, MMA, A,
            )  # fmt: skip
            acc += one
    else:
        acc, words = _share(
            planes, words, x_rows, stages, ready, tile, tiles, lane, begin, begin, end, end, token0, gain,
            FMT, CHUNKS, TB, WARPS, STAGES, SET, ASYNC, MMA, A,
        )  # fmt: skip
    if PDL and BEHIND:
        tl.extra.cuda.gdc_wait()
    if SPLITS == 1 or MANY:
        _store(
            acc, tile0 * 16, token0, unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, rows, first, N, copy, T,
            gain, reach, MMA, WARPS, TB, PAIRED, EPILOGUE,
        )  # fmt: skip
    else:
        SIZE: gl.constexpr = 16 * WARPS * TB
        spread = _places(WARPS, TB, MMA)
        block = gl.program_id(1)
        blocks = gl.num_programs(1)
        gl.store(partial_ptr + (gl.program_id(2) * blocks + block) * SIZE + spread, acc)
        tl.debug_barrier()  # all warps' stores come before the one atomic that publishes them
        ticket = gl.atomic_add(tickets_ptr + block, 1, sem="acq_rel", scope="gpu")
        if ticket == SPLITS - 1:
            # Other programs wrote these: not from this multiprocessor's own cache.
            total = gl.load(partial_ptr + block * SIZE + spread, cache_modifier=".cg")
            if TB <= 32:
                for split in gl.static_range(1, SPLITS):
                    total += gl.load(
                        partial_ptr + (split * blocks + block) * SIZE + spread, cache_modifier=".cg"
                    )
            else:  # unrolled, this would take more registers than all that comes before it
                for split in range(1, SPLITS):
                    total += gl.load(
                        partial_ptr + (split * blocks + block) * SIZE + spread, cache_modifier=".cg"
                    )
            _store(
                total, tile0 * 16, token0, unscale_ptr, residual_ptr, out_ptr, out_unscale_ptr, rows, first, N, copy,
                T, gain, reach, MMA, WARPS, TB, PAIRED, EPILOGUE,
            )  # fmt: skip
            gl.store(tickets_ptr + block, 0)


def _small_gain(part: PackedPart) -> float:
    """The gain of weights whose codes are read as subnormal fp16: scales must fit fp16 when multiplied by 2^24. It
    brings the largest weight to 2^-5 or so; fp16 keeps its 11 bits down to 2^-14."""
    few = part.layout.bits == 2 and not part.layout.offset
    return part.gain * 2.0 ** (-11 if few else -9)


def uses_wgmma(device: torch.device, cols: int) -> bool:
    """Whether this kernel takes weights of `cols` columns on `device`."""
    return is_hopper(device) and cols % 128 == 0


def launch_wgmma(
    x: HalfRows,
    part: PackedPart,
    paired: bool,
    out: Tensor,
    first: int,
    scratch: FusedScratch,
    residual: Tensor | None = None,
    pdl: bool = False,
    before: bool = False,
    behind: bool = False,
) -> None:
    """`launch_fused` for ordered rows.

    Where one matrix is several parts, with `pdl`: a launch `before` one of another part of it, and one `behind` such a
    launch, itself or another `behind` it. The latter needs nothing that the one in front writes, but the room for
    sums: it waits for its end only before it writes, and runs beside it until then. It may, because the one `before`
    lets it begin only when what both read is written.
    """
    geometry = wgmma_geometry(part, "rows", x.rows)
    epilogue = _ROWS if residual is None else _RESIDUAL
    added = out if residual is None else residual
    _launch(
        x,
        part,
        geometry,
        paired,
        epilogue.value,
        added,
        (out, out, out.shape[1], 0, first),
        scratch,
        pdl,
        before,
        behind,
    )


def launch_wgmma_swiglu(
    x: HalfRows, part: PackedPart, out: HalfRows, scratch: FusedScratch, pdl: bool = False
) -> None:
    """silu(gate)*up of ordered rows times a paired part, to ordered rows."""
    geometry = wgmma_geometry(part, "swiglu", x.rows)
    assert out.ordered
    outputs = (out.values, out.unscale, out.stride, out.values.stride(0), 0)
    _launch(x, part, geometry, True, _SWIGLU.value, out.unscale, outputs, scratch, pdl)


def _launch(
    x: HalfRows,
    part: PackedPart,
    geometry: WgmmaGeometry,
    paired: bool,
    epilogue: int,
    residual: Tensor,
    outputs: tuple[Tensor, Tensor, int, int, int],
    scratch: FusedScratch,
    pdl: bool,
    before: bool = False,
    behind: bool = False,
) -> None:
    """`outputs`: values, unscale (or anything), from a row to the next, from a copy to the next, first column."""
    out, unscale, stride, copy, first = outputs
    block = wgmma_block(x.rows)
    blocks = -(-part.tiles // geometry.warps)
    share = -(-part.chunks // geometry.splits)
    splits = -(-part.chunks // share)  # none without a share
    # Where the loop has one turn at most, the compiler may copy sums in front of the wait that is behind it.
    overlap = geometry.overlap and share > 1
    many = x.rows > block
    apart = 1 if many else splits
    assert x.ordered and (apart == 1 or blocks <= scratch.tickets.shape[0])
    assert x.rows * stride < 2**31, "the kernel counts results in 32 bits"
    size = 0 if apart == 1 else splits * blocks * 16 * geometry.warps * block
    columns = min(geometry.columns, part.layout.chunk)
    values = x.values[0 if part.layout.group == 32 else 1]
    rows = TensorDescriptor(values, list(values.shape), [part.cols, 1], [block, columns], _STAGED)
    _wgmma_kernel[(-(-x.rows // block), blocks, apart)](
        part.low, part.high, part.scales, part.supers, rows, x.unscale, residual, out, unscale,
        scratch.partial(size), scratch.tickets, part.tiles, part.rows, first, stride, copy, x.rows, _small_gain(part),
        reach_of(part),
        FMT=part.layout, K=part.cols, TB=block, WARPS=geometry.warps, SPLITS=splits, STAGES=geometry.stages,
        SET=columns, ASYNC=overlap, MANY=many, PAIRED=paired, EPILOGUE=epilogue, PDL=pdl, BEFORE=before,
        BEHIND=behind,
        num_warps=geometry.warps, maxnreg=geometry.registers or None, launch_pdl=pdl,
    )  # fmt: skip
