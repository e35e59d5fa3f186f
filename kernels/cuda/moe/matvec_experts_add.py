"""The down projection of each row's experts in decode, their weighted sum with the residual, and the start of the next
norm, in one launch.

The warps of a program share the experts of a row, and the columns of each. Defined in kernels/moe/experts.py,
kernels/q_dot.py, kernels/rms_norm.py.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.mma import prefetch
from quengine.kernels.cuda.gemm.staged_book import begin_book, end_book
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, RmsPartials
from quengine.kernels.cuda.gemv.matvec_program import (
    Matrix,
    QuantizationScratch,
    QuantizedRow,
    begin_norm,
)
from quengine.kernels.cuda.gemv.q_dot import start_tile, tile_dots
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.matvec_expert_rows import (
    check_routing,
    check_rows,
    expert_program,
    matvec_expert_rows,
    quantized_row,
    share_constants,
)
from quengine.kernels.cuda.moe.share import own_number
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights.launch_table import experts_add_geometry
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.moe.router import Routing
from quengine.kernels.rms_norm import RMSNorm


@triton.jit
def _own_slot(wanted, row, known_experts_ptr, first_expert, COUNT: tl.constexpr, USED: tl.constexpr):
    """Of a row, by their order, slot number `wanted` of those whose experts are here, USED if there are fewer; its
    expert's number here; and how many there are."""
    slot, number, own = USED + 0 * wanted, 0 * wanted, 0
    for s in tl.static_range(USED):
        expert = tl.load(known_experts_ptr + row * USED + s, cache_modifier=".cg")
        mine = own_number(expert, first_expert, COUNT, True)
        here = mine < COUNT
        slot = tl.where(here & (wanted == own), s, slot)
        number = tl.where(here & (wanted == own), mine, number)
        own += here.to(tl.int32)
    return slot, number, own


