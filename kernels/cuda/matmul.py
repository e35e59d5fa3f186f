"""Matrix times many rows, on packed weights: prefill and batched decode, from 9 rows up.

Two ways, by the number of rows (launch_table.py keeps the measured crossover):
- fused: weights are dequantized to fp16 in registers, already in the order of the matrix instruction (m16n8k16), so
  they are read packed and never written;
- dequantize to a reused fp16 workspace, then cuBLAS with fp32 sums and an fp32 result.
Both round activations and weights to fp16 once, scaled by powers of two (half.py).
Does not know: models, or where rows come from.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.fragments import load_chunk, set_scales, step_codes, super_scales
from quengine.kernels.cuda.half import HalfRows, finish, half_rows, half_rows_in_place
from quengine.kernels.cuda.launch_table import fused_limit
from quengine.kernels.cuda.mma import mma_half, pack_halves, scale_bytes, uses_assembly
from quengine.kernels.cuda.packed import FloatPart, PackedPart, PackedWeight
from quengine.kernels.cuda.rms_norm import finish_norm_half, rms_norm_half
from quengine.kernels.cuda.swiglu import swiglu_products, swiglu_rows


@triton.jit
def _byte_values(word, scale, minimum, SIGNED: tl.constexpr):
    """scale*byte - minimum for the four bytes of a word, fp32, then rounded to four fp16 in an int64."""
    values = ()
    for i in tl.static_range(4):
        if SIGNED:
            byte = (word << (24 - 8 * i)) >> 24
        else:
            byte = (word >> (8 * i)) & 255
        values = values + (byte.to(tl.float32) * scale - minimum,)
    low = pack_halves(values[0], values[1]).to(tl.int64) & 0xFFFFFFFF
    return low | (pack_halves(values[2], values[3]).to(tl.int64) << 32)


@triton.jit
def _chunk_scales(words, s: tl.constexpr, gain, FMT: tl.constexpr):
    """Scales and minimums of set s, super-scales and gain included, for codes as `step_codes` gives them."""
    d0, dm0, d1, dm1 = super_scales(words, FMT)
    s0, m0, s1, m1 = set_scales(words, s, FMT)
    near = s0 * d0 * gain * (1.0 / (1 << FMT.near_shift))
    far = s1 * d1 * gain * (1.0 / (1 << FMT.far_shift))
    if not FMT.has_min:
        near_min = tl.zeros_like(near)
        far_min = tl.zeros_like(far)
    elif FMT.super_bytes == 0:
        near_min = m0 * gain
        far_min = m1 * gain
    else:
        near_min = m0 * dm0 * gain
        far_min = m1 * dm1 * gain
    return near, near_min, far, far_min


@triton.jit
def _store_group(pointer, values, inside, STEPS: tl.constexpr):
    """Store a group of a row, 8*STEPS fp16 in a run, from every thread: words side by side, so that they coalesce."""
    if STEPS == 2:
        quads = tl.join(tl.join(values[0], values[1]), tl.join(values[2], values[3]))
        run = tl.reshape(tl.permute(quads, [0, 2, 1]), [values[0].shape[0], 4])
    else:
        first = tl.join(tl.join(values[0], values[1]), tl.join(values[2], values[3]))
        last = tl.join(tl.join(values[4], values[5]), tl.join(values[6], values[7]))
        run = tl.reshape(tl.permute(tl.join(first, last), [0, 3, 2, 1]), [values[0].shape[0], 8])
    tl.store(pointer[:, None] + tl.arange(0, 2 * STEPS)[None, :], run, mask=inside[:, None])


@triton.jit
def _dequantize_kernel(
    low, high, scales, supers, out_ptr, chunk_count, first_tile, rows, gain,
    FMT: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr, PAIRED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """fp16 [rows, K] of a part, from tile first_tile on; one warp a chunk. Row 0 of `out` is that tile's first."""
    CHUNKS: tl.constexpr = (K + FMT.chunk - 1) // FMT.chunk
    SETS: tl.constexpr = FMT.sets
    STEPS: tl.constexpr = FMT.steps_per_set
    SIGNED: tl.constexpr = FMT.offset > 0 or FMT.table > 0 or FMT.low == 8
    thread = tl.arange(0, 32 * WARPS)
    lane = thread & 31
    chunk = tl.program_id(0) * WARPS + (thread >> 5)
    valid = chunk < chunk_count
    words = load_chunk(
        (low, high, scales, supers), chunk + first_tile * CHUNKS, 0, lane, valid, FMT, True
    )  # fmt: skip
    tile = chunk // CHUNKS
    column = (chunk % CHUNKS) * FMT.chunk + (lane & 3) * FMT.group
    if PAIRED:
        near_row = tile * 8 + (lane >> 2)
        far_row = near_row + rows // 2
        inside = valid & (near_row < rows // 2)
        far_inside = inside
    else:
        near_row = tile * 16 + (lane >> 2)
        far_row = near_row + 8
        inside = valid & (near_row < rows)
        far_inside = valid & (far_row < rows)
    pointer = out_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    near_at = pointer + (near_row.to(tl.int64) * K + column) // 4
    far_at = pointer + (far_row.to(tl.int64) * K + column) // 4
    for s in tl.static_range(SETS):
        near, near_min, far, far_min = _chunk_scales(words, s, gain, FMT)
        near_values = ()
        far_values = ()
        for j in tl.static_range(STEPS):
            codes = step_codes(words, s * STEPS + j, FMT, ASM)
            for half in tl.static_range(2):
                near_values = near_values + (_byte_values(codes[2 * half], near, near_min, SIGNED),)
                far_values = far_values + (_byte_values(codes[2 * half + 1], far, far_min, SIGNED),)
        fits = column + s * 4 * FMT.group < K
        _store_group(near_at + s * FMT.group, near_values, inside & fits, STEPS)
        _store_group(far_at + s * FMT.group, far_values, far_inside & fits, STEPS)


@triton.jit
def _token_words(
    x_at, column, step: tl.constexpr, FMT: tl.constexpr, K: tl.constexpr, TOKEN_TILES: tl.constexpr
):
    """The 8 columns of a step for this lane's row of every token tile: two words of four fp16 each.

    Zeros past column K: the weights there are zero too, but what lies in memory need not be finite.
    """
    AT: tl.constexpr = (step // FMT.steps_per_set) * FMT.group + (step % FMT.steps_per_set) * 2
    words = ()
    for n in tl.static_range(TOKEN_TILES):
        if K % FMT.chunk == 0:
            words = words + (tl.load(x_at[n] + AT), tl.load(x_at[n] + (AT + 1)))
        else:
            fits = column < K - 4 * AT
            words = words + (
                tl.load(x_at[n] + AT, mask=fits, other=0),
                tl.load(x_at[n] + (AT + 1), mask=fits, other=0),
            )
    return words


@triton.jit
def _fused_chunk(
    totals, words, x_at, column, gain,
    FMT: tl.constexpr, K: tl.constexpr, TOKEN_TILES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """totals + a chunk of weights times 8*TOKEN_TILES rows of x; x_at points at this lane's rows, at `column`.

    Rows of x are read one step before they are multiplied.
    """
    SETS: tl.constexpr = FMT.sets
    STEPS: tl.constexpr = FMT.steps_per_set
    SIGNED: tl.constexpr = FMT.offset > 0 or FMT.table > 0 or FMT.low == 8
    x = _token_words(x_at, column, 0, FMT, K, TOKEN_TILES)
    for s in tl.static_range(SETS):
        near, near_min, far, far_min = _chunk_scales(words, s, gain, FMT)
        for j in tl.static_range(STEPS):
            x_now = x
            if s * STEPS + j + 1 < SETS * STEPS:
                x = _token_words(x_at, column, s * STEPS + j + 1, FMT, K, TOKEN_TILES)
            codes = step_codes(words, s * STEPS + j, FMT, ASM)
            for half in tl.static_range(2):
                near_low, near_high = scale_bytes(codes[2 * half], near, near_min, SIGNED, ASM)
                far_low, far_high = scale_bytes(codes[2 * half + 1], far, far_min, SIGNED, ASM)
                result = ()
                for n in tl.static_range(TOKEN_TILES):
                    word = x_now[2 * n + half]
                    d = mma_half(
                        (near_low, far_low, near_high, far_high), word.to(tl.int32), (word >> 32).to(tl.int32),
                        (totals[4 * n], totals[4 * n + 1], totals[4 * n + 2], totals[4 * n + 3]), ASM,
                    )  # fmt: skip
                    result = result + (d[0], d[1], d[2], d[3])
                totals = result
    return totals


@triton.jit
def _fused_kernel(
    low, high, scales, supers, x_ptr, unscale_ptr, residual_ptr, out_ptr, tiles, rows, first, N, T, gain,
    FMT: tl.constexpr, K: tl.constexpr, TOKEN_TILES: tl.constexpr, K_WARPS: tl.constexpr, TILES: tl.constexpr,
    PAIRED: tl.constexpr, RESIDUAL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """TILES tiles of weights by 8*TOKEN_TILES rows a program; K_WARPS warps split the columns of a tile."""
    CHUNKS: tl.constexpr = (K + FMT.chunk - 1) // FMT.chunk
    ROUNDS: tl.constexpr = (CHUNKS + K_WARPS - 1) // K_WARPS
    thread = tl.arange(0, 32 * TILES * K_WARPS)
    lane = thread & 31
    tile0 = tl.program_id(0) * TILES
    tile = tile0 + (thread >> 5) // K_WARPS
    k_warp = (thread >> 5) % K_WARPS
    token0 = tl.program_id(1) * (8 * TOKEN_TILES)
    pointer = x_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    totals = ()
    rows_at = ()
    for n in tl.static_range(TOKEN_TILES):
        token = tl.minimum(token0 + n * 8 + (lane >> 2), T - 1)
        rows_at = rows_at + (pointer + (token.to(tl.int64) * K + (lane & 3) * FMT.group) // 4,)
        for i in tl.static_range(4):
            totals = totals + ((lane & 0).to(tl.float32),)
    # Read one chunk ahead; past the edge codes and scales are zero.
    words = load_chunk(
        (low, high, scales, supers), tile * CHUNKS + k_warp, 0, lane,
        (k_warp < CHUNKS) & (tile < tiles), FMT, True,
    )  # fmt: skip
    for i in range(ROUNDS):
        c = k_warp + i * K_WARPS
        ahead = c + K_WARPS
        later = load_chunk(
            (low, high, scales, supers), tile * CHUNKS + ahead, 0, lane,
            (ahead < CHUNKS) & (tile < tiles), FMT, True,
        )  # fmt: skip
        x_at = ()
        for n in tl.static_range(TOKEN_TILES):
            x_at = x_at + (rows_at[n] + tl.minimum(c, CHUNKS - 1) * (FMT.chunk // 4),)
        column = tl.minimum(c, CHUNKS - 1) * FMT.chunk + (lane & 3) * FMT.group
        totals = _fused_chunk(totals, words, x_at, column, gain, FMT, K, TOKEN_TILES, ASM)
        words = later
    for n in tl.static_range(TOKEN_TILES):
        both = tl.join(
            tl.join(totals[4 * n], totals[4 * n + 2]), tl.join(totals[4 * n + 1], totals[4 * n + 3])
        )  # [thread, rh, column]
        y = tl.sum(tl.reshape(both, [TILES, K_WARPS, 8, 4, 2, 2]), axis=1)
        r = tl.arange(0, 8)[None, :, None, None, None]
        rh = tl.arange(0, 2)[None, None, None, :, None]
        at_tile = tile0 + tl.arange(0, TILES)[:, None, None, None, None]
        token = token0 + n * 8 + tl.arange(0, 4)[None, None, :, None, None] * 2
        token = token + tl.arange(0, 2)[None, None, None, None, :]
        if PAIRED:
            column = at_tile * 8 + r
            inside = (column < rows // 2) & (token < T)
            column = column + rh * (rows // 2)
        else:
            column = at_tile * 16 + rh * 8 + r
            inside = (column < rows) & (token < T)
        y *= tl.load(unscale_ptr + token, mask=token < T, other=0.0) / gain
        at = token.to(tl.int64) * N + first + column
        if RESIDUAL:
            y += tl.load(residual_ptr + at, mask=inside, other=0.0)
        tl.store(out_ptr + at, y, mask=inside)


_PRODUCTS = 1 << 23
"""Products of rows with gate and up weights held at a time: 32 MiB, which an L2 cache holds."""


class MatmulWorkspace:
    """Memory that every `matmul` of one stream reuses: fp16 weights, expanding up to `max_weights` at a time, and room
    for rows that grows with the longest chunk met."""

    def __init__(self, max_weights: int, device: torch.device | str) -> None:
        self.weights = torch.empty(max_weights, dtype=torch.float16, device=device)
        self._room: dict[str, Tensor] = {}

    def half_rows(self, rows: int, cols: int) -> HalfRows:
        """Scaled fp16 rows; one set at a time is in use."""
        return HalfRows(self._take("rows", torch.float16, rows, cols), self.unscale(rows))

    def unscale(self, rows: int) -> Tensor:
        return self._take("unscale", torch.float32, rows, 1).view(-1)

    def gated(self, rows: int, width: int) -> Tensor:
        """fp32 rows of SwiGLU."""
        return self._take("gated", torch.float32, rows, width)

    def _take(self, name: str, dtype: torch.dtype, rows: int, cols: int) -> Tensor:
        held = self._room.get(name)
        if held is None or held.numel() < rows * cols:
            self._room.pop(name, None)  # free the smaller one first
            del held
            held = self._room[name] = torch.empty(rows * cols, dtype=dtype, device=self.weights.device)
        return held[: rows * cols].view(rows, cols)


def matmul(
    x: Tensor | HalfRows,
    weight: PackedWeight,
    workspace: MatmulWorkspace,
    residual: Tensor | None = None,
) -> Tensor:
    """x [T, K] times weight [N, K], plus residual fp32 [T, N]: fp32 [T, N].

    x is fp32, or already scaled fp16, which may lie in the workspace. Raises ValueError on other shapes.
    """
    half = _halved(x, weight, workspace)
    rows = half.rows
    if rows > fused_limit() and _expands_at_once(weight, workspace):
        products, gain = _multiply_all(half, weight, workspace)
        return finish(products, half.unscale, gain, residual, products)
    y = torch.empty(rows, weight.rows, dtype=torch.float32, device=half.values.device)
    first = 0
    for part in weight.parts:
        if isinstance(part, PackedPart) and rows <= fused_limit():
            _launch_fused(half, part, weight.paired, residual, y, first)
        else:
            _expand_and_multiply(half, part, weight.paired, workspace, residual, y, first)
        first += part.rows
    return y


def matmul_norm(
    x: Tensor | HalfRows,
    weight: PackedWeight,
    workspace: MatmulWorkspace,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    pdl: bool = False,
) -> tuple[Tensor, HalfRows]:
    """`matmul` with a residual, and the RMSNorm behind it: fp32 [T, N], and its normed rows as scaled fp16.

    The norm's rows lie in the workspace, until the next rows that are made there. `norm`: fp32 [N].
    """
    half = _halved(x, weight, workspace)
    rows = half.rows
    if rows > fused_limit() and _expands_at_once(weight, workspace):
        products, gain = _multiply_all(half, weight, workspace)
        room = workspace.half_rows(rows, weight.rows)
        normed = finish_norm_half(products, half.unscale, gain, residual, norm, eps, room, pdl)
        return products, normed
    y = matmul(half, weight, workspace, residual)
    return y, rms_norm_half(y, norm, eps, workspace.half_rows(rows, weight.rows), pdl)


def _halved(x: Tensor | HalfRows, weight: PackedWeight, workspace: MatmulWorkspace) -> HalfRows:
    """The rows as scaled fp16, checked against the weight."""
    if isinstance(x, Tensor):
        if x.ndim != 2 or x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"matmul takes contiguous fp32 [T, K], not {x.dtype} {list(x.shape)}")
        x = half_rows(x, workspace.half_rows(x.shape[0], x.shape[1]))
    if x.values.shape[1] != weight.cols:
        raise ValueError(f"rows of {x.values.shape[1]} for weights of {weight.cols}")
    return x


def matmul_swiglu(
    x: Tensor | HalfRows, gate_up: PackedWeight, workspace: MatmulWorkspace
) -> Tensor | HalfRows:
    """silu(gate)*up of x [T, K] (as `matmul`'s) times a merged weight [2F, K]: [T, F], fp32 or scaled fp16.

    The latter lies in the workspace, until the next call.
    """
    half = _halved(x, gate_up, workspace)
    rows, part = half.rows, gate_up.parts[0]
    if rows <= fused_limit() or not gate_up.paired or not isinstance(part, PackedPart):
        return swiglu_rows(matmul(half, gate_up, workspace))
    out = workspace.gated(rows, gate_up.rows // 2)
    # Some gate rows and their up rows at a time, so that neither they nor their products take much memory.
    most = max(16, min(workspace.weights.numel() // part.cols, _PRODUCTS // rows))
    pieces = triton.cdiv(part.rows, most)
    tiles = triton.cdiv(part.tiles, pieces)
    for tile in range(0, part.tiles, tiles):
        count = min(tiles, part.tiles - tile)
        expanded = workspace.weights[: 16 * count * part.cols].view(16 * count, part.cols)
        dequantize_part(part, True, expanded, tile, count)
        swiglu_products(_products(half, expanded), half.unscale, part.gain, out, 8 * tile)
    return half_rows_in_place(out, workspace.unscale(rows))


def dequantize_part(
    part: PackedPart,
    paired: bool,
    out: Tensor,
    first_tile: int = 0,
    tiles: int | None = None,
    gain: float | None = None,
) -> Tensor:
    """Write gain * weights (the part's own gain by default) as fp16 to out [rows, K]: all rows, or those of some tiles.

    Of a paired part, the gate rows of these tiles come first, then their up rows.
    """
    count = part.tiles - first_tile if tiles is None else tiles
    chunk_count, warps = count * part.chunks, 4
    rows = min(part.rows - 16 * first_tile, 16 * count)
    _dequantize_kernel[(triton.cdiv(chunk_count, warps),)](
        part.low, part.high, part.scales, part.supers, out, chunk_count, first_tile, rows,
        part.gain if gain is None else gain,
        FMT=part.layout, K=part.cols, WARPS=warps, PAIRED=paired, ASM=uses_assembly(), num_warps=warps,
    )  # fmt: skip
    return out


def _launch_fused(
    x: HalfRows, part: PackedPart, paired: bool, residual: Tensor | None, out: Tensor, first: int
) -> None:
    rows = x.values.shape[0]
    token_tiles = min(8, int(triton.next_power_of_2(triton.cdiv(rows, 8))))
    k_warps = 1
    while k_warps < 8 and part.chunks > 4 * k_warps:
        k_warps *= 2
    grid = (part.tiles, triton.cdiv(rows, 8 * token_tiles))
    _fused_kernel[grid](
        part.low, part.high, part.scales, part.supers, x.values, x.unscale,
        out if residual is None else residual, out, part.tiles, part.rows, first, out.shape[1], rows, part.gain,
        FMT=part.layout, K=part.cols, TOKEN_TILES=token_tiles, K_WARPS=k_warps, TILES=1,
        PAIRED=paired, RESIDUAL=residual is not None, ASM=uses_assembly(), num_warps=k_warps,
    )  # fmt: skip


def _expands_at_once(weight: PackedWeight, workspace: MatmulWorkspace) -> bool:
    """Whether the whole weight fits the workspace, its rows in their order."""
    packed = all(isinstance(part, PackedPart) for part in weight.parts)
    return packed and not weight.paired and weight.rows * weight.cols <= workspace.weights.numel()


def _multiply_all(x: HalfRows, weight: PackedWeight, workspace: MatmulWorkspace) -> tuple[Tensor, float]:
    """Rows times the whole weight, expanded, not unscaled: fp32 [T, N], and the gain of the weights in it.

    That is the smallest of the parts', so that none leaves fp16's range.
    """
    expanded = workspace.weights[: weight.rows * weight.cols].view(weight.rows, weight.cols)
    parts = [part for part in weight.parts if isinstance(part, PackedPart)]
    gain, first = min(part.gain for part in parts), 0
    for part in parts:
        dequantize_part(part, False, expanded[first : first + part.rows], gain=gain)
        first += part.rows
    return _products(x, expanded), gain


def _expand_and_multiply(
    x: HalfRows,
    part: PackedPart | FloatPart,
    paired: bool,
    workspace: MatmulWorkspace,
    residual: Tensor | None,
    out: Tensor,
    first: int,
) -> None:
    """As many weight rows at a time as the workspace holds."""
    at_a_time = workspace.weights.numel() // part.cols
    if not paired:
        at_a_time = at_a_time // 16 * 16
    if at_a_time < (part.rows if paired else min(16, part.rows)):
        raise ValueError(f"the workspace expands {workspace.weights.numel()} weights; rows have {part.cols}")
    for row in range(0, part.rows, at_a_time):
        count = min(at_a_time, part.rows - row)
        expanded = workspace.weights[: count * part.cols].view(count, part.cols)
        if isinstance(part, FloatPart):
            expanded.copy_(part.weight[row : row + count])
        else:
            dequantize_part(part, paired, expanded, row // 16, triton.cdiv(count, 16))
        gain = 1.0 if isinstance(part, FloatPart) else part.gain
        columns = slice(first + row, first + row + count)
        products = _products(x, expanded)
        added = None if residual is None else residual[:, columns].contiguous()
        out[:, columns] = finish(products, x.unscale, gain, added, products)


def _products(x: HalfRows, expanded: Tensor) -> Tensor:
    """fp16 rows [T, K] times fp16 weights [N, K], fp32 sums: fp32 [T, N], not unscaled."""
    if x.values.is_cuda:
        return torch.mm(x.values, expanded.T, out_dtype=torch.float32)
    return x.values.float() @ expanded.float().T
