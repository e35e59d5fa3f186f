"""One row's selections on CUDA, by one program: the token that the row's samplers draw, from the sums of its buckets.

A selection finds the first token, best first, where the cumulative mass reaches `need`. It gives the last token of
top-k (each has mass 1), of typical-p and of top-p, and then the one drawn among those that remain. Each selection finds
its bucket by the sums, lists the bucket's tokens, and narrows the list by finer buckets until few enough remain for
pairwise comparison. Typical-p selects in another order (distance of the surprise from its mean); the sums of the tokens
that it keeps are then recomputed.
"""

import triton
import triton.language as tl

from quengine.kernels.cuda.sampling.sampling_parts import (
    HIGHEST,
    LOG2_E,
    LOWEST,
    ceiling,
    key_of,
    mass,
    moment,
    uniform_of,
)
from quengine.kernels.cuda.sampling.sampling_state import NOTES, PLANES

COUNT, TYPICAL, NUCLEUS, DRAW = (tl.constexpr(stage) for stage in range(4))
"""The selections, in their order."""

COUNT_PLANE, NUCLEUS_PLANE, DRAW_PLANE, MOMENT_PLANE, SCRATCH_PLANE = (
    tl.constexpr(plane) for plane in range(PLANES)
)
"""The planes of a bucket's sums; typical-p uses that of top-p."""

_CURSOR, _FLOOR, _CUT, _CUT_KEY, _MEAN = (tl.constexpr(note) for note in range(NOTES))


@triton.jit
def half_gap_limit(best, worst, sharp):
    """Half the gap from the best logit, fp32, beyond which tokens have no mass or do not exist."""
    far = tl.minimum(tl.maximum(23.0 / sharp, 16.0), 3.0e38).to(tl.float32)
    return tl.maximum(tl.minimum(best * 0.5 - worst * 0.5, far), 1e-30)


@triton.jit
def half_gap(x, best):
    """Half of each logit's gap to the best, fp32: a whole gap may exceed fp32's largest number."""
    return best * 0.5 - x * 0.5


@triton.jit
def _distance(x, best, notes):
    """The distance of each logit's gap from the mean gap, fp64: the order of typical-p."""
    mean = tl.load(notes + _MEAN).to(tl.float64, bitcast=True)
    return tl.abs((best.to(tl.float64) - x.to(tl.float64)) - mean)


@triton.jit
def bucket_of(half, inside, gap_limit, BINS: tl.constexpr):
    return tl.minimum((tl.where(inside, half, 0.0) * ((BINS - 1) / gap_limit)).to(tl.int32), BINS - 1)


@triton.jit
def add_masses(planes, x, bucket, inside, top, settings, BINS: tl.constexpr):
    """Adds the masses of top-p and of the draw to the sums of the buckets."""
    wide = x.to(tl.float64)
    gap = tl.where(inside, top - wide, 0.0)
    if tl.load(settings + 2) < 1.0:
        weight = mass(gap, LOG2_E)
        tl.atomic_add(
            planes + NUCLEUS_PLANE * BINS + bucket, weight, mask=inside & (weight > 0), sem="relaxed"
        )
    weight = mass(gap, tl.load(settings))
    drawn = inside & (weight > 0) & (wide >= top + tl.load(settings + 3))
    tl.atomic_add(planes + DRAW_PLANE * BINS + bucket, weight, mask=drawn, sem="relaxed")


@triton.jit
def _worth(x, stage, top, settings):
    """A token's mass in a selection, int64."""
    wide = x.to(tl.float64)
    drawing = stage == DRAW
    weight = mass(tl.maximum(top - wide, 0.0), tl.where(drawing, tl.load(settings), LOG2_E))
    weight = tl.where(drawing & (wide < top + tl.load(settings + 3)), 0, weight)
    return tl.where(stage == COUNT, 1, weight)


@triton.jit
def _in_play(x, key, best, notes):
    """Whether top-k (keys from the floor on) and typical-p (up to the cut in its order) keep a token."""
    distance = _distance(x, best, notes)
    cut = tl.load(notes + _CUT).to(tl.float64, bitcast=True)
    near = (distance < cut) | ((distance == cut) & (key >= tl.load(notes + _CUT_KEY)))
    return near & (key >= tl.load(notes + _FLOOR))


@triton.jit
def _reached(plane_ptr, limit, BINS: tl.constexpr):
    """The cumulative sums of a plane's buckets below `limit`."""
    b = tl.arange(0, BINS)
    return tl.cumsum(tl.load(plane_ptr + b, mask=b < limit, other=0), 0)


