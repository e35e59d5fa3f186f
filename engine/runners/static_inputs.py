"""The static inputs of captured CUDA steps: memory that graphs read, written before a launch.

One set serves all decode steps: they read their rows from tables by slot, which the device advances by itself. Another
serves all prefill steps, and is rewritten for each. Both have a block table per sequence and cache group.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, zip_longest
from typing import TypeAlias

import torch
from torch import Tensor

from quengine.kernels.cuda.attention.attention_prefill import tile_rows
from quengine.kernels.cuda.attention.prefill_tiles import TILE_FIELDS, tile_entries
from quengine.kernels.cuda.sampling.batch_rows import ChosenTokens, RowInputs, SlotTables, StepRows
from quengine.kernels.embedded_rows import EmbeddedRows
from quengine.kernels.forward_batch import STATE_ENTRIES, ForwardBatch, PrefillTiles, pad_block_tables
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK
from quengine.request.adapter_scales import Scales
from quengine.runners.graph_keys import PREFILL_ROWS, PREFILL_SEQUENCES, WHOLE_CHUNK, GraphKey, aligned
from quengine.slot import Slot
from quengine.step_plan import SequenceRows, adapter_scales

_ALIGNED = 4
"""int32 entries in 16 bytes."""


_Row: TypeAlias = tuple[int, int, int, int]
"""Slot, target, token and position of a row, as in `batch_rows.StepRows`."""

_UNKNOWN: _Row = (-1, -1, -1, -1)
"""A row that no step has."""


def step_rows(slots: Seq[Slot], given: Mapping[int, SequenceRows], nowhere: int) -> list[_Row]:
    """The rows of a decode step of these slots. A slot has one row, which goes on from what the device has, or the rows
    that `given` has for its index in `slots`. The last given row moves the slot on; tokens sampled after the others go
    to the slot `nowhere`."""
    rows = [slot.row for slot in slots]
    for number in sorted(given, reverse=True):
        slot, part = slots[number].index, given[number]
        of_slot = [(slot, nowhere, token, at) for at, token in enumerate(part.ids, part.start)]
        _, _, token, position = of_slot[-1]
        of_slot[-1] = slot, slot, token, position
        rows[number : number + 1] = of_slot
    return rows


class DecodeInputs:
    """The inputs of decode steps of up to R rows, of sequences in up to S slots.

    One int32 vector has what the host writes: the rows [4, R], the slots' block tables [groups, S + 1, blocks], and,
    with `turns`, the slots' lags [S + 1]: by how much less than its position a row is rotated. Slot S belongs to
    padding rows. Tokens and positions of slots are the device's own. A step begins by reading its rows from the slots'
    tables (`place`).

    Changes are collected on the host in `changes`, values by index, and sent together by `send`. adapters: number of
    LoRA adapters, whose scales by slot are held beside the vector.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        blocks: int,
        groups: int,
        device: torch.device,
        turns: bool = False,
        adapters: int = 0,
    ) -> None:
        self.rows, self.slots, self.blocks, self.groups = aligned(rows), slots, blocks, groups
        self.turns = turns
        held = aligned(slots + 1)
        end = 4 * self.rows + groups * held * blocks
        self.all = torch.zeros(end + (held if turns else 0), dtype=torch.int32, device=device)
        self.step = StepRows(*self.all[: 4 * self.rows].view(4, self.rows))
        self.step.slots.fill_(slots)
        self.step.targets.fill_(slots)
        self.of_slots = SlotTables(
            torch.zeros(held, dtype=torch.int64, device=device),
            torch.zeros(held, dtype=torch.int32, device=device),
            self.all[4 * self.rows : end].view(groups, held, blocks),
        )
        self._lags, self._first_lag = self.all[end:], end
        self._angles = torch.zeros(self.rows, dtype=torch.int32, device=device) if turns else None
        self.of_slots.tables.fill_(PADDING_BLOCK)
        self.placed = RowInputs(
            torch.zeros(self.rows, dtype=torch.int64, device=device),
            torch.zeros(self.rows, dtype=torch.int32, device=device),
            torch.full((groups, self.rows, blocks), PADDING_BLOCK, dtype=torch.int32, device=device),
        )
        self.adapters = torch.zeros(adapters, held, dtype=torch.float32, device=device)
        self._adapted = set[int]()  # slots whose scales are not all 0
        self.changes: dict[int, int] = {}
        self._sent: list[_Row] = []
        self._going_on: list[Slot] = []  # the slots of the last step, if the host gave no row of it

    def extend(self, slot: int, group: int, first: int, blocks: Seq[int]) -> None:
        """Sets entries `first`, ... of a slot's block table."""
        held = self.of_slots.tables.shape[1]
        start = 4 * self.rows + (group * held + slot) * self.blocks + first
        self.changes.update(zip(range(start, start + len(blocks)), blocks, strict=True))

    def set_lag(self, slot: int, lag: int) -> None:
        """Sets a slot's lag: by how much less than its position a row is rotated. Without `turns` it does nothing."""
        if self._angles is not None:
            self.changes[self._first_lag + slot] = lag

    def set_adapters(self, slot: int, scales: Scales | None) -> None:
        """Sets the scales of a slot's LoRA adapters, in stream order."""
        if scales is None:
            self._adapted.discard(slot)
            self.adapters[:, slot].zero_()
            return
        self._adapted.add(slot)
        made = torch.tensor(scales, dtype=torch.float32)
        made = made.pin_memory() if self.adapters.is_cuda else made
        self.adapters[:, slot].copy_(made, non_blocking=True)

    def has_adapters(self, slot: int) -> bool:
        """Whether a slot has scales that are not all 0."""
        return slot in self._adapted

    def turn(self, rows: int) -> None:
        """Computes the positions that the first `rows` rows are rotated by, once these are placed."""
        if self._angles is not None:
            lags = self._lags.index_select(0, self.step.slots[:rows])
            torch.sub(self.placed.positions[:rows], lags, out=self._angles[:rows])

    def set_rows(self, slots: list[Slot], given: Mapping[int, SequenceRows]) -> int:
        """Makes the `step_rows` of these slots the rows of the next step, and all others padding; returns their number.

        The device overwrites the tokens of drafted rows, so these rows are sent again for the following step.
        """
        if not given and slots == self._going_on:
            return len(slots)
        rows = step_rows(slots, given, self.slots)
        padding, has_drafts = (self.slots, self.slots, 0, 0), False
        for number, (new, old) in enumerate(zip_longest(rows, self._sent, fillvalue=padding)):
            if new != old:
                self.changes.update((part * self.rows + number, value) for part, value in enumerate(new))
                has_drafts |= new[2] < -1
        self._sent = [row if row[2] >= -1 else _UNKNOWN for row in rows] if has_drafts else rows
        self._going_on = [] if given else slots
        return len(rows)

    def send(self) -> None:
        """Sends the changes since the last call, in stream order, without waiting for the device."""
        if not self.changes:
            return
        pairs = torch.tensor([list(self.changes), list(self.changes.values())])
        if self.all.is_cuda:
            pairs = pairs.pin_memory().to(self.all.device, non_blocking=True)
        self.all.index_copy_(0, pairs[0], pairs[1].to(torch.int32))
        self.changes.clear()

    def batch(self, rows: int, shares_sequences: bool, adapted: bool = False) -> ForwardBatch:
        """The batch of the first `rows` rows, once they are placed. adapted: with their adapters, as they are now."""
        tokens, positions, tables = self.placed
        scales = self.adapters.index_select(1, self.step.slots[:rows]) if adapted else None
        return ForwardBatch(
            "decode",
            tokens[:rows],
            positions[:rows],
            tables[:, :rows],
            shares_sequences=shares_sequences,
            angle_rows=None if self._angles is None else self._angles[:rows],
            adapters=scales,
        )


