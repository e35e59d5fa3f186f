"""Hidden rows kept for each position of a sequence: the torch definition.

A layer that drafts tokens reads, beside a token, a hidden row of the position before it. For multi-token prediction
(models/draft_layer.py) that is the row after the final norm, fp16. For EAGLE-3 (models/eagle_decoder.py) it is rows of
several layers joined, fp32, as no norm limits them. These rows [rows, width] lie in blocks, as keys and values do: a
sequence's block table of the first cache group says where each position's row is. The backends do the same.
"""

import torch
from torch import Tensor

from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import BLOCK_SIZE


def places(batch: ForwardBatch, positions: Tensor) -> Tensor:
    """The kept row of each of `positions`, int64 [T], in the sequences of the batch's rows: int64 [T]."""
    tables, blocks = batch.block_tables_of(0), positions // BLOCK_SIZE
    return tables[_sequences(batch), blocks].long() * BLOCK_SIZE + positions % BLOCK_SIZE


def keep_rows(batch: ForwardBatch, rows: Tensor, kept: Tensor, newest: bool = False) -> None:
    """Writes rows [T, width] of any float type to the rows of `kept` for the step's positions.

    newest: in decode, write only the last of each sequence's rows, which are at consecutive positions.
    """
    positions = batch.positions.long()
    where, rows = places(batch, positions), rows.to(kept.dtype)
    if newest:
        last_position = batch.block_tables.shape[2] * BLOCK_SIZE - 1
        following = places(batch, (positions + 1).clamp(max=last_position))
        is_last = following != where.roll(-1)
        where, rows = where[is_last], rows[is_last]
    kept[where] = rows


def rows_before(batch: ForwardBatch, kept: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The kept row of the position before each of the step's: [T, width], zeros before the first position."""
    positions = batch.positions.long()
    rows = kept[places(batch, (positions - 1).clamp(min=0))].to(dtype)
    return rows * (positions > 0)[:, None]


NOT_DRAFTED = -1e30
"""The logit of a token outside a reduced vocabulary: finite, so that the others are sampled as without it."""


def spread_logits(logits: Tensor, tokens: Tensor, vocab: int) -> Tensor:
    """Logits [n, V] of the tokens int64 [V] among `vocab` tokens: [n, vocab], NOT_DRAFTED for the others."""
    out = torch.full((len(logits), vocab), NOT_DRAFTED, dtype=logits.dtype, device=logits.device)
    return out.index_copy_(1, tokens, logits)


def _sequences(batch: ForwardBatch) -> Tensor:
    """The index of each row's block table: int64 [T]."""
    if batch.phase == "decode":
        return torch.arange(len(batch), device=batch.device)
    if batch.tiles is not None:
        return batch.tiles.sequences.long()
    counts = torch.tensor(batch.query_lens, device=batch.device)
    return torch.arange(len(counts), device=batch.device).repeat_interleave(counts, output_size=len(batch))
