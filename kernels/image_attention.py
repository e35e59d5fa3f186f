"""Attention of image rows, which see the later rows of their image too: the torch definition, run on every device.

Source: Gemma Team 2025, "Gemma 3" (bidirectional attention within an image).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.kernels.attention import attention
from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.hadamard import hadamard
from quengine.kernels.kv.kv_rows import read_rows, slot_mapping


def spans_of(batch: ForwardBatch, spec: AttentionSpec) -> Sequence[tuple[int, int, int]]:
    """The runs of a step's rows that attend both ways in a layer, as `EmbeddedRows` has them."""
    return batch.embeds.spans if batch.embeds is not None and spec.images_both_ways else ()


def attend_within_images(
    out: Tensor, q: Tensor, spec: AttentionSpec, layer: KVLayer, batch: ForwardBatch
) -> Tensor:
    """`out` [T, heads * head_dim] with the rows of `batch.embeds.spans` written over it.

    q: [T, heads, head_dim], what `rope_store` returns in a prefill step, whose keys and values are in the cache. A row
    sees what causal attention sees, within the layer's window, and all rows of its run.
    """
    spans = spans_of(batch, spec)
    for first, end, before in spans:
        for rows, start, table in batch.chunks(spec.cache_group):
            if rows.start <= first < rows.stop:
                begin, last = start + first - rows.start, start + end - rows.start
                run = begin - before
                low = 0 if spec.window is None else min(run, max(0, begin - spec.window + 1))
                keys = torch.arange(low, last, device=q.device)
                distance = torch.arange(begin, last, device=q.device)[:, None] - keys
                seen = distance >= 0
                if spec.window is not None:
                    seen &= distance < spec.window
                k, v = (part.to(q.dtype) for part in read_rows(layer, slot_mapping(keys, table)))
                found = attention(
                    q[first:end], k, v, seen | (keys >= run), spec.scale, spec.sinks, spec.softcap
                )
                found = hadamard(found) if layer.format.hadamard else found
                out[first:end] = found.reshape(end - first, -1).to(out.dtype)
    return out
