"""The beginning of a decode step on CUDA: its rows are read from the tables of the slots that they belong to.

A sequence has a slot from its admission to its release, and the device has its newest token, its position and its block
tables by slot. A step's rows name slots, so that sequences join and leave without a copy of what others have.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK

_ENTRIES = 1024
"""Entries of a block table per iteration, for any context: one kernel for all steps."""

_DRAFT_ROWS = 32
"""Rows of a block that takes drafted tokens."""


class ChosenTokens(NamedTuple):
    """A ring of the tokens of the latest steps. tokens: int64 [turns, rows], pinned host memory on CUDA, so
    that a step needs no copy after it. turn: int32 [1] on the device, the turn of the current step.
    """

    tokens: torch.Tensor
    turn: torch.Tensor

    @classmethod
    def allocate(cls, turns: int, rows: int, device: torch.device) -> "ChosenTokens":
        """Tokens of `turns` steps of up to `rows` rows, before the first step."""
        tokens = torch.zeros(turns, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        return cls(tokens, torch.full((1,), -1, dtype=torch.int32, device=device))


class SlotTables(NamedTuple):
    """The device's record of S slots: tokens int64 [S], the newest token, which is the next step's input, and positions
    int32 [S], its position; sampling writes both. tables: int32 [groups, S, blocks], the block tables."""

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor


class StepRows(NamedTuple):
    """The rows of decode steps, up to R of them, as the host writes them.

    Attributes:
        slots: int32 [R], the slot whose block tables and sampling settings a row has.
        targets: int32 [R], the slot that takes the token sampled after the row. Padding rows, and all rows of a draft
            but a sequence's last, name a slot that is never read.
        tokens: int32 [R], the input. -1: the slot's newest token, at its position. -2 - d: the token that the draft
            model sampled for that position in its slot d, with which `take_drafts` replaces this number.
        positions: int32 [R], the input's position where `tokens` has one.
    """

    slots: torch.Tensor
    targets: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor


class RowInputs(NamedTuple):
    """What a step of R rows reads: tokens int64 [R], positions int32 [R], tables int32 [groups, R, blocks]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor


@triton.jit(do_not_specialize=["slots", "rows", "blocks"])
def _place_kernel(
    slot_ptr, given_ptr, at_ptr, newest_ptr, place_ptr, held_ptr, token_ptr, position_ptr, table_ptr, turn_ptr,
    slots, rows, blocks,
    TURNS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_then_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    given = tl.load(given_ptr + row)
    token = tl.where(given >= 0, given.to(tl.int64), tl.maximum(tl.load(newest_ptr + slot), 0))
    position = tl.where(given >= 0, tl.load(at_ptr + row), tl.load(place_ptr + slot))
    if group == 0:
        tl.store(token_ptr + row, token)
        tl.store(position_ptr + row, position)
        if row == 0:
            tl.store(turn_ptr, (tl.load(turn_ptr) + 1) % TURNS)
    source = held_ptr + (group * slots + slot).to(tl.int64) * blocks
    target = table_ptr + (group * rows + row) * blocks
    for first in range(0, blocks, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        seen = (entry < blocks) & (entry <= position // BLOCK_SIZE)
        number = tl.load(source + entry, mask=seen, other=PADDING)
        tl.store(target + entry, number, mask=entry < blocks)


def place_rows(
    step: StepRows, slots: SlotTables, inputs: RowInputs, chosen: ChosenTokens, rows: int, pdl: bool = False
) -> None:
    """Writes the first `rows` rows of `inputs`, and begins the next turn of `chosen`.

    A slot whose newest token is not valid continues with token 0. Entries of a block table after the input's position
    name the padding block. `pdl`: the launch may start before its predecessor has ended (sm_90 and later).
    """
    groups, most, blocks = inputs.tables.shape
    assert slots.tables.shape == (groups, len(slots.tokens), blocks) and rows <= most
    _place_kernel[(rows, groups)](
        step.slots, step.tokens, step.positions, slots.tokens, slots.positions, slots.tables,
        inputs.tokens, inputs.positions, inputs.tables, chosen.turn, len(slots.tokens), most, blocks,
        TURNS=len(chosen.tokens), ENTRIES=_ENTRIES, BLOCK_SIZE=BLOCK_SIZE, PADDING=PADDING_BLOCK, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "context"])
def _take_drafts_kernel(
    token_ptr, position_ptr, drafted_ptr, rows, context, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_then_launch(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(token_ptr + row, mask=row < rows, other=0)
    is_draft = given < -1
    position = tl.load(position_ptr + row, mask=is_draft, other=0)
    place = (-2 - given).to(tl.int64) * context + position
    token = tl.load(drafted_ptr + place, mask=is_draft, other=0)
    tl.store(token_ptr + row, tl.maximum(token, 0), mask=is_draft)


def take_drafts(step: StepRows, drafted: torch.Tensor, rows: int, pdl: bool = False) -> None:
    """Replaces the tokens -2 - d of the first `rows` rows by what the draft model has sampled in its slot d.

    drafted: int32 [slots, context], the draft model's tokens by slot and position. A token that is not valid becomes
    token 0. `pdl`: see `place_rows`.
    """
    _take_drafts_kernel[(triton.cdiv(rows, _DRAFT_ROWS),)](
        step.tokens, step.positions, drafted, rows, drafted.shape[1],
        BLOCK=_DRAFT_ROWS, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
