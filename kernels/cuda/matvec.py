"""Matrix times a few rows, on packed weights: decode's matmul, 1 to 8 rows.

`matvec` gives fp32 rows, with the residual added if there is one. `matvec_swiglu` takes a paired gate/up weight and
gives silu(gate)*up, rounded for the next matmul. Everything can be captured in a CUDA graph: no host
synchronisation, and no allocation when `out` is given.

Definition: kernels/q_dot.py. Does not know: models, or how the launch geometry was found (launch_table.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.activations import (
    RoundedActivations,
    round_activations,
    round_group,
    store_rounded,
)
from quengine.kernels.cuda.launch_table import Geometry, matvec_geometry
from quengine.kernels.cuda.packed import FloatPart, PackedPart, PackedWeight
from quengine.kernels.cuda.q_dot import reduce_tile, row_order, tile_dots

MAX_ROWS = 8


@triton.jit
def _part_rows(
    planes, x_high, x_low, t_ptr, sums_ptr, tile0, tiles, T,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, K_WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """TILES tiles from `tile0` on, each shared by K_WARPS warps: fp32 [TILES, 8, 2, ROWS]."""
    thread = tl.arange(0, 32 * TILES * K_WARPS)
    warp = thread >> 5
    totals = tile_dots(
        planes, x_high, x_low, t_ptr, sums_ptr, tile0 + warp // K_WARPS, tiles, warp % K_WARPS, T, thread & 31,
        FMT, ROWS, K, K_WARPS, AHEAD, EARLY, EVEN, PDL, ASM,
    )  # fmt: skip
    return reduce_tile(totals, ROWS, TILES, K_WARPS)


@triton.jit
def _store_rows(
    y, out_ptr, residual_ptr, tile0, first, rows, N, T,
    ROWS: tl.constexpr, TILES: tl.constexpr, PAIRED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store y [TILES, 8, 2, ROWS] at columns first + 0 .. rows - 1 of out [T, N]."""
    tile = tile0 + tl.arange(0, TILES)[:, None, None, None]
    r = tl.arange(0, 8)[None, :, None, None]
    rh = tl.arange(0, 2)[None, None, :, None]
    row = tl.reshape(row_order(ROWS), [1, 1, 1, ROWS])
    if PAIRED:
        column = tile * 8 + r
        inside = column < rows // 2
        column += rh * (rows // 2)
    else:
        column = tile * 16 + rh * 8 + r
        inside = column < rows
    at = row * N + first + column
    inside &= row < T
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, y, mask=inside)


