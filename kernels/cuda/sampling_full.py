"""Sampling with every token a candidate, on CUDA: no top-k, or a large one, in three launches that a graph can hold.

Nothing is sorted. The samplers are selections: "the first token, best first, with which the mass reaches `need`" is
top-k's last token (mass 1 each), top-p's last, and, with what those have left, the token that is drawn.

1. survey: bias and penalties; the best and the worst key of each block.
2. tally: every token's masses are added to the sums of its bucket, one of BINS between the best and the worst logit.
3. choose, one program a row: each selection finds its bucket in the sums, lists the bucket's tokens, and narrows the
   list by buckets of its own until LIST are left, which are compared with each other.

Masses are integers, so that atomic additions in any order give the same sums. Buckets are only the way: which tokens
share one changes the time and not the token. Typical-p selects by another order (surprise against its mean), and what
it leaves is tallied anew in the third launch.
"""

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.sampling_parts import (
    HIGHEST,
    LOG2_E,
    LOWEST,
    adjusted,
    advance,
    ceiling,
    id_of,
    key_of,
    logit_of,
    mass,
    moment,
    uniform_of,
)
from quengine.kernels.cuda.sampling_state import (
    BINS,
    PLANES,
    DecodeState,
    FullRoom,
    SamplingBuffers,
    block_size,
)

LIST = 64
"""Tokens that are compared each with each."""

CHUNK, PART, WARPS = 4096, 1024, 8
"""Of the third launch: logits that are searched at a time, logits whose masses are computed at a time, warps."""

_COUNT, _TYPICAL, _NUCLEUS, _DRAW = (tl.constexpr(stage) for stage in range(4))
_MOMENT_PLANE, _SCRATCH_PLANE = tl.constexpr(3), tl.constexpr(4)


