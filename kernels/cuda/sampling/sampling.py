"""From logits to the next token on CUDA, in launches that a graph can capture: token and position stay on the device.

Samplers, their order, masses and random numbers are those of `quengine.kernels.sampling`, and so are the tokens. If
every row is greedy or has a small top-k, sampling takes two launches. The first applies bias and penalties and selects
the best `capacity` of every block of the vocabulary; the second selects the best of those, applies the samplers to
them, draws, and prepares the next step. A logit and its token id form one 64-bit key, so ties need no special
treatment. All other settings: `sampling_full`.
"""

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.cuda.sampling.sampling_full import sample_from_all
from quengine.kernels.cuda.sampling.sampling_parts import (
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
from quengine.kernels.cuda.sampling.sampling_state import (
    MAX_CAPACITY,
    DecodeState,
    SamplingBuffers,
    SamplingSettings,
    block_size,
)

__all__ = ["MAX_CAPACITY", "NO_TOKEN", "DecodeState", "SamplingBuffers", "SamplingSettings", "sample_step"]

NO_TOKEN = -1
"""Stored if every token is banned or a logit is NaN."""


@triton.jit
def _candidates_kernel(
    logit_ptr, slot_ptr, bias_ptr, count_ptr, float_ptr, key_ptr, vocab,
    BIAS: tl.constexpr, COUNTS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    id = block * BLOCK + tl.arange(0, BLOCK)
    inside = id < vocab
    x = tl.load(logit_ptr + row * vocab + id, mask=inside, other=float("-inf"))
    x = adjusted(x, id, inside, slot, bias_ptr, count_ptr, float_ptr, vocab, BIAS, COUNTS)
    key = key_of(x, id)
    out = key_ptr + (row * tl.num_programs(0) + block) * CAPACITY
    if CAPACITY == 1:
        tl.store(out, tl.max(key, 0))
    else:
        tl.store(out + tl.arange(0, CAPACITY), tl.topk(key, CAPACITY))


@triton.jit
def _kept_by_typical(logit, kept, typical):
    """The candidates of most typical surprise, up to where their probability exceeds `typical`."""
    i = tl.arange(0, logit.shape[0])
    gap = tl.where(kept, tl.max(logit, 0) - logit, 0.0)
    weight = tl.where(kept, mass(gap, LOG2_E), 0)
    total = tl.sum(weight, 0)
    mean = tl.sum(moment(weight, gap), 0).to(tl.float64) / total.to(tl.float64)
    distance = tl.where(kept, tl.abs(gap - mean), float("inf"))
    # by[j, i]: j is not after i in the order.
    nearer = distance[:, None] < distance[None, :]
    by = nearer | ((distance[:, None] == distance[None, :]) & (i[:, None] <= i[None, :]))
    reached = tl.sum(tl.where(by, weight[:, None], 0), 0)
    limit = tl.minimum((typical * total.to(tl.float64)).to(tl.int64), total - 1)
    return kept & (reached - weight <= limit)


@triton.jit
def _draw(logit, kept, sharp, typical, top_p, least, uniform):
    """The index of the drawn candidate; `logit` fp64 [C] is descending, `kept` marks the candidates in play."""
    if typical < 1.0:
        kept = _kept_by_typical(logit, kept, typical)
    best = tl.max(tl.where(kept, logit, float("-inf")), 0)
    gap = tl.where(kept, best - logit, 0.0)
    weight = tl.where(kept, mass(gap, LOG2_E), 0)
    total = tl.sum(weight, 0)
    need = tl.where(top_p < 1.0, tl.minimum(ceiling(top_p * total.to(tl.float64)), total), HIGHEST)
    kept = kept & (tl.cumsum(weight, 0) - weight < tl.maximum(need, 1))
    kept = kept & (logit >= best + least)
    weight = tl.where(kept, mass(gap, sharp), 0)
    reached = tl.cumsum(weight, 0)
    target = (uniform * tl.sum(weight, 0).to(tl.float64)).to(tl.int64)
    slot = tl.arange(0, logit.shape[0])
    drawn = tl.min(tl.where(kept & (reached > target), slot, logit.shape[0] - 1), 0)
    return tl.where(sharp > 0.0, drawn, 0)


@triton.jit(do_not_specialize=["stride"])
def _choose_kernel(
    key_ptr, slot_ptr, target_ptr, at_ptr, float_ptr, int_ptr, count_ptr, token_ptr, position_ptr, history_ptr,
    chosen_ptr, turn_ptr, stride, keys, vocab, context,
    CAPACITY: tl.constexpr, KEYS: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    n = tl.arange(0, KEYS)
    key = tl.load(key_ptr + row * keys + n, mask=n < keys, other=LOWEST)
    if CAPACITY == 1:
        chosen = tl.max(key, 0)
        top = logit_of(chosen)
    else:
        best = tl.topk(key, CAPACITY)
        i = tl.arange(0, CAPACITY)
        logit = logit_of(best)
        top = tl.max(logit, 0)
        top = tl.where(tl.max((logit != logit).to(tl.int32), 0) > 0, float("nan"), top)
        kept = (i < tl.maximum(tl.load(int_ptr + slot * 4), 1)) & (logit > float("-inf"))
        settings = float_ptr + slot * 7
        place = _draw(
            logit.to(tl.float64),
            kept,
            tl.load(settings),
            tl.load(settings + 1),
            tl.load(settings + 2),
            tl.load(settings + 3),
            uniform_of(int_ptr + slot * 4, at_ptr + row),
        )
        chosen = tl.max(tl.where(i == place, best, LOWEST), 0)
    token = tl.where(tl.abs(top) < float("inf"), id_of(chosen), -1)
    advance(
        token, row, slot, target_ptr, at_ptr, token_ptr, position_ptr, history_ptr, count_ptr, int_ptr, chosen_ptr,
        turn_ptr, stride, vocab, context, COUNTS,
    )  # fmt: skip


def sample_step(
    logits: torch.Tensor, state: DecodeState, buffers: SamplingBuffers, pdl: bool = False
) -> torch.Tensor:
    """Samples the token after each of B rows, which the row's target takes, and leaves it for the host.

    logits: fp32 [B, V]. The random number is that of the new token's position. Returns `state.tokens`, with NO_TOKEN
    where every token is banned or a logit is NaN. Two or three launches, no copy to or from the host.
    """
    if buffers.full is not None:
        return sample_from_all(logits, state, buffers, buffers.full, pdl)
    batch, vocab = logits.shape
    buffers.check(logits, state)
    assert buffers.keys is not None
    blocks = triton.cdiv(vocab, block_size(vocab))
    _candidates_kernel[(blocks, batch)](
        logits, state.slots, buffers.bias_plane, buffers.count_plane, buffers.floats, buffers.keys, vocab,
        BIAS=buffers.bias is not None, COUNTS=buffers.counts is not None, CAPACITY=buffers.capacity,
        BLOCK=block_size(vocab), PDL=pdl, num_warps=4, launch_pdl=pdl, enable_fp_fusion=False,
    )  # fmt: skip
    keys = blocks * buffers.capacity
    _choose_kernel[(batch,)](
        buffers.keys, state.slots, state.targets, state.row_positions, buffers.floats, buffers.ints,
        buffers.count_plane, state.tokens, state.positions, state.history, *state.chosen,
        state.chosen.tokens.shape[1], keys, vocab, state.history.shape[1],
        CAPACITY=buffers.capacity, KEYS=triton.next_power_of_2(keys), COUNTS=buffers.counts is not None, PDL=pdl,
        num_warps=4 if keys <= 4096 else 16, launch_pdl=pdl, enable_fp_fusion=False,
    )  # fmt: skip
    return state.tokens
