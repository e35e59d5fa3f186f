"""An encoder: embeddings of tokens, positions and kinds of segments, its layers, and a trained head where it has one.

All rows of a text are of one step, since every position sees every other; nothing is kept for the next.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.backend import Backend, Hidden, LayerState
from quengine.kernels.encoder_attention import EncoderAttentionSpec
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import LayerNorm, Norm
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rope import rope_table
from quengine.models.architectures import layers_of
from quengine.models.blocks.block import Block
from quengine.models.blocks.encoder import EncoderAttention, EncoderFeedForward
from quengine.models.config import ModelConfig, no_text
from quengine.models.layers import LayerTensors


class EncoderLayer:
    """Attention, then the feed-forward; what goes on is the LayerNorm of each one's sum with its input."""

    def __init__(self, block: Block, tensors: LayerTensors, turn: tuple[Tensor, Tensor] | None) -> None:
        assert isinstance(block.mixer, EncoderAttention) and isinstance(
            block.feed_forward, EncoderFeedForward
        )
        declared = block.mixer
        self.backend = tensors.backend
        cos, sin = (None, None) if turn is None else turn
        self.spec = EncoderAttentionSpec(declared.heads, declared.head_dim, declared.scale, cos, sin)
        merged = tensors.has("attn_qkv")
        self.entry = tensors.weight(*(["attn_qkv"] if merged else ["attn_q", "attn_k", "attn_v"]))
        self.entry_bias = _bias(tensors, *(["attn_qkv"] if merged else ["attn_q", "attn_k", "attn_v"]))
        self.output, self.output_bias = tensors.weight("attn_output"), _bias(tensors, "attn_output")
        self.attention_norm = _layer_norm(tensors, "attn_output_norm")
        self.gated = block.feed_forward.gated
        if self.gated:
            self.up = self.backend.gate_up_weight(*tensors.take("ffn_gate", "ffn_up"))
        else:
            self.up = tensors.weight("ffn_up")
        self.up_bias = _bias(tensors, "ffn_up")
        self.down, self.down_bias = tensors.weight("ffn_down"), _bias(tensors, "ffn_down")
        self.output_norm = _layer_norm(tensors, "layer_output_norm")

    def __call__(self, batch: ForwardBatch, x: Hidden) -> Hidden:
        backend = self.backend
        qkv = backend.norm_linear(batch, x, None, self.entry, self.entry_bias)
        y = backend.encoder_attention(batch, qkv, self.spec)
        total = backend.linear_add(batch, y, self.output, x, bias=self.output_bias)
        x = backend.normed(total, self.attention_norm)
        if self.gated:
            inner = backend.norm_glu(batch, x, None, self.up)
        else:
            inner = backend.norm_pointwise(batch, x, None, self.up, "gelu", self.up_bias)
        total = backend.linear_add(batch, inner, self.down, x, bias=self.down_bias)
        return backend.normed(total, self.output_norm)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        return int(sum(weight.nbytes for weight in (self.entry, self.output, self.up, self.down)))


def _bias(tensors: LayerTensors, *names: str) -> Tensor | None:
    return tensors.vector(*names, kind="bias") if tensors.has(names[0], "bias") else None


def _layer_norm(tensors: LayerTensors, name: str) -> LayerNorm:
    return LayerNorm(tensors.vector(name), tensors.vector(name, kind="bias"), tensors.eps)


class Encoder:
    """Makes hidden rows of texts, and scores of them where the model has a head.

    Args:
        config: the model's shape, whose `encoder` is given.
        tensors: every tensor of the model by its GGUF name.
        backend: holds the weights and runs the operations.
        ctx_size: the longest text.
        separator: the token that ends a segment, by which segments of a text differ in kind; None: all are of the
            first kind.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, QuantTensor],
        backend: Backend[Any],
        ctx_size: int,
        separator: int | None = None,
    ) -> None:
        assert config.encoder is not None
        self.config = config
        self.backend = backend
        self.chunk_size = ctx_size
        self.separator = separator
        sizes, width = config.encoder, config.embedding_length
        top = LayerTensors(tensors, None, backend, config.rms_eps)
        self.token_embd = top.weight("token_embd")
        self.positions = None if sizes.rotates else top.vector("position_embd").view(-1, width)
        self.token_types = top.vector("token_types").view(-1, width) if sizes.token_types else None
        self.norm: Norm = _layer_norm(top, "token_embd_norm")
        turn = None
        if sizes.rotates:
            turn = rope_table(config.rotation(0).spec(ctx_size), ctx_size, backend.device)
        self.blk = [
            EncoderLayer(block, LayerTensors(tensors, i, backend, config.rms_eps), turn)
            for i, block in enumerate(layers_of(config))
        ]
        self._head = _Head(top, width, sizes.head_dense) if sizes.classes else None

    def hidden(self, batch: ForwardBatch, _cache: Sequence[LayerState] = ()) -> Tensor:
        """The hidden rows of all tokens of whole texts: [T, embedding length].

        Raises:
            EngineError: a text does not begin in this step.
        """
        if any(start for _, start, _ in batch.chunks(0)):
            raise EngineError(
                "a text for an encoder is computed in one step, and this one goes on from another"
            )
        x = self.backend.embed(batch, self.token_embd)
        if self.positions is not None:
            x = x + self.positions[batch.positions.long()]
        if self.token_types is not None:
            x = x + self.token_types[self._kinds(batch)]
        x = self.backend.normed(x, self.norm)
        for layer in self.blk:
            x = layer(batch, x)
        return x if isinstance(x, Tensor) else torch.as_tensor(x)

    def scores(self, row: Tensor) -> Tensor:
        """Outputs of the trained head for the hidden row of a text's first position [embedding length]: [classes].

        Raises:
            EngineError: there is none.
        """
        if self._head is None:
            raise EngineError("the model has no trained head: it makes embeddings, and does not rank")
        return self._head(row)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Raises EngineError: there are no logits."""
        raise EngineError(no_text(self.config))

    def _kinds(self, batch: ForwardBatch) -> Tensor:
        """Of each token the number of separators before it in its text, as far as there are kinds: int64 [T]."""
        assert self.token_types is not None
        if self.separator is None or len(self.token_types) == 1:
            return torch.zeros(len(batch), dtype=torch.int64, device=self.backend.device)
        ends = (batch.token_ids == self.separator).long()
        kinds = [ends[rows].cumsum(0) - ends[rows] for rows, _, _ in batch.chunks(0)]
        return torch.cat(kinds).clamp_(max=len(self.token_types) - 1)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of weights that a step reads."""
        return sum(layer.nbytes for layer in self.blk)

    def step_bytes(self, _rows: int) -> int:
        return self.bytes_per_token


class _Head:
    """tanh(dense) where there is one, then the projection to classes; a single row, in plain matrices."""

    def __init__(self, top: LayerTensors, width: int, has_dense: bool) -> None:
        self._dense = _plain(top, "cls", width) if has_dense else None
        self._output = _plain(top, "cls.output", width)

    def __call__(self, row: Tensor) -> Tensor:
        if self._dense is not None:
            weight, bias = self._dense
            row = torch.tanh(weight @ row + bias)
        weight, bias = self._output
        return weight @ row + bias


def _plain(top: LayerTensors, name: str, width: int) -> tuple[Tensor, Tensor]:
    return top.vector(name).view(-1, width), top.vector(name, kind="bias")