@triton.jit
def _crossing(reached, limit, need, BINS: tl.constexpr):
    """The bucket below `limit` where the sum reaches `need` (`limit` if none), and the sum before it."""
    short = (tl.arange(0, BINS) < limit) & (reached < need)
    return tl.sum(short.to(tl.int32), 0), tl.max(tl.where(short, reached, 0), 0)


@triton.jit
def _clear(plane_ptr, BINS: tl.constexpr):
    tl.debug_barrier()
    tl.store(plane_ptr + tl.arange(0, BINS), tl.zeros((BINS,), tl.int64))
    tl.debug_barrier()


@triton.jit
def _append(id_ptr, notes, id, found):
    """Appends the found tokens to the list, in any order."""
    cursor = notes + _CURSOR + id * 0
    slot = tl.atomic_add(cursor, tl.full(id.shape, 1, tl.int64), mask=found, sem="relaxed")
    tl.store(id_ptr + slot, id, mask=found)


@triton.jit
def _restart(notes):
    tl.debug_barrier()
    tl.store(notes + _CURSOR, 0)
    tl.debug_barrier()


@triton.jit
def _length(notes):
    tl.debug_barrier()
    return tl.load(notes + _CURSOR, volatile=True).to(tl.int32)


@triton.jit
def _gather(
    x_ptr, id_ptr, notes, vocab, wanted, by_distance, narrowed, best, gap_limit,
    CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Lists the tokens of bucket `wanted` that are in play; returns their number."""
    _restart(notes)
    id = tl.arange(0, CHUNK)
    ahead = tl.load(x_ptr + id, mask=id < vocab, other=float("-inf"))
    for start in range(0, vocab, CHUNK):
        id = start + tl.arange(0, CHUNK)
        x = ahead
        ahead = tl.load(x_ptr + id + CHUNK, mask=id + CHUNK < vocab, other=float("-inf"))
        half = half_gap(x, best)
        found = half <= gap_limit
        if by_distance:
            half = (_distance(x, best, notes) * 0.5).to(tl.float32)
        found = found & (bucket_of(half, found, gap_limit, BINS) == wanted)
        if narrowed:
            found = found & _in_play(x, key_of(x, id), best, notes)
        _append(id_ptr, notes, id, found)
    return _length(notes)


@triton.jit
def _retally(
    x_ptr, planes, notes, vocab, by_distance, best, gap_limit, top, settings,
    PART: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Recomputes the bucket sums over tokens in play: typical-p's, by distance, in the scratch plane, or masses."""
    for start in range(0, vocab, PART):
        id = start + tl.arange(0, PART)
        x = tl.load(x_ptr + id, mask=id < vocab, other=float("-inf"))
        half = half_gap(x, best)
        inside = half <= gap_limit
        if by_distance:
            half = (_distance(x, best, notes) * 0.5).to(tl.float32)
        bucket = bucket_of(half, inside, gap_limit, BINS)
        inside = inside & _in_play(x, key_of(x, id), best, notes)
        if by_distance:
            weight = _worth(x, TYPICAL, top, settings)
            cell = planes + SCRATCH_PLANE * BINS + bucket
            tl.atomic_add(cell, weight, mask=inside & (weight > 0), sem="relaxed")
        else:
            add_masses(planes, x, bucket, inside, top, settings, BINS)
    tl.debug_barrier()


@triton.jit
def _best_in_play(x_ptr, notes, vocab, best, PART: tl.constexpr):
    top = best * 0.0 + float("-inf")
    for start in range(0, vocab, PART):
        id = start + tl.arange(0, PART)
        x = tl.load(x_ptr + id, mask=id < vocab, other=float("-inf"))
        kept = _in_play(x, key_of(x, id), best, notes)
        top = tl.maximum(top, tl.max(tl.where(kept, x, float("-inf")), 0))
    return top.to(tl.float64)


@triton.jit
def _listed_worth(x_ptr, id_ptr, n, floor, stage, top, settings, LIST: tl.constexpr):
    """The sums of the masses and moments of the listed tokens from key `floor` on."""
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
def _place(x, id, by_key, best, notes):
    """An int64 that ascends in the order of a selection."""
    distance = _distance(x, best, notes).to(tl.int64, bitcast=True)
    return tl.where(by_key, ~key_of(x, id), distance)


@triton.jit
def _shift(width):
    """The right shift after which a number up to `width` (uint64, not 0) is below 2048, and `width` itself above 0."""
    exponent = (width.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
    return tl.maximum(exponent - 10, 0)


@triton.jit
def _narrow(
    x_ptr, id_ptr, notes, plane_ptr, n, need, by_key, stage, best, top, settings,
    PART: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Cuts the list to the tokens of the bucket where the mass reaches `need`: one round of a radix selection.

    Returns the new length, the remaining need, and the order to continue with: if all distances are equal, nothing is
    cut, and keys decide next.
    """
    first, last = tl.full((PART,), HIGHEST, tl.int64), tl.full((PART,), LOWEST, tl.int64)
    for start in range(0, n, PART):
        at = start + tl.arange(0, PART)
        id = tl.load(id_ptr + at, mask=at < n, other=0)
        place = _place(tl.load(x_ptr + id), id, by_key, best, notes)
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
            bucket = ((_place(x, id, by_key, best, notes) - origin).to(tl.uint64) >> shift).to(tl.int32)
            weight = _worth(x, stage, top, settings)
            tl.atomic_add(plane_ptr + bucket, weight, mask=(at < n) & (weight > 0), sem="relaxed")
        tl.debug_barrier()
        wanted, before = _crossing(_reached(plane_ptr, BINS, BINS), BINS, need, BINS)
        need -= before
        _restart(notes)
        for start in range(0, n, PART):
            at = start + tl.arange(0, PART)
            id = tl.load(id_ptr + at, mask=at < n, other=0)
            place = _place(tl.load(x_ptr + id), id, by_key, best, notes)
            found = (at < n) & (((place - origin).to(tl.uint64) >> shift).to(tl.int32) == wanted)
            tl.debug_barrier()  # all have read this part before it is partly overwritten
            _append(id_ptr, notes, id, found)
        n = _length(notes)
    else:
        by_key = by_key | True
    return n, need, by_key


@triton.jit
def _first_to_reach(
    x_ptr, id_ptr, notes, scratch, n, need, by_distance, stage, best, top, settings,
    LIST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Key and distance (its bits) of the listed token (n <= LIST) where the mass reaches `need`."""
    at = tl.arange(0, LIST)
    id = tl.load(id_ptr + at, mask=at < n, other=0)
    x = tl.load(x_ptr + id)
    key = key_of(x, id)
    distance = _distance(x, best, notes).to(tl.int64, bitcast=True)
    order = tl.where(by_distance, distance, 0)
    weight = tl.where(at < n, _worth(x, stage, top, settings), 0)
    tl.debug_barrier()  # all have read the scratch
    tl.store(scratch + at, key)
    tl.store(scratch + LIST + at, order)
    tl.store(scratch + 2 * LIST + at, weight)
    tl.debug_barrier()
    before = tl.zeros((LIST,), tl.int64)
    for start in range(0, n, TILE):
        j = start + tl.arange(0, TILE)
        other_key, other_order = tl.load(scratch + j)[:, None], tl.load(scratch + LIST + j)[:, None]
        tied = (other_order == order[None, :]) & (other_key > key[None, :])
        earlier = (other_order < order[None, :]) | tied
        before += tl.sum(tl.where(earlier, tl.load(scratch + 2 * LIST + j)[:, None], 0), 0)
    reaches = (at < n) & (before < need) & (need <= before + weight)
    distance = tl.max(tl.where(reaches, distance, 0), 0)
    return tl.max(tl.where(reaches, key, LOWEST), 0), distance


@triton.jit
def _is_active(stage, settings, int_ptr, vocab):
    """Whether the row's settings require this selection; the draw always is."""
    top_k = tl.load(int_ptr)
    counts = (stage == COUNT) & (top_k > 0) & (top_k < vocab)
    typical = (stage == TYPICAL) & (tl.load(settings + 1) < 1.0)
    return counts | typical | ((stage == NUCLEUS) & (tl.load(settings + 2) < 1.0)) | (stage == DRAW)


@triton.jit
def _plane_of(stage):
    return tl.where(stage == COUNT, COUNT_PLANE, tl.where(stage == DRAW, DRAW_PLANE, NUCLEUS_PLANE))


@triton.jit
def _needed(stage, total, settings, int_ptr, position_ptr):
    """The mass that a selection has to reach, of `total` (int64, above 0)."""
    if stage == COUNT:
        need = tl.load(int_ptr)
    elif stage == NUCLEUS:
        need = tl.maximum(ceiling(tl.load(settings + 2) * total.to(tl.float64)), 1)
    elif stage == TYPICAL:
        need = (tl.load(settings + 1) * total.to(tl.float64)).to(tl.int64) + 1
    else:
        need = (uniform_of(int_ptr, position_ptr) * total.to(tl.float64)).to(tl.int64) + 1
    return tl.minimum(need, total)


@triton.jit
def drawn_key(
    x_ptr, planes, id_ptr, notes, settings, int_ptr, position_ptr, best, worst, vocab,
    LIST: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The key of the token that the row's samplers draw; `best` and `worst` are its largest and smallest finite
    logits, fp32.

    Settings, and the bounds of typical-p, are loaded where they are used: held in registers, they would spill.
    """
    scratch = planes + SCRATCH_PLANE * BINS
    gap_limit = half_gap_limit(best, worst, tl.load(settings))
    top = best.to(tl.float64)
    # The last selection's end: no later token counts. The list holds the tokens of that bucket, or some of them.
    end_key, end_bucket = tl.full((), LOWEST, tl.int64), vocab * 0 + BINS
    n, whole = vocab * 0, vocab == vocab
    for stage in range(4):
        if _is_active(stage, settings, int_ptr, vocab):
            by_distance = stage == TYPICAL
            if not whole:
                narrowed = (stage > TYPICAL) & (tl.load(settings + 1) < 1.0)
                n = _gather(
                    x_ptr, id_ptr, notes, vocab, end_bucket, False, narrowed, best, gap_limit, CHUNK, BINS
                )
                whole = whole | True
            weights, moments = _listed_worth(x_ptr, id_ptr, n, end_key, stage, top, settings, LIST)
            plane = planes + _plane_of(stage) * BINS
            reached = _reached(plane, end_bucket, BINS)
            total = tl.max(reached, 0) + weights
            need = _needed(stage, total, settings, int_ptr, position_ptr)
            if by_distance:
                moments += tl.max(_reached(planes + MOMENT_PLANE * BINS, end_bucket, BINS), 0)
                mean = moments.to(tl.float64) / total.to(tl.float64)
                _note(notes, end_key, float("inf"), LOWEST, mean)
                end_key, end_bucket = end_key * 0 + LOWEST, vocab * 0 + BINS
                _clear(scratch, BINS)
                _retally(x_ptr, planes, notes, vocab, True, best, gap_limit, top, settings, PART, BINS)
                reached = _reached(scratch, end_bucket, BINS)
            bucket, before = _crossing(reached, end_bucket, need, BINS)
            need -= before
            if (bucket != end_bucket) | by_distance:
                narrowed = (stage >= TYPICAL) & (tl.load(settings + 1) < 1.0)
                n = _gather(
                    x_ptr, id_ptr, notes, vocab, bucket, by_distance, narrowed, best, gap_limit, CHUNK, BINS
                )
            by_key = not by_distance
            while n > LIST:
                whole = whole & False
                n, need, by_key = _narrow(
                    x_ptr, id_ptr, notes, scratch, n, need, by_key, stage, best, top, settings, PART, BINS
                )
            key, distance = _first_to_reach(
                x_ptr, id_ptr, notes, scratch, n, need, by_distance, stage, best, top, settings, LIST, TILE
            )
            if by_distance:
                tl.store(notes + _CUT, distance)
                tl.store(notes + _CUT_KEY, key)
                _clear(planes + NUCLEUS_PLANE * BINS, BINS)
                _clear(planes + DRAW_PLANE * BINS, BINS)
                top = _best_in_play(x_ptr, notes, vocab, best, PART)
                _retally(x_ptr, planes, notes, vocab, False, best, gap_limit, top, settings, PART, BINS)
                n, whole = vocab * 0, whole | True
            else:
                end_key, end_bucket = key, bucket
    return end_key


@triton.jit
def _note(notes, floor, cut, cut_key, mean):
    """Stores the bounds of the tokens in play: from `floor` on, and up to `cut` in the order of typical-p. A
    barrier must follow.
    """
    tl.store(notes + _FLOOR, floor)
    tl.store(notes + _CUT, (mean * 0 + cut).to(tl.int64, bitcast=True))
    tl.store(notes + _CUT_KEY, cut_key)
    tl.store(notes + _MEAN, mean.to(tl.int64, bitcast=True))