@triton.jit
def _survey_kernel(
    logit_ptr,
    bias_ptr,
    count_ptr,
    float_ptr,
    adjusted_ptr,
    edge_ptr,
    plane_ptr,
    vocab,
    BIAS: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CLEARED: tl.constexpr,
    BINS: tl.constexpr,
    PLANES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block, blocks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    id = block * BLOCK + tl.arange(0, BLOCK)
    inside = id < vocab
    x = tl.load(logit_ptr + row * vocab + id, mask=inside, other=float("-inf"))
    x = adjusted(x, id, inside, row, bias_ptr, count_ptr, float_ptr, vocab, BIAS, COUNTS)
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
def _reach(best, worst, sharp):
    """Half the distance from the best logit, fp32, beyond which tokens have no mass or are not there."""
    far = tl.minimum(tl.maximum(23.0 / sharp, 16.0), 3.0e38).to(tl.float32)
    return tl.maximum(tl.minimum(best * 0.5 - worst * 0.5, far), 1e-30)


@triton.jit
def _bucket(x, best, reach, mean, by_distance, BINS: tl.constexpr):
    """The bucket of each logit fp32 and whether it is within reach.

    By distance: of its gap's distance from the mean gap. Halves, since a whole gap may be above fp32's largest number.
    """
    half = best * 0.5 - x * 0.5
    inside = half <= reach
    if by_distance:
        half = (tl.abs((best.to(tl.float64) - x.to(tl.float64)) - mean) * 0.5).to(tl.float32)
    half = tl.where(inside, half, 0.0)
    return tl.minimum((half * ((BINS - 1) / reach)).to(tl.int32), BINS - 1), inside


@triton.jit
def _tally_kernel(
    logit_ptr,
    edge_ptr,
    plane_ptr,
    float_ptr,
    int_ptr,
    blocks,
    vocab,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    PLANES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    sharp = tl.load(float_ptr + row * 7)
    best_key, worst_key = _edges(edge_ptr, row, blocks, BLOCKS)
    best = logit_of(best_key)
    if (sharp > 0.0) & (tl.abs(best) < float("inf")):
        top_k = tl.load(int_ptr + row * 4)
        id = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logit_ptr + row * vocab + id, mask=id < vocab, other=float("-inf"))
        reach = _reach(best, logit_of(worst_key), sharp)
        bucket, inside = _bucket(x, best, reach, 0.0, False, BINS)
        planes = plane_ptr + row * PLANES * BINS
        if (top_k > 0) & (top_k < vocab):
            tl.atomic_add(planes + bucket, tl.full((BLOCK,), 1, tl.int64), mask=inside, sem="relaxed")
        if tl.load(float_ptr + row * 7 + 1) < 1.0:
            gap = tl.where(inside, best.to(tl.float64) - x.to(tl.float64), 0.0)
            weight = mass(gap, LOG2_E)
            share = moment(weight, gap)
            tl.atomic_add(planes + _MOMENT_PLANE * BINS + bucket, share, mask=inside, sem="relaxed")
            tl.atomic_add(
                planes + _TYPICAL * BINS + bucket, weight, mask=inside & (weight > 0), sem="relaxed"
            )
        else:
            _tally(planes, x, bucket, inside, best.to(tl.float64), float_ptr + row * 7, BINS)


@triton.jit
def _tally(planes, x, bucket, inside, top, settings, BINS: tl.constexpr):
    """Add the masses that top-p and the draw go by to the sums of the buckets."""
    wide = x.to(tl.float64)
    gap = tl.where(inside, top - wide, 0.0)
    if tl.load(settings + 2) < 1.0:
        weight = mass(gap, LOG2_E)
        tl.atomic_add(planes + BINS + bucket, weight, mask=inside & (weight > 0), sem="relaxed")
    weight = mass(gap, tl.load(settings))
    drawn = inside & (weight > 0) & (wide >= top + tl.load(settings + 3))
    tl.atomic_add(planes + 2 * BINS + bucket, weight, mask=drawn, sem="relaxed")


@triton.jit
def _worth(x, stage, top, settings):
    """A token's mass in a selection, int64."""
    wide = x.to(tl.float64)
    drawing = stage == _DRAW
    weight = mass(tl.maximum(top - wide, 0.0), tl.where(drawing, tl.load(settings), LOG2_E))
    weight = tl.where(drawing & (wide < top + tl.load(settings + 3)), 0, weight)
    return tl.where(stage == _COUNT, 1, weight)


@triton.jit
def _in_play(x, key, best, floor, cut, cut_key, mean):
    """Whether a token is left by top-k (keys from `floor`) and by typical-p (up to `cut` from the mean gap)."""
    distance = tl.abs((best.to(tl.float64) - x.to(tl.float64)) - mean)
    return (key >= floor) & ((distance < cut) | ((distance == cut) & (key >= cut_key)))


@triton.jit
def _crossing(plane_ptr, limit, need, BINS: tl.constexpr):
    """The bucket below `limit` in which the sum reaches `need` (`limit` if none), and the sum before it."""
    b = tl.arange(0, BINS)
    reached = tl.cumsum(tl.load(plane_ptr + b, mask=b < limit, other=0), 0)
    short = (b < limit) & (reached < need)
    return tl.sum(short.to(tl.int32), 0), tl.max(tl.where(short, reached, 0), 0)


@triton.jit
def _sum_below(plane_ptr, limit, BINS: tl.constexpr):
    b = tl.arange(0, BINS)
    return tl.sum(tl.load(plane_ptr + b, mask=b < limit, other=0), 0)


@triton.jit
def _clear(plane_ptr, BINS: tl.constexpr):
    tl.debug_barrier()
    tl.store(plane_ptr + tl.arange(0, BINS), tl.zeros((BINS,), tl.int64))
    tl.debug_barrier()


@triton.jit
def _append(id_ptr, cursor_ptr, id, found):
    """Write the tokens that were found behind those in the list, in no order."""
    slot = tl.atomic_add(cursor_ptr + id * 0, tl.full(id.shape, 1, tl.int32), mask=found, sem="relaxed")
    tl.store(id_ptr + slot, id, mask=found)


@triton.jit
def _restart(cursor_ptr):
    tl.debug_barrier()
    tl.store(cursor_ptr, 0)
    tl.debug_barrier()


@triton.jit
def _length(cursor_ptr):
    tl.debug_barrier()
    return tl.load(cursor_ptr, volatile=True)


@triton.jit
def _gather(
    x_ptr, id_ptr, cursor_ptr, vocab, wanted, by_distance, best, reach, narrowed, floor, cut, cut_key, mean,
    CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """List the tokens of bucket `wanted` that are in play; how many there are."""
    _restart(cursor_ptr)
    for start in range(0, vocab, CHUNK):
        id = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + id, mask=id < vocab, other=float("-inf"))
        bucket, found = _bucket(x, best, reach, mean, by_distance, BINS)
        found = found & (bucket == wanted)
        if narrowed:
            found = found & _in_play(x, key_of(x, id), best, floor, cut, cut_key, mean)
        _append(id_ptr, cursor_ptr, id, found)
    return _length(cursor_ptr)


@triton.jit
def _retally(
    x_ptr, planes, vocab, by_distance, best, reach, top, settings, floor, cut, cut_key, mean,
    PART: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The sums anew, of tokens in play: by distance into the scratch plane, else as the second launch does."""
    for start in range(0, vocab, PART):
        id = start + tl.arange(0, PART)
        x = tl.load(x_ptr + id, mask=id < vocab, other=float("-inf"))
        bucket, inside = _bucket(x, best, reach, mean, by_distance, BINS)
        inside = inside & _in_play(x, key_of(x, id), best, floor, cut, cut_key, mean)
        if by_distance:
            weight = _worth(x, _TYPICAL, top, settings)
            cell = planes + _SCRATCH_PLANE * BINS + bucket
            tl.atomic_add(cell, weight, mask=inside & (weight > 0), sem="relaxed")
        else:
            _tally(planes, x, bucket, inside, top, settings, BINS)
    tl.debug_barrier()


@triton.jit
def _best_in_play(x_ptr, vocab, best, floor, cut, cut_key, mean, PART: tl.constexpr):
    top = best * 0.0 + float("-inf")
    for start in range(0, vocab, PART):
        id = start + tl.arange(0, PART)
        x = tl.load(x_ptr + id, mask=id < vocab, other=float("-inf"))
        kept = _in_play(x, key_of(x, id), best, floor, cut, cut_key, mean)
        top = tl.maximum(top, tl.max(tl.where(kept, x, float("-inf")), 0))
    return top.to(tl.float64)


@triton.jit
def _listed_worth(x_ptr, id_ptr, n, floor, stage, top, settings, LIST: tl.constexpr):
    """The masses of the listed tokens from key `floor` on, and their moments, added up."""
    weights, moments = tl.zeros((LIST,), tl.int64), tl.zeros((LIST,), tl.int64)
    for start in range(0, n, LIST):
        at = start + tl.arange(0, LIST)
        id = tl.load(id_ptr + at, mask=at < n, other=0)
        x = tl.load(x_ptr + id)
        counted = (at < n) & (key_of(x, id) >= floor)
        weight = tl.where(counted, _worth(x, stage, top, settings), 0)
        weights += weight
        moments += tl.where(counted, moment(weight, tl.maximum(top - x.to(tl.float64), 0.0)), 0)
    return tl.sum(weights, 0), tl.sum(moments, 0)


@triton.jit
def _place(x, id, by_key, best, mean):
    """int64 that rises in the order of a selection."""
    distance = tl.abs((best.to(tl.float64) - x.to(tl.float64)) - mean)
    return tl.where(by_key, ~key_of(x, id), distance.to(tl.int64, bitcast=True))


@triton.jit
def _shift(width):
    """How far to shift a number up to `width` (uint64, not 0) so that it is below 2048 and the largest is not 0."""
    exponent = (width.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
    return tl.maximum(exponent - 10, 0)


@triton.jit
def _narrow(
    x_ptr, id_ptr, cursor_ptr, plane_ptr, n, need, by_key, stage, best, mean, top, settings,
    PART: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Cut the list to the tokens of the bucket in which the mass reaches `need`: one round of a radix selection.

    Returns the new length, what is still needed, and the order to go on with: where all distances are the same,
    nothing is cut, and keys decide next.
    """
    first, last = tl.full((PART,), HIGHEST, tl.int64), tl.full((PART,), LOWEST, tl.int64)
    for start in range(0, n, PART):
        at = start + tl.arange(0, PART)
        id = tl.load(id_ptr + at, mask=at < n, other=0)
        place = _place(tl.load(x_ptr + id), id, by_key, best, mean)
        first = tl.where(at < n, tl.minimum(first, place), first)
        last = tl.where(at < n, tl.maximum(last, place), last)
    origin = tl.min(first, 0)
    width = (tl.max(last, 0) - origin).to(tl.uint64)
    if width != 0:
        shift = _shift(width).to(tl.uint64)
        _clear(plane_ptr, BINS)
        for start in range(0, n, PART):
            at = start + tl.arange(0, PART)
            id = tl.load(id_ptr + at, mask=at < n, other=0)
            x = tl.load(x_ptr + id)
            bucket = ((_place(x, id, by_key, best, mean) - origin).to(tl.uint64) >> shift).to(tl.int32)
            weight = _worth(x, stage, top, settings)
            tl.atomic_add(plane_ptr + bucket, weight, mask=(at < n) & (weight > 0), sem="relaxed")
        tl.debug_barrier()
        wanted, before = _crossing(plane_ptr, BINS, need, BINS)
        need -= before
        _restart(cursor_ptr)
        for start in range(0, n, PART):
            at = start + tl.arange(0, PART)
            id = tl.load(id_ptr + at, mask=at < n, other=0)
            place = _place(tl.load(x_ptr + id), id, by_key, best, mean)
            found = (at < n) & (((place - origin).to(tl.uint64) >> shift).to(tl.int32) == wanted)
            tl.debug_barrier()  # all have read this part before some of it is written over
            _append(id_ptr, cursor_ptr, id, found)
        n = _length(cursor_ptr)
    else:
        by_key = by_key | True
    return n, need, by_key


@triton.jit
def _first_to_reach(
    x_ptr, id_ptr, n, need, by_distance, stage, best, mean, top, settings, LIST: tl.constexpr
):
    """Key and distance of the listed token (n <= LIST) with which the mass reaches `need`."""
    at = tl.arange(0, LIST)
    id = tl.load(id_ptr + at, mask=at < n, other=0)
    x = tl.load(x_ptr + id)
    key = key_of(x, id)
    distance = tl.abs((best.to(tl.float64) - x.to(tl.float64)) - mean)
    order = tl.where(by_distance, distance, 0.0)
    weight = tl.where(at < n, _worth(x, stage, top, settings), 0)
    # earlier[j, i]: token j comes before token i.
    tied = (order[:, None] == order[None, :]) & (key[:, None] > key[None, :])
    earlier = (order[:, None] < order[None, :]) | tied
    before = tl.sum(tl.where(earlier, weight[:, None], 0), 0)
    weight = tl.where(at < n, _worth(x, stage, top, settings), 0)
    reaches = (at < n) & (before < need) & (need <= before + weight)
    return tl.max(tl.where(reaches, key, LOWEST), 0), tl.max(tl.where(reaches, distance, 0.0), 0)


@triton.jit
def _is_active(stage, settings, int_ptr, vocab):
    """Whether the row's settings ask for this selection; it always draws."""
    top_k = tl.load(int_ptr)
    counts = (stage == _COUNT) & (top_k > 0) & (top_k < vocab)
    typical = (stage == _TYPICAL) & (tl.load(settings + 1) < 1.0)
    return counts | typical | ((stage == _NUCLEUS) & (tl.load(settings + 2) < 1.0)) | (stage == _DRAW)


@triton.jit
def _needed(stage, total, settings, int_ptr, position_ptr):
    """The mass that a selection has to reach, of `total` (int64, above 0)."""
    if stage == _COUNT:
        need = tl.load(int_ptr)
    elif stage == _NUCLEUS:
        need = tl.maximum(ceiling(tl.load(settings + 2) * total.to(tl.float64)), 1)
    elif stage == _TYPICAL:
        need = (tl.load(settings + 1) * total.to(tl.float64)).to(tl.int64) + 1
    else:
        need = (uniform_of(int_ptr, position_ptr) * total.to(tl.float64)).to(tl.int64) + 1
    return tl.minimum(need, total)


@triton.jit
def _drawn_key(
    x_ptr, planes, id_ptr, cursor_ptr, settings, int_ptr, position_ptr, best, worst, vocab,
    LIST: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The key of the token that the row's samplers draw; `best` and `worst` are its finite logits' fp32 ends.

    The row's settings are read where they are used: kept in registers, they would be spilled.
    """
    reach = _reach(best, worst, tl.load(settings))
    top = best.to(tl.float64)
    narrowed = tl.load(settings + 1) < 1.0
    # In play for all selections to come, once typical-p has chosen: see _in_play.
    lowest = tl.full((), LOWEST, tl.int64)
    floor, cut, cut_key, mean = lowest, top * 0 + float("inf"), lowest, top * 0
    # Where the last selection ended: no later token counts. The list holds that bucket's tokens, or part of them.
    end_key, end_bucket, n, whole = lowest, vocab * 0 + BINS, vocab * 0, vocab == vocab
    for stage in range(4):
        if _is_active(stage, settings, int_ptr, vocab):
            by_distance = stage == _TYPICAL
            if not whole:
                n = _gather(
                    x_ptr, id_ptr, cursor_ptr, vocab, end_bucket, False, best, reach,
                    narrowed, floor, cut, cut_key, mean, CHUNK, BINS,
                )  # fmt: skip
                whole = whole | True
            weights, moments = _listed_worth(x_ptr, id_ptr, n, end_key, stage, top, settings, LIST)
            plane = planes + tl.where(stage == _COUNT, 0, tl.where(stage == _DRAW, 2, 1)) * BINS
            total = _sum_below(plane, end_bucket, BINS) + weights
            need = _needed(stage, total, settings, int_ptr, position_ptr)
            if by_distance:
                moments += _sum_below(planes + _MOMENT_PLANE * BINS, end_bucket, BINS)
                mean = moments.to(tl.float64) / total.to(tl.float64)
                floor, end_key, end_bucket = end_key, floor, vocab * 0 + BINS
                plane = planes + _SCRATCH_PLANE * BINS
                _clear(plane, BINS)
                _retally(
                    x_ptr, planes, vocab, True, best, reach, top, settings,
                    floor, cut, cut_key, mean, PART, BINS,
                )  # fmt: skip
            bucket, before = _crossing(plane, end_bucket, need, BINS)
            need -= before
            if (bucket != end_bucket) | by_distance:
                n = _gather(
                    x_ptr, id_ptr, cursor_ptr, vocab, bucket, by_distance, best, reach,
                    narrowed, floor, cut, cut_key, mean, CHUNK, BINS,
                )  # fmt: skip
            by_key = not by_distance
            while n > LIST:
                whole = whole & False
                n, need, by_key = _narrow(
                    x_ptr, id_ptr, cursor_ptr, planes + _SCRATCH_PLANE * BINS, n, need,
                    by_key, stage, best, mean, top, settings, PART, BINS,
                )  # fmt: skip
            key, distance = _first_to_reach(
                x_ptr, id_ptr, n, need, by_distance, stage, best, mean, top, settings, LIST
            )
            if by_distance:
                cut, cut_key = distance, key
                top = _best_in_play(x_ptr, vocab, best, floor, cut, cut_key, mean, PART)
                _clear(planes + BINS, BINS)
                _clear(planes + 2 * BINS, BINS)
                _retally(
                    x_ptr, planes, vocab, False, best, reach, top, settings,
                    floor, cut, cut_key, mean, PART, BINS,
                )  # fmt: skip
                n, whole = vocab * 0, whole | True
            else:
                end_key, end_bucket = key, bucket
    return end_key


@triton.jit
def _choose_from_all_kernel(
    logit_ptr,
    edge_ptr,
    plane_ptr,
    id_ptr,
    cursor_ptr,
    float_ptr,
    int_ptr,
    count_ptr,
    token_ptr,
    position_ptr,
    history_ptr,
    blocks,
    vocab,
    context,
    BLOCKS: tl.constexpr,
    LIST: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    BINS: tl.constexpr,
    PLANES: tl.constexpr,
    COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    settings = float_ptr + row * 7
    key, worst_key = _edges(edge_ptr, row, blocks, BLOCKS)
    best = logit_of(key)
    found = tl.abs(best) < float("inf")
    if found & (tl.load(settings) > 0.0):
        key = _drawn_key(
            logit_ptr + row * vocab, plane_ptr + row * PLANES * BINS, id_ptr + row * vocab, cursor_ptr + row,
            settings, int_ptr + row * 4, position_ptr + row, best, logit_of(worst_key), vocab, LIST, CHUNK, PART, BINS,
        )  # fmt: skip
    token = tl.where(found, id_of(key), -1)
    advance(token, row, token_ptr, position_ptr, history_ptr, count_ptr, int_ptr, vocab, context, COUNTS)


def sample_from_all(
    logits: torch.Tensor, state: DecodeState, buffers: SamplingBuffers, room: FullRoom, pdl: bool
) -> torch.Tensor:
    """`quengine.kernels.cuda.sampling.sample_step` where every token is a candidate: three launches."""
    batch, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and vocab == buffers.vocab
    assert state.tokens.shape == (batch,) and buffers.floats.shape[0] >= batch
    counts = buffers.counts if buffers.counts is not None else buffers.ints
    bias = buffers.bias if buffers.bias is not None else buffers.floats
    x = logits if room.adjusted is None else room.adjusted
    block = block_size(vocab)
    blocks = triton.cdiv(vocab, block)
    _survey_kernel[(blocks, batch)](
        logits,
        bias,
        counts,
        buffers.floats,
        x,
        room.edges,
        room.planes,
        vocab,
        BIAS=buffers.bias is not None,
        COUNTS=buffers.counts is not None,
        BLOCK=block,
        CLEARED=triton.next_power_of_2(triton.cdiv((PLANES - 1) * BINS, blocks)),
        BINS=BINS,
        PLANES=PLANES,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    _tally_kernel[(blocks, batch)](
        x,
        room.edges,
        room.planes,
        buffers.floats,
        buffers.ints,
        blocks,
        vocab,
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=block,
        BINS=BINS,
        PLANES=PLANES,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    _choose_from_all_kernel[(batch,)](
        x,
        room.edges,
        room.planes,
        room.ids,
        room.cursor,
        buffers.floats,
        buffers.ints,
        counts,
        state.tokens,
        state.positions,
        state.history,
        blocks,
        vocab,
        state.history.shape[1],
        BLOCKS=triton.next_power_of_2(blocks),
        LIST=LIST,
        CHUNK=CHUNK,
        PART=PART,
        BINS=BINS,
        PLANES=PLANES,
        COUNTS=buffers.counts is not None,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return state.tokens
