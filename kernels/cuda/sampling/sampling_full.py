"""Sampling with every token a candidate, on CUDA: no top-k, or a large one, in three launches that a graph can
capture.

1. survey: bias and penalties; the best and the worst key of each block.
2. tally: adds every token's masses to the sums of its bucket, one of BINS between the best and the worst logit.
3. choose, one program per row: the samplers' selections from these sums (`sampling_select`), without a sort; and the
next step's state.

Masses are integers, so atomic additions give the same sums in any order. The assignment of tokens to buckets affects
the time, not the token.
"""

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.cuda.sampling.sampling_parts import (
    HIGHEST,
    LOG2_E,
    LOWEST,
    adjusted,
    advance,
    id_of,
    key_of,
    logit_of,
    mass,
    moment,
)
from quengine.kernels.cuda.sampling.sampling_select import (
    COUNT_PLANE,
    MOMENT_PLANE,
    NUCLEUS_PLANE,
    add_masses,
    bucket_of,
    drawn_key,
    half_gap,
    half_gap_limit,
)
from quengine.kernels.cuda.sampling.sampling_state import (
    BINS,
    FULL_BLOCK,
    NOTES,
    PLANES,
    DecodeState,
    FullRoom,
    SamplingBuffers,
)

LIST, TILE = 256, 32
"""Tokens that are compared pairwise, TILE at a time."""

CHUNK, PART, WARPS = 4096, 1024, 8
"""For the third launch: logits searched at a time, logits whose masses are computed at a time, warps."""