@triton.jit
def _matvec_kernel(
    out_ptr, residual_ptr, x_high, x_low, t_ptr, sums_ptr,
    low_a, high_a, scales_a, supers_a, tiles_a, rows_a,
    low_b, high_b, scales_b, supers_b, tiles_b, rows_b,
    first, N, T,
    FMT_A: tl.constexpr, FMT_B: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
    TILES: tl.constexpr, K_WARPS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
    EVEN_A: tl.constexpr, EVEN_B: tl.constexpr,
    PAIRED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One or two parts (FMT_B None: one) of a matrix, TILES tiles a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile0 = tl.program_id(0) * TILES
    if FMT_B is None:
        y = _part_rows(
            (low_a, high_a, scales_a, supers_a), x_high, x_low, t_ptr, sums_ptr, tile0, tiles_a, T,
            FMT_A, ROWS, K, TILES, K_WARPS, AHEAD, EARLY, EVEN_A, PDL, ASM,
        )  # fmt: skip
        _store_rows(y, out_ptr, residual_ptr, tile0, first, rows_a, N, T, ROWS, TILES, PAIRED, RESIDUAL)
    else:
        blocks_a = tl.cdiv(tiles_a, TILES)
        if tl.program_id(0) < blocks_a:
            y = _part_rows(
                (low_a, high_a, scales_a, supers_a), x_high, x_low, t_ptr, sums_ptr, tile0, tiles_a, T,
                FMT_A, ROWS, K, TILES, K_WARPS, AHEAD, EARLY, EVEN_A, PDL, ASM,
            )  # fmt: skip
            _store_rows(y, out_ptr, residual_ptr, tile0, first, rows_a, N, T, ROWS, TILES, PAIRED, RESIDUAL)
        else:
            tile0 -= blocks_a * TILES
            y = _part_rows(
                (low_b, high_b, scales_b, supers_b), x_high, x_low, t_ptr, sums_ptr, tile0, tiles_b, T,
                FMT_B, ROWS, K, TILES, K_WARPS, AHEAD, EARLY, EVEN_B, PDL, ASM,
            )  # fmt: skip
            _store_rows(
                y, out_ptr, residual_ptr, tile0, first + rows_a, rows_b, N, T, ROWS, TILES, PAIRED, RESIDUAL
            )  # fmt: skip


@triton.jit
def _swiglu_kernel(
    values_ptr, tickets_ptr, out_high, out_low, out_scale, out_sums, x_high, x_low, t_ptr, sums_ptr,
    low, high, scales, supers, tiles, width, T,
    FMT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, K_WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """silu(gate)*up of a paired matrix, rounded. A tile gives 8 outputs and a group has 32: with fewer than 4 tiles
    to a program, its programs leave their values in `values` and the last one to draw a ticket rounds the group."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile0 = tl.program_id(0) * TILES
    y = _part_rows(
        (low, high, scales, supers), x_high, x_low, t_ptr, sums_ptr, tile0, tiles, T,
        FMT, ROWS, K, TILES, K_WARPS, AHEAD, EARLY, EVEN, PDL, ASM,
    )  # fmt: skip
    gate, up = tl.split(tl.permute(y, [0, 1, 3, 2]))
    value = gate / (1.0 + tl.exp(-gate)) * up  # [TILES, 8, ROWS]
    order = row_order(ROWS)
    if TILES >= 4:
        GROUPS: tl.constexpr = TILES // 4
        by_row = tl.permute(tl.reshape(value, [GROUPS, 32, ROWS]), [2, 0, 1])
        coarse, fine, scale, x_sums = round_group(tl.reshape(by_row, [ROWS * GROUPS, 32]))
        group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[None, :]
        inside = (order[:, None] < T) & (group < width // 32)
        place = tl.reshape(order[:, None] * (width // 32) + group, [ROWS * GROUPS])
        store_rounded(
            out_high, out_low, out_scale, out_sums, place, tl.reshape(inside, [ROWS * GROUPS]),
            coarse, fine, scale, x_sums,
        )  # fmt: skip
    else:
        column = (tile0 + tl.arange(0, TILES)[:, None, None]) * 8 + tl.arange(0, 8)[None, :, None]
        row = tl.reshape(order, [1, 1, ROWS])
        tl.store(values_ptr + row * width + column, value, mask=(column < width) & (row < T))
        tl.debug_barrier()
        group = tile0 // 4
        ticket = tl.atomic_add(tickets_ptr + group, 1, sem="acq_rel", scope="gpu")
        if ticket == 4 // TILES - 1:
            rows = tl.arange(0, ROWS)
            at = rows[:, None] * width + group * 32 + tl.arange(0, 32)[None, :]
            # Other programs wrote these: not from this multiprocessor's own cache.
            values = tl.load(values_ptr + at, mask=(rows < T)[:, None], other=0.0, cache_modifier=".cg")
            coarse, fine, scale, x_sums = round_group(values)
            place = rows * (width // 32) + group
            store_rounded(
                out_high, out_low, out_scale, out_sums, place, rows < T, coarse, fine, scale, x_sums
            )
            tl.store(tickets_ptr + group, 0)


@triton.jit
def _float_kernel(
    out_ptr, residual_ptr, x_high, x_low, t_ptr, w_ptr, first, rows, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of plain floats times one row of rounded activations, all in fp32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < K
        x = tl.load(x_high + row * K + k, mask=inside, other=0).to(tl.int32) * 256
        x += tl.load(x_low + row * K + k, mask=inside, other=0).to(tl.int32)
        t = tl.load(t_ptr + row * (K // 32) + k // 32, mask=inside, other=0.0)
        w_at = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
        w = tl.load(w_at, mask=(n < rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += w * (x.to(tl.float32) * t)[None, :]
    y = tl.sum(total, axis=1)
    at = row * N + first + n
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=n < rows, other=0.0)
    tl.store(out_ptr + at, y, mask=n < rows)


def matvec(
    x: RoundedActivations,
    weight: PackedWeight,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [T, K] times weight [N, K], plus residual fp32 [T, N]: fp32 [T, N], T at most 8.

    `out` avoids the allocation; it may be the residual itself. `pdl`: launched before its predecessor in the stream
    ends, and reading weights meanwhile (sm_90 and later; the predecessor must not write the weights). Raises
    ValueError on other shapes.
    """
    _check(x, weight)
    y = torch.empty(x.rows, weight.rows, dtype=torch.float32, device=x.high.device) if out is None else out
    for name, given in (("out", y), ("residual", y if residual is None else residual)):
        if given.shape != (x.rows, weight.rows) or given.dtype != torch.float32 or not given.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous fp32 {[x.rows, weight.rows]}, not {list(given.shape)}"
            )
    first = 0
    parts = list(weight.parts)
    while parts:
        taken = parts[:2] if all(isinstance(part, PackedPart) for part in parts[:2]) else parts[:1]
        if isinstance(taken[0], FloatPart):
            _launch_float(x, taken[0], residual, y, first, pdl)
        else:
            _launch_packed(x, taken, weight.paired, residual, y, first, pdl)
        first += sum(part.rows for part in taken)
        parts = parts[len(taken) :]
    return y


@dataclass(frozen=True)
class SwigluScratch:
    """Room for `matvec_swiglu`, reusable by every call of one stream: values fp32 [T, 2F] and one
    ticket, int32, for each 32 outputs. Tickets are zero between launches."""

    values: Tensor
    tickets: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device | str) -> "SwigluScratch":
        """For up to `rows` rows of up to F = `width` outputs."""
        return cls(
            torch.empty(rows, 2 * width, dtype=torch.float32, device=device),
            torch.zeros(-(-width // 32), dtype=torch.int32, device=device),
        )


def matvec_swiglu(
    x: RoundedActivations,
    gate_up: PackedWeight,
    out: RoundedActivations | None = None,
    scratch: SwigluScratch | None = None,
    pdl: bool = False,
) -> RoundedActivations:
    """silu(gate)*up of x [T, K] times a merged weight [2F, K], rounded: [T, F], F a multiple of 32.

    Takes one launch for a paired weight. Otherwise three: the matmul, SwiGLU, rounding. `scratch` and `out` avoid
    the allocations. Raises ValueError on other shapes.
    """
    _check(x, gate_up)
    width = gate_up.rows // 2
    rounded = RoundedActivations.empty(x.rows, width, x.high.device) if out is None else out
    if (rounded.rows, rounded.cols) != (x.rows, width):
        raise ValueError(f"out holds {[rounded.rows, rounded.cols]}, not {[x.rows, width]}")
    room = SwigluScratch.empty(x.rows, width, x.high.device) if scratch is None else scratch
    if room.values.numel() < x.rows * 2 * width or room.tickets.numel() * 32 < width:
        raise ValueError(f"scratch holds {list(room.values.shape)}, needs {[x.rows, 2 * width]}")
    part = gate_up.parts[0]
    if gate_up.paired and isinstance(part, PackedPart):
        _launch_swiglu(x, part, room, rounded, pdl)
        return rounded
    both = matvec(x, gate_up, out=room.values.view(-1)[: x.rows * 2 * width].view(x.rows, -1), pdl=pdl)
    return round_activations(swiglu_rows(both, pdl=pdl), out=rounded, pdl=pdl)


@triton.jit
def _swiglu_rows_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def swiglu_rows(gate_up: Tensor, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """silu(gate)*up of contiguous fp32 rows [T, 2F]: fp32 [T, F]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=torch.float32, device=gate_up.device) if out is None else out
    _swiglu_rows_kernel[(rows, triton.cdiv(width, 1024))](
        gate_up, y, width, BLOCK=1024, PDL=pdl, num_warps=4, **_pdl_option(pdl)
    )
    return y


def uses_assembly() -> bool:
    """Whether kernels may hold NVIDIA instructions: not in the interpreter, not on other makers' GPUs."""
    return torch.cuda.is_available() and torch.version.hip is None


def _pdl_option(pdl: bool) -> Mapping[str, bool]:
    return {"launch_pdl": True} if pdl else {}


def _check(x: RoundedActivations, weight: PackedWeight) -> None:
    if x.cols != weight.cols:
        raise ValueError(f"activations of width {x.cols} for weights of width {weight.cols}")
    if not 1 <= x.rows <= MAX_ROWS:
        raise ValueError(f"matvec takes 1 to {MAX_ROWS} rows, not {x.rows}; use matmul")


def _kernel_rows(rows: int) -> int:
    return int(triton.next_power_of_2(rows))


def _register_limit(geometry: Geometry, rows: int) -> int | None:
    """The limit was measured with one row; more than two need the registers."""
    return geometry.registers if geometry.registers and rows <= 2 else None


def _is_even(part: PackedPart, geometry: Geometry) -> bool:
    return part.tiles % geometry.tiles == 0 and part.chunks % geometry.k_warps == 0


def _launch_packed(
    x: RoundedActivations,
    parts: list[PackedPart | FloatPart],
    paired: bool,
    residual: Tensor | None,
    out: Tensor,
    first: int,
    pdl: bool,
) -> None:
    packed = [part for part in parts if isinstance(part, PackedPart)]
    geometry = matvec_geometry(packed, "rows")
    a, b = packed[0], packed[-1]
    two = len(packed) == 2
    blocks = sum(triton.cdiv(part.tiles, geometry.tiles) for part in packed)
    _matvec_kernel[(blocks,)](
        out, out if residual is None else residual, x.high, x.low, x.scale, x.sums,
        a.low, a.high, a.scales, a.supers, a.tiles, a.rows,
        b.low, b.high, b.scales, b.supers, b.tiles, b.rows,
        first, out.shape[1], x.rows,
        FMT_A=a.layout, FMT_B=b.layout if two else None, ROWS=_kernel_rows(x.rows), K=x.cols,
        TILES=geometry.tiles, K_WARPS=geometry.k_warps, AHEAD=geometry.ahead, EARLY=geometry.early,
        EVEN_A=_is_even(a, geometry), EVEN_B=_is_even(b, geometry),
        PAIRED=paired, RESIDUAL=residual is not None, PDL=pdl, ASM=uses_assembly(),
        num_warps=geometry.warps, maxnreg=_register_limit(geometry, x.rows),
        **_pdl_option(pdl),
    )  # fmt: skip


def _launch_swiglu(
    x: RoundedActivations, part: PackedPart, scratch: SwigluScratch, out: RoundedActivations, pdl: bool
) -> None:
    geometry = matvec_geometry([part], "swiglu")
    _swiglu_kernel[(triton.cdiv(part.tiles, geometry.tiles),)](
        scratch.values, scratch.tickets, out.high, out.low, out.scale, out.sums,
        x.high, x.low, x.scale, x.sums, part.low, part.high, part.scales, part.supers,
        part.tiles, part.rows // 2, x.rows,
        FMT=part.layout, ROWS=_kernel_rows(x.rows), K=x.cols,
        TILES=geometry.tiles, K_WARPS=geometry.k_warps, AHEAD=geometry.ahead, EARLY=geometry.early,
        EVEN=_is_even(part, geometry),
        PDL=pdl, ASM=uses_assembly(), num_warps=geometry.warps, maxnreg=_register_limit(geometry, x.rows),
        **_pdl_option(pdl),
    )  # fmt: skip


def _launch_float(
    x: RoundedActivations, part: FloatPart, residual: Tensor | None, out: Tensor, first: int, pdl: bool
) -> None:
    block = 8
    _float_kernel[(triton.cdiv(part.rows, block), x.rows)](
        out, out if residual is None else residual, x.high, x.low, x.scale, part.weight, first, part.rows,
        out.shape[1], K=x.cols, BLOCK_N=block, BLOCK_K=min(512, _kernel_rows(x.cols)),
        RESIDUAL=residual is not None, PDL=pdl, num_warps=4, **_pdl_option(pdl),
    )  # fmt: skip
