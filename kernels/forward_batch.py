"""`ForwardBatch`, the one description of a step, read by the decoder and by every backend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from quengine.kernels.embedded_rows import EmbeddedRows
from quengine.kernels.kv.cache_types import PADDING_BLOCK

Phase = Literal["prefill", "decode"]

BlockTables: TypeAlias = Sequence[Sequence[int]]
"""The block tables of one sequence: for each cache group, the blocks of its positions in order."""


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
            has it.
        query_lens: in prefill, the number of rows of each sequence, which are concatenated; empty likewise.
        logits_rows: int64 [n] on the device: the rows to compute logits for; None: all.
        shares_sequences: in decode, whether a sequence may have several rows, at consecutive positions. All keys and
            values of the batch must then be written before any are read.
        tiles: in a captured prefill step, the tiles of its rows; elsewhere the backend computes them.
        embeds: in prefill, the rows that are given as embeddings. Their tokens are of the vocabulary, and not read.
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

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    def block_tables_of(self, group: int) -> Tensor:
        """The block tables [S, most blocks] of a cache group, contiguous."""
        return self.block_tables[group]

    def slots_of(self, group: int) -> Tensor:
        """The slots [S] of the sequences in a cache group with recurrent state, whose tables have one entry."""
        return self.block_tables[group][:, 0]

    def sequences(self, group: int) -> Iterator[tuple[slice, int, int]]:
        """In a group of layers that keep a state, of each sequence in prefill and of each row in decode: its rows, the
        position of the first, and its slot."""
        slots = self.slots_of(group).tolist()
        if self.phase == "prefill":
            ends = list(accumulate(self.query_lens))
            spans = [slice(end - length, end) for length, end in zip(self.query_lens, ends, strict=True)]
            yield from zip(spans, self.starts, slots, strict=True)
        else:
            spans = [slice(row, row + 1) for row in range(len(self))]
            yield from zip(spans, self.positions.tolist(), slots, strict=True)

    def chunks(self, group: int) -> Iterator[tuple[slice, int, Tensor]]:
        """For each sequence in prefill: its rows, the position of the first, and its block table [blocks]."""
        ends = accumulate(self.query_lens)
        for start, length, end, table in zip(
            self.starts, self.query_lens, ends, self.block_tables_of(group), strict=True
        ):
            yield slice(end - length, end), start, table


def prefill_batch(
    ids: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[BlockTables],
    device: torch.device,
    all_logits: bool = False,
    embeds: EmbeddedRows | None = None,
) -> ForwardBatch:
    """The batch of chunks `ids`, each at its position in `starts`, with its sequence's block tables.

    Logits are computed for each chunk's last row, or for all rows.
    """
    lengths = [len(chunk) for chunk in ids]
    if len(ids) == 1:
        positions = torch.arange(starts[0], starts[0] + lengths[0], dtype=torch.int32, device=device)
    else:
        spans = [torch.arange(s, s + n, dtype=torch.int32) for s, n in zip(starts, lengths, strict=True)]
        positions = torch.cat(spans).to(device)
    last = [end - 1 for end in accumulate(lengths)]
    every = all_logits or len(last) == sum(lengths)
    return ForwardBatch(
        phase="prefill",
        token_ids=torch.tensor([token for chunk in ids for token in chunk], device=device),
        positions=positions,
        block_tables=torch.tensor(pad_block_tables(tables), dtype=torch.int32, device=device),
        starts=tuple(starts),
        query_lens=tuple(lengths),
        logits_rows=None if every else torch.tensor(last, device=device),
        embeds=embeds,
    )


def decode_batch(
    ids: Sequence[int],
    positions: Sequence[int],
    tables: Sequence[BlockTables],
    device: torch.device,
    shares_sequences: bool = False,
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
    )


def pad_block_tables(tables: Sequence[BlockTables]) -> list[list[list[int]]]:
    """The block tables [G][S][most blocks] of sequences, padded to the longest with the padding block."""
    most = max(len(table) for of_sequence in tables for table in of_sequence)
    return [
        [[*table, *([PADDING_BLOCK] * (most - len(table)))] for table in of_group]
        for of_group in zip(*tables, strict=True)
    ]
