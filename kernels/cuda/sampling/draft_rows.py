"""Steps that draft, verify and accept on CUDA. Definition: kernels/draft_rows.py.

A program takes a sequence, or a row. Few tokens are drafted, so it takes all those of a sequence at once.
"""

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.draft_rows import Drafting, Newest, PlacedRows
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK

_ENTRIES = 1024
"""Entries of a block table per iteration, for any context: one kernel for all steps."""


@triton.jit(do_not_specialize=["context"])
def _enter_kernel(
    slot_ptr, position_ptr, recent_ptr, newest_ptr, place_ptr, history_ptr, turn_ptr, context,
    TURNS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    position = tl.load(position_ptr + row)
    n = tl.arange(0, BLOCK)
    at = position - (MOST - 1) + n
    known = (n < MOST) & (at >= 0) & (position >= 0)
    token = tl.load(recent_ptr + row * MOST + n, mask=n < MOST, other=0)
    tl.store(history_ptr + slot * context + at, token, mask=known & (at < context))
    if position >= 0:
        tl.store(newest_ptr + slot, tl.load(recent_ptr + row * MOST + (MOST - 1)).to(tl.int64))
        tl.store(place_ptr + slot, position)
    if row == 0:
        tl.store(turn_ptr, (tl.load(turn_ptr) + 1) % TURNS)


def enter(drafting: Drafting, newest: Newest, turn: torch.Tensor, turns: int, pdl: bool = False) -> None:
    """As defined; also begins the next of `turns` turns in `turn`, int32 [1] on the device."""
    count, most = drafting.recent.shape
    _enter_kernel[(count,)](
        drafting.slots, drafting.positions, drafting.recent, *newest, turn, newest.history.shape[1],
        TURNS=turns, MOST=most, BLOCK=triton.next_power_of_2(most), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["unused", "context", "held_stride", "table_stride", "blocks", "first", "count"]
)
def _place_kernel(
    slot_ptr, count_ptr, end_ptr, newest_ptr, place_ptr, known_ptr, held_ptr,
    token_ptr, position_ptr, table_ptr, row_slot_ptr, last_ptr, unused, context, held_stride, table_stride, blocks,
    first, count,
    ENTRIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    sequence = row // count
    offset = first + (row % count).to(tl.int32)
    slot = tl.load(slot_ptr + sequence)
    position = tl.load(place_ptr + slot) + offset
    live = (position >= 0) & (offset <= tl.load(count_ptr + sequence)) & (slot != unused)
    live &= position < tl.load(end_ptr + sequence)
    slot = tl.where(live, slot, unused).to(tl.int64)
    position = tl.where(live, position, 0)
    other = tl.load(known_ptr + slot * context + position, mask=live & (position < context), other=0).to(
        tl.int64
    )
    token = tl.where(offset == 0, tl.load(newest_ptr + slot), other)
    if group == 0:
        tl.store(token_ptr + row, tl.where(live, tl.maximum(token, 0), 0))
        tl.store(position_ptr + row, position)
        tl.store(row_slot_ptr + row, slot.to(tl.int32))
        if row % count == count - 1:
            tl.store(last_ptr + sequence, position)
    source = held_ptr + group.to(tl.int64) * held_stride + slot * blocks
    target = table_ptr + group.to(tl.int64) * table_stride + row * blocks
    for begin in range(0, blocks, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        seen = (entry < blocks) & (entry <= position // BLOCK_SIZE)
        number = tl.load(source + entry, mask=seen, other=PADDING)
        tl.store(target + entry, number, mask=entry < blocks)


def place(
    drafting: Drafting,
    newest: Newest,
    tokens: torch.Tensor,
    tables: torch.Tensor,
    first: int,
    count: int,
    placed: PlacedRows,
    pdl: bool = False,
) -> None:
    """Writes `rows_of(drafting, newest, tokens, tables, first, count)` to `placed`. Its parts are contiguous; of
    `tables`, those of each group are."""
    groups, _, blocks = tables.shape
    rows = len(drafting.slots) * count
    assert placed.tables.shape == (groups, rows, blocks) and placed.tables[0].is_contiguous()
    assert tables[0].is_contiguous() and tokens.shape == newest.history.shape
    _place_kernel[(rows, groups)](
        drafting.slots, drafting.counts, drafting.ends, newest.tokens, newest.positions, tokens, tables,
        placed.tokens, placed.positions, placed.tables, placed.slots, placed.last, len(newest.tokens) - 1,
        tokens.shape[1], tables.stride(0), placed.tables.stride(0), blocks, first, count,
        ENTRIES=_ENTRIES, BLOCK_SIZE=BLOCK_SIZE, PADDING=PADDING_BLOCK, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["unused", "context", "stride"])
def _accept_kernel(
    slot_ptr, count_ptr, end_ptr, sampled_ptr, drafted_ptr, newest_ptr, place_ptr, history_ptr, accepted_ptr,
    result_ptr, turn_ptr, unused, context, stride, MOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    sequence = tl.program_id(0)
    slot = tl.load(slot_ptr + sequence).to(tl.int64)
    start = tl.load(place_ptr + slot)
    end = tl.load(end_ptr + sequence)
    n = tl.arange(0, BLOCK)
    ours = tl.load(sampled_ptr + sequence * (MOST + 1) + n, mask=n <= MOST, other=-1)
    at = start + 1 + n
    has = (n < MOST) & (n < tl.load(count_ptr + sequence)) & (at < end)
    history = slot * context + at
    theirs = tl.load(drafted_ptr + history, mask=has & (at < context), other=0).to(tl.int64)
    theirs = tl.maximum(theirs, 0)
    taken = tl.min(tl.where(has & (theirs == ours), MOST, n), 0)
    live = (slot != unused) & (start < end)
    out = result_ptr + tl.load(turn_ptr).to(tl.int64) * stride + sequence * (2 * MOST + 1) + n
    tl.store(out, tl.where(live, ours, -1), mask=n <= MOST)
    tl.store(out + MOST + 1, tl.where(has, theirs, -1), mask=n < MOST)
    tl.store(accepted_ptr + sequence, tl.where(live, taken, -1))
    tl.store(history_ptr + history, ours.to(tl.int32), mask=live & (n <= taken) & (at < context))
    if live:
        tl.store(newest_ptr + slot, tl.sum(tl.where(n == taken, ours, 0), 0))
        tl.store(place_ptr + slot, start + taken + 1)


def accept(
    drafting: Drafting,
    newest: Newest,
    drafted: torch.Tensor,
    sampled: torch.Tensor,
    accepted: torch.Tensor,
    results: torch.Tensor,
    turn: torch.Tensor,
    pdl: bool = False,
) -> None:
    """As defined: writes int32 [B] to `accepted`, and what the host reads to the beginning of row `turn` of `results`
    int64 [turns, B * (2 N + 1) or more], pinned host memory on CUDA."""
    count = len(drafting.slots)
    most = len(sampled) // count - 1
    assert results.shape[1] >= count * (2 * most + 1) and results.is_contiguous() and sampled.is_contiguous()
    _accept_kernel[(count,)](
        drafting.slots, drafting.counts, drafting.ends, sampled, drafted, *newest, accepted, results, turn,
        len(newest.tokens) - 1, drafted.shape[1], results.shape[1],
        MOST=most, BLOCK=triton.next_power_of_2(most + 1), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
