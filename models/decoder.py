"""The decoder: llama, Mistral, Qwen2 and Qwen3 shapes on the shared layers.

What differs between them (biases, query/key norms, rotary layout, window, tied output) follows from the
configuration and from which tensors are there. The decoder knows positions and one cache; it does not know of
requests, text or sampling.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec, Backend, Hidden, KVLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.rope import rope_table
from quengine.models.config import ModelConfig
from quengine.models.layers import Attention, FeedForward, LayerTensors


class Block:
    """One transformer layer."""

    def __init__(
        self, config: ModelConfig, tensors: LayerTensors, backend: Backend[Any], spec: AttentionSpec
    ) -> None:
        self.attention = Attention(config, tensors, backend, spec)
        self.ffn = FeedForward(config, tensors, backend)

    def __call__(
        self, batch: ForwardBatch, x: Hidden, cache: KVLayer, next_norm: RMSNorm, rows: Tensor | None = None
    ) -> Hidden:
        """`next_norm`: the norm behind this layer, the next one's or the output's. `rows`: see Attention."""
        x = self.attention(batch, x, cache, self.ffn.ffn_norm, rows)
        return self.ffn(batch, x, next_norm)


class Decoder:
    """Token ids in, logits out, over a key/value cache of at most `ctx_size` positions.

    Args:
        config: the model's shape.
        tensors: every tensor of the model by its GGUF name.
        backend: holds the weights and runs the operations.
        ctx_size: positions for which rotary rows and the causal mask are made, once, here.
        chunk_size: the most tokens of one sequence that a `forward` takes.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, QuantTensor],
        backend: Backend[Any],
        ctx_size: int,
        chunk_size: int,
    ) -> None:
        self.config = config
        self.backend = backend
        self.chunk_size = chunk_size
        top = LayerTensors(tensors, "")
        self.token_embd = backend.weight(top.take("token_embd"))
        self.output_norm = RMSNorm(backend.vector(top.take("output_norm")), config.rms_eps)
        self.output = backend.weight(top.take("output")) if top.has("output") else self.token_embd
        shared = self._attention_spec(ctx_size)
        self.blk = [
            self._block(LayerTensors(tensors, f"blk.{i}."), shared) for i in range(config.block_count)
        ]
        self._next_norms = [block.attention.attn_norm for block in self.blk[1:]] + [self.output_norm]

    def forward(self, batch: ForwardBatch, cache: Sequence[KVLayer]) -> Tensor:
        """Logits [n, vocab] of the rows `batch.logits_rows`, or of all, given the cache before them."""
        return self._logits(batch, self._layers(batch, cache, batch.logits_rows))

    def forward_parts(
        self, batch: ForwardBatch, cache: Sequence[KVLayer], parts: Iterable[Tensor]
    ) -> Iterator[Tensor]:
        """Logits [n, vocab] of the rows in each of `parts`, int64 [n] on the device; `batch.logits_rows` is not read.

        Each is computed when it is asked for, so that never more than one part's need be held.
        """
        x = self._layers(batch, cache, None)
        for rows in parts:
            yield self._logits(batch, self.backend.gather_rows(x, rows))

    def hidden(self, batch: ForwardBatch, cache: Sequence[KVLayer]) -> Tensor:
        """The rows that the output matrix would read, of all tokens: [T, embedding length]."""
        x = self._layers(batch, cache, None)
        return self.backend.rms_norm(x, self.output_norm)

    def _logits(self, batch: ForwardBatch, x: Hidden) -> Tensor:
        return self.backend.logits(batch, x, self.output_norm, self.output)

    def _layers(self, batch: ForwardBatch, cache: Sequence[KVLayer], rows: Tensor | None) -> Hidden:
        """`rows`: those that go on behind the last layer's attention."""
        x, last = self.backend.embed(batch, self.token_embd), self.blk[-1]
        for block, layer, next_norm in zip(self.blk, cache, self._next_norms, strict=True):
            x = block(batch, x, layer, next_norm, rows if block is last else None)
        return x

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that one decoded token reads: every matrix once, one row of the embedding."""
        blocks = sum(block.attention.nbytes + block.ffn.nbytes for block in self.blk)
        return int(blocks + self.output.nbytes + self.token_embd.nbytes // self.token_embd.rows)

    def _block(self, tensors: LayerTensors, shared: AttentionSpec) -> Block:
        spec = shared
        if self.config.qk_norm:
            (q_norm,), (k_norm,) = tensors.take("attn_q_norm"), tensors.take("attn_k_norm")
            spec = replace(shared, q_norm=self.backend.vector([q_norm]), k_norm=self.backend.vector([k_norm]))
        return Block(self.config, tensors, self.backend, spec)

    def _attention_spec(self, ctx_size: int) -> AttentionSpec:
        config, device = self.config, self.backend.device
        cos, sin = rope_table(config.rope, ctx_size, device)
        band = causal_mask_band(min(self.chunk_size, ctx_size), ctx_size, config.sliding_window, device)
        return AttentionSpec(
            heads=config.head_count,
            kv_heads=config.head_count_kv,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=config.sliding_window,
            rope_layout=config.rope_layout,
            cos=cos,
            sin=sin,
            query_scale=_query_scale(config, ctx_size, device),
            mask_band=band,
            eps=config.rms_eps,
        )


def _query_scale(config: ModelConfig, ctx_size: int, device: torch.device) -> Tensor | None:
    """What the query at each position is multiplied with, fp32 [ctx_size] (Ministral 3), or None."""
    if not config.attention_temperature_scale:
        return None
    steps = torch.arange(ctx_size, dtype=torch.float64) // config.attention_temperature_length
    return (1.0 + config.attention_temperature_scale * torch.log1p(steps)).to(device, torch.float32)
