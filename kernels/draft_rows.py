"""Steps that draft, verify and accept on a device: which rows they have, and what is accepted; the torch definition.

A device has tables by slot (`Newest`): each sequence's newest token, that token's position, and the sequence's tokens
by position. A draft layer computes rows up to the newest token, the last of which gives the first drafted token, then a
row for each drafted token but the last. The model verifies the newest token and all drafted ones as rows of one step.
Drafted tokens are accepted in order, as long as each equals the token sampled at its position; the first that differs
ends the draft. A sampled token counts only if all rows before it are right, so it is what it would be without drafts.

No row depends on numbers that only the host knows, so a step can be launched before the last one's results are read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK


class Newest(NamedTuple):
    """A device's record of S slots, the last of which is for padding: tokens int64 [S], the newest token; positions
    int32 [S], its position; history int32 [S, context], the tokens sampled so far, by position."""

    tokens: Tensor
    positions: Tensor
    history: Tensor


class Drafting(NamedTuple):
    """What the host tells a step about its B sequences, with up to N drafted tokens each.

    Attributes:
        slots: int32 [B], the sequences' slots; the last slot stands for padding.
        counts: int32 [B], the most drafted tokens of each sequence.
        ends: int32 [B], the first position that has no block, or is not to be computed.
        positions: int32 [B], the newest token's, where the host knows it; -1: the device has it.
        recent: int32 [B, W], the newest tokens, the newest one last, where the host knows them.
    """

    slots: Tensor
    counts: Tensor
    ends: Tensor
    positions: Tensor
    recent: Tensor


class PlacedRows(NamedTuple):
    """Rows of a step: tokens int64 [R], positions int32 [R], tables int32 [groups, R, blocks], slots int32 [R]; and
    last int32 [B], the position of each sequence's last row."""

    tokens: Tensor
    positions: Tensor
    tables: Tensor
    slots: Tensor
    last: Tensor


def enter(drafting: Drafting, newest: Newest) -> None:
    """Writes the host's record of sequences to `newest`."""
    most = drafting.recent.shape[1]
    for slot, position, recent in zip(
        drafting.slots.tolist(), drafting.positions.tolist(), drafting.recent, strict=True
    ):
        if position >= 0:
            known = min(most, position + 1)
            newest.tokens[slot], newest.positions[slot] = recent[-1], position
            newest.history[slot, position + 1 - known : position + 1] = recent[most - known :]


def rows_of(
    drafting: Drafting, newest: Newest, tokens: Tensor, tables: Tensor, first: int, count: int
) -> PlacedRows:
    """The rows of each sequence from `first` to `first + count - 1` after its newest token.

    tokens: int32 [S, context], tokens by position, from which all but the newest are read. tables: int32 [groups, S,
    blocks], the slots' block tables; in the result, entries after a row's position name the padding block. A row before
    the sequence's first position, after its last drafted token, or from `ends` on is padding: token 0 at position 0 of
    the last slot.
    """
    unused, context = len(newest.tokens) - 1, tokens.shape[1]
    offset = torch.arange(first, first + count, device=tokens.device)
    slots = drafting.slots.long()[:, None].expand(-1, count)
    positions = newest.positions[slots] + offset
    live = (positions >= 0) & (offset <= drafting.counts[:, None]) & (positions < drafting.ends[:, None])
    live &= slots != unused
    slots, positions = torch.where(live, slots, unused), torch.where(live, positions, 0)
    others = tokens[slots, positions.clamp(max=context - 1)].long()
    found = torch.where(offset == 0, newest.tokens[slots], others).clamp(min=0)
    entry = torch.arange(tables.shape[2], device=tokens.device)
    held = tables[:, slots.flatten()]
    held = torch.where(entry <= positions.flatten()[:, None] // BLOCK_SIZE, held, PADDING_BLOCK)
    rows = torch.where(live, found, 0).flatten(), positions.flatten().int(), held, slots.flatten().int()
    return PlacedRows(*rows, positions[:, -1].int())


def accept(drafting: Drafting, newest: Newest, drafted: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts drafted tokens, and moves each slot on to the token sampled after its last accepted one.

    drafted: int32 [S, context], the drafted tokens by position; negative ones count as token 0. sampled: int64 [B * (N
    + 1)], the token sampled after each row of `rows_of(first=0, count=N + 1)`; negative: none could be. Returns the
    number of accepted tokens, int32 [B], -1 for a sequence without rows. Also returns, for the host, int64 [B, 2 N +
    1]: the tokens sampled after each row, -1 for a sequence without rows, then the drafted tokens, -1 for those that
    the step does not have.
    """
    unused, context = len(newest.tokens) - 1, drafted.shape[1]
    most = len(sampled) // len(drafting.slots) - 1
    ours = sampled.view(-1, most + 1)
    slots = drafting.slots.long()
    starts = newest.positions[slots]
    offset = torch.arange(1, most + 1, device=drafted.device)
    at = starts[:, None] + offset
    has = (offset <= drafting.counts[:, None]) & (at < drafting.ends[:, None])
    theirs = drafted[slots[:, None], at.clamp(max=context - 1)].long().clamp(min=0)
    taken = ((theirs == ours[:, :most]) & has).long().cumprod(1).sum(1)
    live = (slots != unused) & (starts < drafting.ends)
    for row in live.nonzero().flatten().tolist():
        slot, start, count = int(slots[row]), int(starts[row]), int(taken[row])
        newest.tokens[slot], newest.positions[slot] = ours[row, count], start + count + 1
        end = min(context, start + count + 2)
        newest.history[slot, start + 1 : end] = ours[row, : end - start - 1].int()
    seen = torch.cat([torch.where(live[:, None], ours, -1), torch.where(has, theirs, -1)], dim=1)
    return torch.where(live, taken, -1).int(), seen
