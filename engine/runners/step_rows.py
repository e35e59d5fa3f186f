"""The rows of a step, as the host describes them to the decoder and to captured steps."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from quengine.batch import Chunk
from quengine.kernels.forward_batch import BlockTables, ForwardBatch, Phase, decode_batch, prefill_batch
from quengine.request.sequence import Sequence


class SequenceRows(NamedTuple):
    """Rows of one sequence: `ids` at positions `start`, ..., with the sequence's block tables."""

    ids: Seq[int]
    start: int
    block_tables: BlockTables


def prefill_rows(chunks: Seq[Chunk]) -> list[SequenceRows]:
    return [SequenceRows(chunk.ids, chunk.start, chunk.sequence.block_tables) for chunk in chunks]


def decode_rows(sequences: Seq[Sequence]) -> list[SequenceRows]:
    """Of each sequence the first token that is not in the cache, behind those that its states lack, and its draft."""
    return [SequenceRows(decode_ids(s), s.num_cached_tokens - s.replay, s.block_tables) for s in sequences]


def decode_ids(sequence: Sequence) -> list[int]:
    """The tokens of a sequence's rows in a decode step."""
    first, end = sequence.num_cached_tokens - sequence.replay, sequence.num_cached_tokens + 1
    return [*sequence.token_ids[first:end], *sequence.draft]


def forward_batch(
    phase: Phase, rows: Seq[SequenceRows], device: torch.device, all_logits: bool = False
) -> ForwardBatch:
    """The batch of these rows. In prefill, logits are computed for each sequence's last row, or for all rows;
    in decode, for all.
    """
    ids, starts, tables = zip(*rows, strict=True)
    if phase == "prefill":
        return prefill_batch(ids, starts, tables, device, all_logits)
    return decode_batch(
        [token for part in ids for token in part],
        [start + n for part, start in zip(ids, starts, strict=True) for n in range(len(part))],
        [table for part, table in zip(ids, tables, strict=True) for _ in part],
        device,
        shares_sequences=any(len(part) > 1 for part in ids),
    )
