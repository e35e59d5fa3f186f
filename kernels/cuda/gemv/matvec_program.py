"""What the programs of the matvec kernels share: a few tiles of a packed matrix times quantized rows.

A program starts reading its weights, waits for the launch in front (dependent launch), multiplies, and adds up what
its warps hold.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_group, store_quantized
from quengine.kernels.cuda.gemv.q_dot import reduce_tile, row_order, start_tile, tile_dots
from quengine.kernels.cuda.weights.launch_table import Geometry
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight

MAX_ROWS = 8


@triton.jit
def begin_rows(
    planes, tile0, tiles, FMT: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, K_WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Start reading TILES tiles from `tile0` on, each shared by K_WARPS warps. `planes`: low, high, scales, supers."""
    thread = tl.arange(0, 32 * TILES * K_WARPS)
    warp = thread >> 5
    return start_tile(
        planes, tile0 + warp // K_WARPS, tiles, warp % K_WARPS, thread & 31, FMT, K, K_WARPS, AHEAD, EVEN
    )


@triton.jit
def load_squares(squares_ptr, ROWS: tl.constexpr, T, PARTIALS: tl.constexpr):
    """The partial sums of squares of the activation rows, in the order of `row_order`; a zero where there are none."""
    if PARTIALS == 0:
        return 0.0
    elif ROWS == 1:
        n = tl.arange(0, triton.next_power_of_2(PARTIALS))
        return tl.load(squares_ptr + n, mask=n < PARTIALS, other=0.0)
    else:
        n = tl.arange(0, triton.next_power_of_2(PARTIALS))[None, :]
        row = row_order(ROWS)[:, None]
        return tl.load(squares_ptr + row * PARTIALS + n, mask=(row < T) & (n < PARTIALS), other=0.0)


@triton.jit
def finish_rows(
    queue, squares, planes, x_high, x_low, t_ptr, sums_ptr, eps, tile0, tiles, T,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, K_WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, PARTIALS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The product, fp32 [TILES, 8, 2, ROWS]; with PARTIALS also divided by the root mean square of each row."""
    thread = tl.arange(0, 32 * TILES * K_WARPS)
    warp = thread >> 5
    totals = tile_dots(
        queue, planes, x_high, x_low, t_ptr, sums_ptr, tile0 + warp // K_WARPS, tiles, warp % K_WARPS, T,
        thread & 31, FMT, ROWS, K, K_WARPS, AHEAD, EARLY, EVEN, ASM,
    )  # fmt: skip
    y = reduce_tile(totals, ROWS, TILES, K_WARPS)
    if PARTIALS > 0:
        if ROWS == 1:
            y *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
        else:
            y *= tl.rsqrt(tl.reshape(tl.sum(squares, 1), [1, 1, 1, ROWS]) / K + eps)
    return y


@triton.jit
def quantize_shared_group(
    values_ptr, arrivals_ptr, out_high, out_low, out_scale, out_sums, group, width, T,
    ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Quantize group `group` of 32 outputs, which PROGRAMS programs share: each has just stored its part of the rows of
    `values` [T, width] and counts its arrival; the last one quantizes the whole."""
    tl.debug_barrier()  # all warps' stores come before the one atomic that publishes them
    arrival = tl.atomic_add(arrivals_ptr + group, 1, sem="acq_rel", scope="gpu")
    if arrival == PROGRAMS - 1:
        rows = tl.arange(0, ROWS)
        at = rows[:, None] * width + group * 32 + tl.arange(0, 32)[None, :]
        # Other programs wrote these: not from this multiprocessor's own cache.
        values = tl.load(values_ptr + at, mask=(rows < T)[:, None], other=0.0, cache_modifier=".cg")
        coarse, fine, scale, x_sums = quantize_group(values)
        place = rows * (width // 32) + group
        store_quantized(
            out_high, out_low, out_scale, out_sums, place, rows < T, coarse, fine, scale, x_sums
        )  # fmt: skip
        tl.store(arrivals_ptr + group, 0)


@dataclass(frozen=True)
class QuantizationScratch:
    """Memory of `quantize_shared_group`, reusable by every call of one stream: values fp32 and an arrival counter,
    int32, for each 32 outputs. Counters are zero between launches."""

    values: Tensor
    arrivals: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device | str) -> "QuantizationScratch":
        """For up to `rows` rows of up to `width` values."""
        return cls(
            torch.empty(rows, width, dtype=torch.float32, device=device),
            torch.zeros(-(-width // 32), dtype=torch.int32, device=device),
        )


def check_rows(x: QuantizedActivations, weight: PackedWeight) -> None:
    """Raises ValueError where the shapes do not fit."""
    if x.cols != weight.cols:
        raise ValueError(f"activations of width {x.cols} for weights of width {weight.cols}")
    if not 1 <= x.rows <= MAX_ROWS:
        raise ValueError(f"matvec takes 1 to {MAX_ROWS} rows, not {x.rows}; use matmul")


def kernel_rows(rows: int) -> int:
    return int(triton.next_power_of_2(rows))


def register_limit(geometry: Geometry, rows: int) -> int | None:
    """The limit was measured with one row; more than two need the registers."""
    return geometry.registers if geometry.registers and rows <= 2 else None


def is_even(part: PackedPart, geometry: Geometry) -> bool:
    return part.tiles % geometry.tiles == 0 and part.chunks % geometry.k_warps == 0


def pending_norm(x: QuantizedActivations) -> tuple[Tensor, float, int]:
    """What is left to do of the rows' norm, as kernels take it: partial sums of squares, eps, and how many sums a row
    has, 0 where its norm is done (the tensor is then any)."""
    return (x.scale, 0.0, 0) if x.rms is None else (x.rms.squares, x.rms.eps, x.rms.squares.shape[1])