@triton.jit
def _experts_from(
    first, row, known_experts_ptr, planes, expert_tiles, first_expert,
    COUNT: tl.constexpr, SHARE: tl.constexpr, USED: tl.constexpr, SLOTS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Where this thread reads slots first .. first + SLOTS of a row, of those whose experts are here: expert matrix,
    tile, and slot, USED where there is none. Then the number of slots.
    """
    warp = tl.arange(0, 32 * P.tiles * SLOTS * P.k_warps) >> 5
    slot = first + warp // P.k_warps % SLOTS
    own = USED
    # Written two launches before; .cg, as L1 may hold older values.
    if SHARE:
        slot, expert, own = _own_slot(slot, row, known_experts_ptr, first_expert, COUNT, USED)
    else:
        expert = tl.load(known_experts_ptr + row * USED + tl.minimum(slot, USED - 1), cache_modifier=".cg")
    begin = expert * expert_tiles
    tile = begin + tl.program_id(0) * P.tiles + warp // (P.k_warps * SLOTS)
    end = tl.where(slot < USED, begin + expert_tiles, 0)
    return Matrix(planes, end), tile, slot, own


@triton.jit
def _weighted_sums(
    queue, book, matrix, tile, slot, row, x, weights_ptr,
    SHARE: tl.constexpr, USED: tl.constexpr, SLOTS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The weighted sum of products over this thread's `slot`, fp32 [tiles, 8, 2]."""
    thread = tl.arange(0, 32 * P.tiles * SLOTS * P.k_warps)
    warp = thread >> 5
    of_pair = quantized_row(x, row * USED + tl.minimum(slot, USED - 1), x.squares, P.cols)
    weight = tl.load(weights_ptr + row * USED + slot, mask=slot < USED, other=0.0)
    acc = tile_dots(queue, book, matrix, of_pair, tile, warp % P.k_warps, thread & 31, P)
    near, far = acc[0] * weight, acc[1] * weight
    if SHARE:  # the row of the last slot may be undefined
        near, far = tl.where(slot < USED, near, 0.0), tl.where(slot < USED, far, 0.0)
    both = tl.join(near, far)
    split = tl.reshape(both, [P.tiles, SLOTS * P.k_warps, 8, 4, 2])
    return tl.sum(tl.sum(split, axis=3), axis=1)


@triton.jit
def _bias_sum(
    row, column, inside, experts_ptr, weights_ptr, bias_ptr, N, first_expert,
    COUNT: tl.constexpr, SHARE: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """The weighted sum of the biases of a row's experts that are here."""
    total = tl.zeros(column.shape, tl.float32)
    for slot in range(USED):
        expert = own_number(tl.load(experts_ptr + row * USED + slot), first_expert, COUNT, SHARE)
        weight = tl.load(weights_ptr + row * USED + slot)
        read = inside
        if SHARE:
            read &= expert < COUNT
        total += weight * tl.load(bias_ptr + expert * N + column, mask=read, other=0.0)
    return total


@triton.jit(do_not_specialize=["first_expert"])
def _experts_add_kernel(
    hidden_ptr, residual_ptr, words_ptr, norm_ptr, out_high, out_low, out_scale, out_sums, squares_ptr,
    x_high, x_low, t_ptr, sums_ptr, known_experts_ptr, weights_ptr, bias_ptr, low, high, scales, supers,
    expert_tiles, N, first_expert,
    COUNT: tl.constexpr, SHARE: tl.constexpr, USED: tl.constexpr, SLOTS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Program (block of P.tiles tiles, row); the tiles are one or an even number. The previous launch let
    this one start after the router had ended, so the experts to read are known before it waits. Warps share the
    row's experts that are here.
    """
    if P.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    planes = (low, high, scales, supers)
    THREADS: tl.constexpr = 32 * P.tiles * SLOTS * P.k_warps
    thread = tl.arange(0, THREADS)
    k_warp = (thread >> 5) % P.k_warps
    matrix, tile, slot, own = _experts_from(
        0, row, known_experts_ptr, planes, expert_tiles, first_expert, COUNT, SHARE, USED, SLOTS, P
    )  # fmt: skip
    FMT: tl.constexpr = P.layout
    begun = begin_book(high, FMT, THREADS, P.asm)
    queue = start_tile(matrix, tile, k_warp, thread & 31, P)
    book = end_book(begun, FMT, THREADS, P.asm)
    column = tl.program_id(0) * (16 * P.tiles) + tl.arange(0, 16 * P.tiles)[None, :]
    inside = column < N
    if norm_ptr is not None:
        prefetch(norm_ptr + tl.minimum(column, N - 1), P.asm)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    residual = tl.load(residual_ptr + row * N + column, mask=inside, other=0.0)
    x = QuantizedRow(x_high, x_low, t_ptr, sums_ptr, x_high, 0.0)
    y = _weighted_sums(queue, book, matrix, tile, slot, row, x, weights_ptr, SHARE, USED, SLOTS, P)
    for first in tl.static_range(SLOTS, USED, SLOTS):
        if not SHARE or first < own:
            others, at, of_others, _ = _experts_from(
                first, row, known_experts_ptr, planes, expert_tiles, first_expert, COUNT, SHARE, USED, SLOTS, P
            )  # fmt: skip
            begun_others = start_tile(others, at, k_warp, thread & 31, P)
            y += _weighted_sums(
                begun_others, book, others, at, of_others, row, x, weights_ptr, SHARE, USED, SLOTS, P
            )  # fmt: skip
    total = tl.reshape(tl.permute(y, [0, 2, 1]), [1, 16 * P.tiles])
    if bias_ptr is not None:
        total += _bias_sum(
            row, column, inside, known_experts_ptr, weights_ptr, bias_ptr, N, first_expert, COUNT, SHARE, USED
        )  # fmt: skip
    hidden = total + residual
    tl.store(hidden_ptr + row * N + column, hidden, mask=inside)
    if norm_ptr is not None:
        out = QuantizedRow(out_high, out_low, out_scale, out_sums, squares_ptr, 0.0)
        block, blocks = tl.program_id(0), tl.num_programs(0)
        begin_norm(hidden, None, row, column, inside, norm_ptr, out, words_ptr, N, block, blocks, P.tiles)


@triton.jit(do_not_specialize=["first_expert"])
def _weigh_rows_kernel(
    out_ptr, products_ptr, experts_ptr, weights_ptr, residual_ptr, N, first_expert,
    COUNT: tl.constexpr, SHARE: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Products [T * k, N] of each row's experts that are here, weighted and added in ascending order, plus the
    residual."""
    launch_then_wait(PDL)
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(USED):
        weight = tl.load(weights_ptr + row * USED + slot)
        read = inside
        if SHARE:
            expert = tl.load(experts_ptr + row * USED + slot)
            read &= own_number(expert, first_expert, COUNT, SHARE) < COUNT
        total += weight * tl.load(products_ptr + (row * USED + slot) * N + column, mask=read, other=0.0)
    residual = tl.load(residual_ptr + row * N + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * N + column, total + residual, mask=inside)


def matvec_experts_add(
    gated: QuantizedActivations,
    routing: Routing,
    down: ExpertWeights,
    residual: Tensor,
    next_norm: RMSNorm | None = None,
    scratch: QuantizationScratch | None = None,
    pdl: bool = False,
) -> Tensor | RmsNormed:
    """The weighted sum of `down` [N, F] of each row's experts of gated [T * k, F], plus residual fp32 [T, N].

    `gated` is the result of `matvec_experts_glu` for the same routing. With `next_norm`, a packed weight and outputs
    in whole groups of 32, the result's norm is started. A row's bits follow from its own values. `scratch`, for T * N
    values, avoids an allocation. Raises ValueError for other shapes.
    """
    check_routing(routing, down)
    rows, used = routing.experts.shape
    check_rows(gated, down, rows * used)
    part, width, device = down.parts[0], down.expert_rows, residual.device
    if residual.shape != (rows, width) or not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous {[rows, width]}, not {list(residual.shape)}")
    hidden = residual.new_empty(residual.shape)
    if not isinstance(part, PackedPart):
        products = matvec_expert_rows(gated, routing, down, pdl)
        _weigh_rows_kernel[(triton.cdiv(width, 256), rows)](
            hidden, products, routing.experts, routing.weights, residual, width, down.first, **share_constants(down),
            USED=used, BLOCK=256, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        return hidden
    if next_norm is None or width % 32:
        _launch(gated, routing, down, part, residual, hidden, None, pdl)
        return hidden
    room = QuantizationScratch.of(scratch, rows * width, device)
    return _launch(gated, routing, down, part, residual, hidden, (next_norm, room), pdl)


def _launch(
    gated: QuantizedActivations,
    routing: Routing,
    down: ExpertWeights,
    part: PackedPart,
    residual: Tensor,
    hidden: Tensor,
    begun: tuple[RMSNorm, QuantizationScratch] | None,
    pdl: bool,
) -> Tensor | RmsNormed:
    """Launches the sum into `hidden`; `begun`: the norm to start, and its scratch."""
    rows, used = routing.experts.shape
    tiles, width, device = down.expert_tiles, down.expert_rows, residual.device
    geometry, slots = experts_add_geometry(part, tiles, used)
    programs = triton.cdiv(tiles, geometry.tiles)
    program = expert_program(part, tiles, geometry, gated, pdl)
    program = replace(program, even=program.even and used % slots == 0 and down.share is None)
    out: QuantizedActivations | None = None
    outputs: tuple[Tensor | None, ...] = (residual, None, *(residual,) * 5)
    if begun is not None:
        norm, room = begun
        out = QuantizedActivations.empty(rows, width, device)
        squares = torch.empty(rows, programs, dtype=torch.float32, device=device)
        outputs = (room.words, norm.weight, out.high, out.low, out.scale, out.sums, squares)
        out = replace(out, rms=RmsPartials(squares, norm.eps))
    _experts_add_kernel[(programs, rows)](
        hidden, residual, *outputs, gated.high, gated.low, gated.scale, gated.sums, routing.experts, routing.weights,
        down.bias, *part.planes, tiles, width, down.first, **share_constants(down), USED=used, SLOTS=slots, P=program,
        num_warps=geometry.warps * slots, maxnreg=geometry.registers or None, launch_pdl=pdl,
    )  # fmt: skip
    return hidden if out is None else RmsNormed(hidden, out)