@triton.jit
def _survey_kernel(
    logit_ptr, slot_ptr, bias_ptr, count_ptr, float_ptr, adjusted_ptr, edge_ptr, plane_ptr, vocab,
    BIAS: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr, CLEARED: tl.constexpr, BINS: tl.constexpr,
    PLANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    id = block * BLOCK + tl.arange(0, BLOCK)
    inside = id < vocab
    x = tl.load(logit_ptr + row * vocab + id, mask=inside, other=float("-inf"))
    slot = tl.load(slot_ptr + row).to(tl.int64)
    x = adjusted(x, id, inside, slot, bias_ptr, count_ptr, float_ptr, vocab, BIAS, COUNTS)
    if BIAS or COUNTS:
        tl.store(adjusted_ptr + row * vocab + id, x, mask=inside)
    key = key_of(x, id)
    edges = edge_ptr + row * 2 * blocks + block
    tl.store(edges, tl.max(key, 0))
    tl.store(edges + blocks, tl.min(tl.where(x > float("-inf"), key, HIGHEST), 0))
    cell = block * CLEARED + tl.arange(0, CLEARED)
    zero = tl.zeros((CLEARED,), tl.int64)
    tl.store(plane_ptr + row * PLANES * BINS + cell, zero, mask=cell < (PLANES - 1) * BINS)


@triton.jit
def _edges(edge_ptr, row, blocks, BLOCKS: tl.constexpr):
    """The row's best and worst key."""
    i = tl.arange(0, BLOCKS)
    best = tl.load(edge_ptr + row * 2 * blocks + i, mask=i < blocks, other=LOWEST)
    worst = tl.load(edge_ptr + (row * 2 + 1) * blocks + i, mask=i < blocks, other=HIGHEST)
    return tl.max(best, 0), tl.min(worst, 0)


@triton.jit
def _tally_kernel(
    logit_ptr, edge_ptr, plane_ptr, slot_ptr, float_ptr, int_ptr, blocks, vocab,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, PLANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    sharp = tl.load(float_ptr + slot * 7)
    best_key, worst_key = _edges(edge_ptr, row, blocks, BLOCKS)
    best = logit_of(best_key)
    if (sharp > 0.0) & (tl.abs(best) < float("inf")):
        top_k = tl.load(int_ptr + slot * 4)
        id = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logit_ptr + row * vocab + id, mask=id < vocab, other=float("-inf"))
        gap_limit = half_gap_limit(best, logit_of(worst_key), sharp)
        half = half_gap(x, best)
        inside = half <= gap_limit
        bucket = bucket_of(half, inside, gap_limit, BINS)
        planes = plane_ptr + row * PLANES * BINS
        if (top_k > 0) & (top_k < vocab):
            tl.atomic_add(
                planes + COUNT_PLANE * BINS + bucket,
                tl.full((BLOCK,), 1, tl.int64),
                mask=inside,
                sem="relaxed",
            )
        if tl.load(float_ptr + slot * 7 + 1) < 1.0:
            gap = tl.where(inside, best.to(tl.float64) - x.to(tl.float64), 0.0)
            weight = mass(gap, LOG2_E)
            share = moment(weight, gap)
            tl.atomic_add(planes + MOMENT_PLANE * BINS + bucket, share, mask=inside, sem="relaxed")
            tl.atomic_add(
                planes + NUCLEUS_PLANE * BINS + bucket, weight, mask=inside & (weight > 0), sem="relaxed"
            )
        else:
            add_masses(planes, x, bucket, inside, best.to(tl.float64), float_ptr + slot * 7, BINS)


@triton.jit(do_not_specialize=["stride"])
def _choose_from_all_kernel(
    logit_ptr, edge_ptr, plane_ptr, id_ptr, note_ptr, slot_ptr, target_ptr, at_ptr, float_ptr, int_ptr, count_ptr,
    token_ptr, position_ptr, history_ptr, chosen_ptr, turn_ptr, stride, blocks, vocab, context,
    BLOCKS: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
    BINS: tl.constexpr, PLANES: tl.constexpr, NOTES: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    settings = float_ptr + slot * 7
    key, worst_key = _edges(edge_ptr, row, blocks, BLOCKS)
    best = logit_of(key)
    found = tl.abs(best) < float("inf")
    if found & (tl.load(settings) > 0.0):
        key = drawn_key(
            logit_ptr + row * vocab, plane_ptr + row * PLANES * BINS, id_ptr + row * vocab, note_ptr + row * NOTES,
            settings, int_ptr + slot * 4, at_ptr + row, best, logit_of(worst_key), vocab,
            LIST, TILE, CHUNK, PART, BINS,
        )  # fmt: skip
    token = tl.where(found, id_of(key), -1)
    advance(
        token, row, slot, target_ptr, at_ptr, token_ptr, position_ptr, history_ptr, count_ptr, int_ptr, chosen_ptr,
        turn_ptr, stride, vocab, context, COUNTS,
    )  # fmt: skip


def sample_from_all(
    logits: torch.Tensor, state: DecodeState, buffers: SamplingBuffers, room: FullRoom, pdl: bool
) -> torch.Tensor:
    """`sampling.sample_step` for every token a candidate: three launches."""
    buffers.check(logits, state)
    x = logits if room.adjusted is None else room.adjusted[: len(logits)]
    _survey(logits, x, state, buffers, room, pdl)
    _tally(x, state, buffers, room, pdl)
    _choose(x, state, buffers, room, pdl)
    return state.tokens


def _survey(
    logits: torch.Tensor,
    x: torch.Tensor,
    state: DecodeState,
    buffers: SamplingBuffers,
    room: FullRoom,
    pdl: bool,
) -> None:
    blocks = triton.cdiv(buffers.vocab, FULL_BLOCK)
    _survey_kernel[(blocks, logits.shape[0])](
        logits, state.slots, buffers.bias_plane, buffers.count_plane, buffers.floats, x, room.edges, room.planes,
        buffers.vocab,
        BIAS=buffers.bias is not None, COUNTS=buffers.counts is not None, BLOCK=FULL_BLOCK,
        CLEARED=triton.next_power_of_2(triton.cdiv((PLANES - 1) * BINS, blocks)), BINS=BINS, PLANES=PLANES, PDL=pdl,
        num_warps=4, launch_pdl=pdl, enable_fp_fusion=False,
    )  # fmt: skip


def _tally(x: torch.Tensor, state: DecodeState, buffers: SamplingBuffers, room: FullRoom, pdl: bool) -> None:
    blocks = triton.cdiv(buffers.vocab, FULL_BLOCK)
    _tally_kernel[(blocks, x.shape[0])](
        x, room.edges, room.planes, state.slots, buffers.floats, buffers.ints, blocks, buffers.vocab,
        BLOCKS=triton.next_power_of_2(blocks), BLOCK=FULL_BLOCK, BINS=BINS, PLANES=PLANES, PDL=pdl, num_warps=4,
        launch_pdl=pdl, enable_fp_fusion=False,
    )  # fmt: skip


def _choose(x: torch.Tensor, state: DecodeState, buffers: SamplingBuffers, room: FullRoom, pdl: bool) -> None:
    blocks = triton.cdiv(buffers.vocab, FULL_BLOCK)
    _choose_from_all_kernel[(x.shape[0],)](
        x, room.edges, room.planes, room.ids, room.notes, state.slots, state.targets, state.row_positions,
        buffers.floats, buffers.ints, buffers.count_plane, state.tokens, state.positions, state.history, *state.chosen,
        state.chosen.tokens.shape[1], blocks, buffers.vocab, state.history.shape[1],
        BLOCKS=triton.next_power_of_2(blocks), LIST=LIST, TILE=TILE, CHUNK=CHUNK, PART=PART, BINS=BINS,
        PLANES=PLANES, NOTES=NOTES, COUNTS=buffers.counts is not None, PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
        enable_fp_fusion=False,
    )  # fmt: skip