@dataclass(frozen=True)
class PrefillLayout:
    """The layout of a step's parts in the vector: first entry and length of the ids (int64), the rows with
    logits (int64), positions, sequences of the rows, attention tiles of `tile_rows` rows, and, where rows may be
    rotated by positions other than their own, rows of rotary tables.
    """

    parts: tuple[tuple[int, int], ...]
    tile_rows: int

    @classmethod
    def of(cls, rows: int, sequences: int, tile: int, turns: bool = False) -> "PrefillLayout":
        tiles = (rows + (tile - 1) * sequences) // tile
        lengths = (2 * rows, 2 * sequences, rows, rows, TILE_FIELDS * tiles, rows if turns else 0)
        ends = accumulate(-(-length // _ALIGNED) * _ALIGNED for length in lengths)
        return cls(tuple(zip([0, *ends], lengths, strict=False)), tile)

    @property
    def entries(self) -> int:
        first, length = self.parts[-1]
        return first + length


class PrefillInputs:
    """The inputs of prefill steps: one int32 vector, laid out by each step's size, and block tables [groups, sequences
    + 1, blocks], the last of them for padding rows.

    Args:
        ctx_size: most positions of a sequence.
        chunk_size: most rows of a sequence in a step.
        batch_invariant: the attention's, which determines its tiles.
        embedding_length: length of rows given as embeddings; 0: none are.
        turns: rows may be rotated by positions other than their own.
        adapters: number of LoRA adapters that rows may have.
        whole_chunks: see `graph_keys.prefill_key`.
    """

    def __init__(
        self,
        ctx_size: int,
        chunk_size: int,
        batch_invariant: bool,
        groups: int,
        device: torch.device,
        embedding_length: int = 0,
        turns: bool = False,
        adapters: int = 0,
        whole_chunks: bool = False,
    ) -> None:
        self._turns, self._adapter_count = turns, adapters
        most = max(PREFILL_ROWS[-1], WHOLE_CHUNK) if whole_chunks else PREFILL_ROWS[-1]
        self._adapters = torch.zeros(adapters * most, dtype=torch.float32, device=device)
        self._ctx_size, self._chunk_size = ctx_size, chunk_size
        self._device = device
        self._tile_rows = cache(lambda longest: tile_rows(longest, device, batch_invariant))
        keys = [GraphKey("prefill", r, s) for r in PREFILL_ROWS for s in PREFILL_SEQUENCES]
        sizes = [self.layout(key) for key in (*keys, GraphKey("prefill", most, 1))]
        self._all = torch.zeros(max(s.entries for s in sizes), dtype=torch.int32, device=device)
        shape = (groups, PREFILL_SEQUENCES[-1] + 1, max(STATE_ENTRIES, -(-ctx_size // BLOCK_SIZE)))
        self.tables = torch.full(shape, PADDING_BLOCK, dtype=torch.int32, device=device)
        self._embeds: EmbeddedRows | None = None
        if embedding_length:
            self._embeds = EmbeddedRows(
                torch.full((most,), -1, dtype=torch.int64, device=device),
                torch.zeros(most, embedding_length, device=device),
            )

    def layout(self, key: GraphKey) -> PrefillLayout:
        tile = self._tile_rows(min(key.rows, self._chunk_size))
        return PrefillLayout.of(key.rows, key.sequences, tile, self._turns)

    def batch(self, key: GraphKey) -> ForwardBatch:
        """The batch of a step of this size."""
        layout = self.layout(key)
        ids, last, positions, sequences, tiles, angles = (
            self._all[first : first + length] for first, length in layout.parts
        )
        longest = min(key.rows, self._chunk_size)
        return ForwardBatch(
            "prefill",
            token_ids=ids.view(torch.int64),
            positions=positions,
            block_tables=self.tables,
            logits_rows=last.view(torch.int64),
            tiles=PrefillTiles(sequences, tiles.view(-1, TILE_FIELDS), layout.tile_rows, longest, 0),
            embeds=None
            if self._embeds is None
            else EmbeddedRows(self._embeds.rows[: key.rows], self._embeds.values[: key.rows]),
            angle_rows=angles if self._turns else None,
            adapters=self._scales(key.rows) if key.adapted else None,
        )

    def _scales(self, rows: int) -> Tensor:
        """The scales fp32 [M, rows] of M adapters in a step of `rows` rows."""
        return self._adapters[: self._adapter_count * rows].view(self._adapter_count, rows)

    def send(
        self,
        key: GraphKey,
        rows: Seq[SequenceRows],
        embeds: EmbeddedRows | None = None,
        angles: Seq[int] | None = None,
    ) -> None:
        """Makes these the rows of the next step, in stream order, without waiting for the device."""
        if rows:
            tables = self._pinned(pad_block_tables([part.block_tables for part in rows], STATE_ENTRIES))
            self.tables[:, : len(rows), : tables.shape[2]].copy_(tables, non_blocking=True)
        layout = self.layout(key)
        entries = torch.zeros(layout.entries, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        for (first, _), part in zip(layout.parts, self._entries(key, layout, rows, angles), strict=True):
            entries[first : first + len(part)] = part
        self._all[: len(entries)].copy_(entries, non_blocking=True)
        if key.adapted:
            made = torch.zeros(self._adapter_count, key.rows)
            if (scales := adapter_scales(rows)) is not None:
                made[:, : len(scales[0])] = torch.tensor(scales)
            made = made.pin_memory() if self._device.type == "cuda" else made
            self._scales(key.rows).copy_(made, non_blocking=True)
        if self._embeds is not None:
            count = 0 if embeds is None else len(embeds.rows)
            if embeds is not None:
                self._embeds.rows[:count].copy_(embeds.rows)
                self._embeds.values[:count].copy_(embeds.values)
            self._embeds.rows[count : key.rows].fill_(-1)

    def _entries(
        self, key: GraphKey, layout: PrefillLayout, rows: Seq[SequenceRows], angles: Seq[int] | None
    ) -> tuple[Tensor, ...]:
        """The parts, int32, each without trailing zeros."""
        lengths = [len(part.ids) for part in rows]
        count = sum(lengths)
        sequences, tiles = tile_entries([part.start for part in rows], lengths, layout.tile_rows)
        spans = [_int32s(range(part.start, part.end)) for part in rows]
        padding = _int32s(range(key.rows - count)) % BLOCK_SIZE
        positions = torch.cat([*spans, padding.clamp_(max=self._ctx_size - 1)])
        of_padding = torch.full((key.rows - count,), PREFILL_SEQUENCES[-1], dtype=torch.int32)
        last = [end - 1 for end in accumulate(lengths)]
        ids = [token for part in rows for token in part.ids]
        turned = positions if angles is None else _int32s(angles)
        return (
            _halves(ids), _halves(last), positions, torch.cat([_int32s(sequences), of_padding]), _int32s(tiles),
            turned if self._turns else positions[:0],
        )  # fmt: skip

    def _pinned(self, values: list[int] | list[list[list[int]]]) -> Tensor:
        made = torch.tensor(values, dtype=torch.int32)
        return made.pin_memory() if self._device.type == "cuda" else made


class PromptEnds:
    """The inputs of sampling after a prefill step of up to R rows: the slots and positions of its rows of logits.

    One int32 vector: `slots` [R], `positions` [R] of the rows' tokens, and the turn of `chosen`, a ring of its own.
    """

    def __init__(self, rows: int, turns: int, device: torch.device) -> None:
        self.rows = aligned(rows)
        self._all = torch.zeros(2 * self.rows + 1, dtype=torch.int32, device=device)
        self.slots, self.positions = self._all[: self.rows], self._all[self.rows : 2 * self.rows]
        self.chosen = ChosenTokens(
            ChosenTokens.allocate(turns, self.rows, device).tokens, self._all[2 * self.rows :]
        )

    def send(self, slots: Seq[int], positions: Seq[int], turn: int) -> None:
        """Makes these the rows of the next step, in stream order, without waiting for the device."""
        padding = [0] * (self.rows - len(slots))
        made = torch.tensor([*slots, *padding, *positions, *padding, turn], dtype=torch.int32)
        self._all.copy_(made.pin_memory() if self._all.is_cuda else made, non_blocking=True)


def _int32s(values: Seq[int]) -> Tensor:
    """Numbers as int32."""
    if isinstance(values, range):
        return torch.arange(values.start, values.stop, dtype=torch.int32)
    return torch.tensor(values, dtype=torch.int32)


def _halves(values: Seq[int]) -> Tensor:
    """Numbers as the int32 halves of int64 values."""
    return torch.tensor(values, dtype=torch.int64).view(torch.int32)
