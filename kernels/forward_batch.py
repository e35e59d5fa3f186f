"""`ForwardBatch`, the one description of a step, read by the decoder and by every backend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from quengine.kernels.embedded_rows import EmbeddedRows
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK
from quengine.kernels.phase import Phase

BlockTables: TypeAlias = Sequence[Sequence[int]]
"""The block tables of one sequence: for each cache group, the blocks of its positions in order. In prefill, a group
with a recurrent state has a `state_table` instead."""

MOST_CHECKPOINTS = 2
"""The most states of a sequence that a prefill step keeps beside the final one."""

STATE_ENTRIES = 1 + 2 * MOST_CHECKPOINTS
"""Entries of a `state_table`, padding included."""


class StateCheckpoint(NamedTuple):
    """Tells a prefill step to write a sequence's state after its first `position` tokens to block `block` as well. The
    step has the row at position `position - 1`."""

    position: int
    block: int


def state_table(slot: int, checkpoints: Sequence[StateCheckpoint]) -> list[int]:
    """A sequence's block table for a prefill step, in a cache group with a state.

    It has the slot, then each checkpoint's negated position and block, in order of position. Padding entries are not
    negative, which tells them from checkpoints.
    """
    return [slot, *chain.from_iterable((-position, block) for position, block in checkpoints)]


class PendingStates(Protocol):
    """The states of a layer that a step with drafts has read, but not yet written."""

    def advance(self, accepted: Tensor) -> None:
        """Advances the state of sequence b over its first `accepted[b] + 1` rows. accepted: int32 [B], on the device.
        The step has the same number of rows of each sequence, one sequence after the other."""
        ...


@dataclass(frozen=True, eq=False)
class PrefillTiles:
    """The tiles of a prefill step's chunks for attention, on the device.

    Attributes:
        sequences: int32 [T], the sequence of each row.
        tiles: int32 [tiles, 5], each of at most `block_rows` rows of one chunk: first row of the chunk, first row of
            the tile within it, rows of the chunk, position of the chunk's first row, sequence. Tiles with the most keys
            come first, so that no long one runs alone at the end; a tile of a chunk without rows is padding.
        block_rows: most rows of a tile.
        longest: most rows of a chunk.
        deepest: most positions of a sequence, its chunk included.
    """

    sequences: Tensor
    tiles: Tensor
    block_rows: int
    longest: int
    deepest: int


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """The tokens of one step, and where their keys and values lie in the paged KV cache.

    A single sequence is a batch of one. In decode every row has its own block table, so S is T; rows of a draft are
    rows of the same sequence. Rows without a sequence (padding) have a block table of padding blocks.

    Attributes:
        phase: "prefill" or "decode", which selects the kernels of the step, and so its last bits. A prompt's chunk is
            prefill even if it is a single token.
        token_ids: int64 [T], on the device.
        positions: int32 [T], each token's position in its sequence, on the device.
        block_tables: int32 [G, S, most blocks], on the device, contiguous, one table per cache group
            (ModelConfig.cache_groups): position p of a sequence is row
            `table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE` of the cache of the group's layers. Entries of
            positions that have left the group's window name the padding block.
        starts: in prefill, the position of each sequence's first row. Empty in a captured step, where only the device
            knows the positions.
        query_lens: in prefill, the number of rows of each sequence; the sequences' rows are concatenated. Empty in a
            captured step.
        logits_rows: int64 [n] on the device: the rows to compute logits for; None: all.
        shares_sequences: in decode, whether a sequence may have several rows, at consecutive positions. The keys and
            values of all rows must then be written before any are read.
        tiles: in a captured prefill step, the tiles of its rows; elsewhere the backend computes them.
        embeds: in prefill, the rows that are given as embeddings. Their token ids are valid, but not read.
        angle_rows: int32 [T], on the device: the row of the rotary tables that rotates each token; None: its position.
        chunked: the batch for layers whose attention is within chunks of positions (`with_chunks`); None: there are no
            such layers, or the backend finds the chunks by the positions.
        pending: in a decode step that verifies drafts on the device, a list to which each layer with a state appends
            its PendingStates instead of writing the state; None: layers write their states.
        adapters: fp32 [M, T], on the device, contiguous: the scale of each LoRA adapter for each row
            (kernels/lora/low_rank.py); None: no row has any.
    """

    phase: Phase
    token_ids: Tensor
    positions: Tensor
    block_tables: Tensor
    starts: tuple[int, ...] = ()
    query_lens: tuple[int, ...] = ()
    logits_rows: Tensor | None = None
    shares_sequences: bool = False
    tiles: PrefillTiles | None = None
    embeds: EmbeddedRows | None = None
    angle_rows: Tensor | None = None
    chunked: "ForwardBatch | None" = None
    pending: list[PendingStates] | None = None
    adapters: Tensor | None = None

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    def selected(self, rows: Tensor) -> "ForwardBatch":
        """The batch for operations on rows `rows`, int64 [n], alone: with the adapter scales of these rows."""
        if self.adapters is None:
            return self
        return replace(self, adapters=self.adapters[:, rows].contiguous())

    def of_last_rows(self, rows: Tensor) -> "ForwardBatch":
        """The batch of each chunk's last row alone, for layers that write no keys, in an eager prefill step. rows:
        int64 [S], the numbers of these rows."""
        starts = tuple(start + length - 1 for start, length in zip(self.starts, self.query_lens, strict=True))
        return replace(
            self,
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            angle_rows=None if self.angle_rows is None else self.angle_rows[rows],
            starts=starts,
            query_lens=(1,) * len(starts),
            logits_rows=None,
            chunked=None,
            adapters=self.selected(rows).adapters,
        )

    def with_chunks(self, length: int) -> "ForwardBatch":
        """The batch with `chunked`, in which each chunk of `length` positions is a sequence of its own that begins at
        position 0, with the chunk's blocks. Rows are still rotated by their true positions. `length` is a multiple of
        BLOCK_SIZE."""
        device, (_, sequences, held) = self.device, self.block_tables.shape
        if self.phase == "decode":
            owners, firsts = torch.arange(sequences, device=device), self.positions.long() // length
            starts, lengths = list[int](), list[int]()
        else:
            pieces = [
                piece
                for n, at in enumerate(self.starts)
                for piece in _pieces(n, at, self.query_lens[n], length)
            ]
            owners = torch.tensor([piece[0] for piece in pieces], device=device)
            firsts = torch.tensor([piece[1] // length for piece in pieces], device=device)
            starts, lengths = [piece[1] % length for piece in pieces], [piece[2] for piece in pieces]
        blocks = length // BLOCK_SIZE
        columns = firsts[:, None] * blocks + torch.arange(min(blocks, held), device=device)
        tables = self.block_tables[:, owners[:, None], columns.clamp(max=held - 1)]
        chunked = replace(
            self,
            positions=self.positions % length,
            block_tables=tables.contiguous(),
            starts=tuple(starts),
            query_lens=tuple(lengths),
            angle_rows=self.positions if self.angle_rows is None else self.angle_rows,
            tiles=None,
            embeds=None,
        )
        return replace(self, chunked=chunked)

    def one_earlier(self) -> "ForwardBatch":
        """The batch with each row one position earlier; rows at position 0 stay there."""
        tiles = self.tiles
        if tiles is not None:
            moved = tiles.tiles.clone()
            moved[:, 3] = (moved[:, 3] - 1).clamp(min=0)
            tiles = replace(tiles, tiles=moved)
        starts = tuple(max(0, start - 1) for start in self.starts)
        return replace(self, positions=(self.positions - 1).clamp(min=0), starts=starts, tiles=tiles)

    def block_tables_of(self, group: int) -> Tensor:
        """The block tables [S, most blocks] of a cache group, contiguous."""
        return self.block_tables[group]

    def slots_of(self, group: int) -> Tensor:
        """The slots [S] of the sequences in a cache group with recurrent state: the first entries of their tables."""
        return self.block_tables[group][:, 0]

    def sequences(self, group: int, *parts: Tensor) -> Iterator[tuple[slice, int, int]]:
        """Yields, for each sequence in prefill and each row in decode, its rows, the position of the first of them, and
        its slot in `group`, a cache group with a state.

        A sequence with checkpoints comes in pieces that end at them. When the caller asks for the item after such a
        piece, the state is copied to the checkpoint's block, in all `parts` [slots, ...].
        """
        if self.phase == "decode":
            slots = self.slots_of(group).tolist()
            spans = [slice(row, row + 1) for row in range(len(self))]
            yield from zip(spans, self.positions.tolist(), slots, strict=True)
            return
        row = 0
        for start, length, slot, checkpoints in self.with_checkpoints(group):
            at, end = start, start + length
            for position, block in checkpoints:
                yield slice(row, row + position - at), at, slot
                row, at = row + position - at, position
                _copy(parts, slot, block)
            if at < end:
                yield slice(row, row + end - at), at, slot
                row += end - at

    def state_pieces(self, group: int) -> Iterator[tuple[slice, tuple[int, int] | None]]:
        """Yields the rows of a step in pieces that end at the checkpoints of any sequence; decode has one piece.

        It is for operations that continue from the states of the piece before. With each piece comes (slot, block), if
        the state of `slot` is to be copied to `block` after it, or None if it ends at no checkpoint.
        """
        if self.phase == "decode":
            yield slice(0, len(self)), None
            return
        done = row = 0
        for start, length, slot, checkpoints in self.with_checkpoints(group):
            for position, block in checkpoints:
                yield slice(done, row + position - start), (slot, block)
                done = row + position - start
            row += length
        if done < row:
            yield slice(done, row), None

    def with_checkpoints(self, group: int) -> Iterator[tuple[int, int, int, list[StateCheckpoint]]]:
        """For each sequence of a prefill step: the position of its first row, the number of its rows, its slot in
        `group`, a group with a state, and its checkpoints."""
        tables = self.block_tables_of(group)[:, :STATE_ENTRIES].tolist()
        for start, length, (slot, *entries) in zip(self.starts, self.query_lens, tables, strict=True):
            pairs = zip(entries[::2], entries[1::2], strict=False)
            yield start, length, slot, [StateCheckpoint(-mark, block) for mark, block in pairs if mark < 0]

    def chunks(self, group: int) -> Iterator[tuple[slice, int, Tensor]]:
        """For each sequence in prefill: its rows, the position of the first, and its block table [blocks]."""
        ends = accumulate(self.query_lens)
        for start, length, end, table in zip(
            self.starts, self.query_lens, ends, self.block_tables_of(group), strict=True
        ):
            yield slice(end - length, end), start, table


def _pieces(sequence: int, start: int, rows: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Cuts `rows` rows from position `start` on at the ends of chunks of `length`: (sequence, first position, rows)."""
    end = start + rows
    while start < end:
        stop = min(end, (start // length + 1) * length)
        yield sequence, start, stop - start
        start = stop


def _copy(parts: Sequence[Tensor], slot: int, block: int) -> None:
    for part in parts:
        part[block].copy_(part[slot])


def _from(first: int, count: int, device: torch.device) -> Tensor:
    """`count` positions from `first` on, int32. On the meta device, where arange imports sympy, without values."""
    if device.type == "meta":
        return torch.empty(count, dtype=torch.int32, device=device)
    return torch.arange(first, first + count, dtype=torch.int32, device=device)


def prefill_batch(
    ids: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[BlockTables],
    device: torch.device,
    all_logits: bool = False,
    embeds: EmbeddedRows | None = None,
    angle_rows: Sequence[int] | None = None,
) -> ForwardBatch:
    """The batch of chunks `ids`, each at its position in `starts`, with its sequence's block tables.

    Logits are computed for each chunk's last row, or for all rows.
    """
    lengths = [len(chunk) for chunk in ids]
    if len(ids) == 1:
        positions = _from(starts[0], lengths[0], device)
    else:
        spans = [torch.arange(s, s + n, dtype=torch.int32) for s, n in zip(starts, lengths, strict=True)]
        positions = torch.cat(spans).to(device)
    last = [end - 1 for end in accumulate(lengths)]
    every = all_logits or len(last) == sum(lengths)
    return ForwardBatch(
        phase="prefill",
        token_ids=torch.tensor([token for chunk in ids for token in chunk], device=device),
        positions=positions,
        block_tables=torch.tensor(pad_block_tables(tables, STATE_ENTRIES), dtype=torch.int32, device=device),
        starts=tuple(starts),
        query_lens=tuple(lengths),
        logits_rows=None if every else torch.tensor(last, device=device),
        embeds=embeds,
        angle_rows=_angle_rows(angle_rows, device),
    )


def decode_batch(
    ids: Sequence[int],
    positions: Sequence[int],
    tables: Sequence[BlockTables],
    device: torch.device,
    shares_sequences: bool = False,
    angle_rows: Sequence[int] | None = None,
) -> ForwardBatch:
    """The batch of one token per row, at its position, with its sequence's block tables; logits are computed
    for all.
    """
    return ForwardBatch(
        phase="decode",
        token_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        block_tables=torch.tensor(pad_block_tables(tables), dtype=torch.int32, device=device),
        shares_sequences=shares_sequences,
        angle_rows=_angle_rows(angle_rows, device),
    )


def _angle_rows(rows: Sequence[int] | None, device: torch.device) -> Tensor | None:
    return None if rows is None else torch.tensor(rows, dtype=torch.int32, device=device)


def pad_block_tables(tables: Sequence[BlockTables], least: int = 1) -> list[list[list[int]]]:
    """The block tables [G][S][most blocks] of sequences, padded with the padding block to the longest, and to `least`
    entries."""
    most = max(least, *(len(table) for of_sequence in tables for table in of_sequence))
    return [
        [[*table, *([PADDING_BLOCK] * (most - len(table)))] for table in of_group]
        for of_group in zip(*tables, strict=True)
    ]
