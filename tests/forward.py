"""Steps of a decoder, as tests ask for them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.backend import KVLayer, LayerState
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.phase import Phase
from quengine.models.decoder import Decoder


def one_sequence(
    ids: Sequence[int] | Tensor,
    start: int = 0,
    *,
    table: Sequence[int] | None = None,
    phase: Phase | None = None,
    all_logits: bool = False,
    device: torch.device | str = "cpu",
    blocks: int = 64,
    groups: int = 1,
) -> ForwardBatch:
    """Tokens of a sequence from a position on; without a table, position p is row p of the cache.

    A single token is a decode step, unless `phase` says otherwise.
    """
    tokens = [int(token) for token in ids]
    blocks_of = list(range(blocks)) if table is None else [int(block) for block in table]
    where = torch.device(device)
    if phase == "prefill" or (phase is None and len(tokens) > 1):
        return prefill_batch([tokens], [start], [[blocks_of] * groups], where, all_logits)
    assert len(tokens) == 1
    return decode_batch(tokens, [start], [[blocks_of] * groups], where)


def forward(
    decoder: Decoder,
    ids: Sequence[int] | Tensor,
    layers: Sequence[LayerState],
    start: int = 0,
    **options: Any,
) -> Tensor:
    """Logits of such a step, on the decoder's device: `one_sequence` has the options."""
    options.setdefault(
        "blocks", next(len(layer.k) for layer in layers if isinstance(layer, KVLayer)) // BLOCK_SIZE
    )
    options.setdefault("groups", len(decoder.config.cache_groups))
    batch = one_sequence(ids, start, device=decoder.backend.device, **options)
    return decoder.forward(batch, layers)
