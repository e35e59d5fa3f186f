"""An encoder: embeddings of tokens, positions and kinds of segments, its layers, and a trained head where it has one.

All rows of a text are computed in one step, since every position sees every other. Nothing is kept for the next step.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from quengine.errors import EngineError
from quengine.kernels.backend import Backend, Hidden, LayerState
from quengine.kernels.encoder_attention import EncoderAttentionSpec
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import LayerNorm, layer_norm
from quengine.kernels.lora.change import LowRank
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rope import rope_table
from quengine.models.architectures import layers_of
from quengine.models.blocks.block import Block
from quengine.models.blocks.encoder import BidirectionalAttention, EncoderAttention, EncoderFeedForward
from quengine.models.blocks.feed_forward import FeedForward
from quengine.models.config import PROJECTIONS, EncoderSizes, ModelConfig, no_text
from quengine.models.layers import FeedForwardLayer, LayerTensors, MixerLayer, qkv_names
from quengine.models.rotation import Rotation


class BidirectionalMixer(MixerLayer):
    """A decoder's attention to both sides. turn: cosines and sines of positions, or None."""

    def __init__(
        self, declared: BidirectionalAttention, tensors: LayerTensors, turn: tuple[Tensor, Tensor] | None
    ) -> None:
        entry = tensors.weight(*qkv_names(tensors, "weight"))
        super().__init__(tensors, entry, "attn_output", partial=False, normed=declared.normed)
        causal = declared.causal
        cos, sin = (None, None) if turn is None else turn
        q_norm, k_norm = (
            tensors.vector(f"attn_{name}_norm") if causal.form.qk_norm == "head" else None for name in "qk"
        )
        self.spec = EncoderAttentionSpec(
            *(causal.heads, causal.head_dim, causal.scale, cos, sin, causal.kv_heads, q_norm, k_norm),
            eps=tensors.eps,
            reach=declared.reach,
        )
        self.post_norm = tensors.rms_norm("post_attention_norm", causal.norms.of_results)

    def mix(self, batch: ForwardBatch, x: Hidden, _state: None) -> Hidden:
        return self.backend.encoder_attention(batch, x, self.spec)


class BidirectionalLayer:
    """A decoder's layer with attention to both sides: norms in front of its parts and, if declared, on results."""

    def __init__(self, block: Block, tensors: LayerTensors, turn: tuple[Tensor, Tensor] | None) -> None:
        assert isinstance(block.mixer, BidirectionalAttention) and isinstance(block.feed_forward, FeedForward)
        self.mixer = BidirectionalMixer(block.mixer, tensors, turn)
        self.feed_forward = FeedForwardLayer(block.feed_forward, tensors)

    def __call__(self, batch: ForwardBatch, x: Hidden) -> Hidden:
        return self.feed_forward(batch, self.mixer(batch, x, None, self.feed_forward.norm), None)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        return self.mixer.nbytes + self.feed_forward.nbytes


class EncoderLayer:
    """Attention, then the feed-forward. A LayerNorm follows the sum of each with its input."""

    def __init__(self, block: Block, tensors: LayerTensors, turn: tuple[Tensor, Tensor] | None) -> None:
        assert isinstance(block.mixer, EncoderAttention) and isinstance(
            block.feed_forward, EncoderFeedForward
        )
        declared = block.mixer
        self.backend = tensors.backend
        cos, sin = (None, None) if turn is None else turn
        self.spec = EncoderAttentionSpec(declared.heads, declared.head_dim, declared.scale, cos, sin)
        names = qkv_names(tensors, "weight")
        self.entry, self.entry_bias = tensors.weight(*names), _bias(tensors, *names)
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

    def adapted(self, batch: ForwardBatch, x: Tensor, changes: Mapping[str, LowRank], prefix: str) -> Tensor:
        """As `__call__`, with a task's changes to the matrices whose names begin with this layer's `prefix`."""
        backend = self.backend

        def product(name: str, rows: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
            found = backend.linear(batch, rows, weight)
            found = found if bias is None else found + bias
            change = changes.get(f"{prefix}{name}.weight")
            return found if change is None else found + change.scale * (rows @ change.a.T @ change.b.T)

        qkv = product("attn_qkv", x, self.entry, self.entry_bias)
        y = torch.as_tensor(backend.encoder_attention(batch, qkv, self.spec))
        x = backend.normed(x + product("attn_output", y, self.output, self.output_bias), self.attention_norm)
        inner = gelu(product("ffn_up", x, self.up, self.up_bias))
        return backend.normed(x + product("ffn_down", inner, self.down, self.down_bias), self.output_norm)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        return int(sum(weight.nbytes for weight in (self.entry, self.output, self.up, self.down)))


def _bias(tensors: LayerTensors, *names: str) -> Tensor | None:
    return tensors.vector(*names, kind="bias") if tensors.has(names[0], "bias") else None


def _layer_norm(tensors: LayerTensors, name: str) -> LayerNorm:
    return LayerNorm(tensors.vector(name), _bias(tensors, name), tensors.eps)


class Encoder:
    """Makes hidden rows of texts, and scores of them where the model has a head.

    Args:
        config: the model's shape, whose `encoder` is given.
        tensors: every tensor of the model by its GGUF name.
        backend: holds the weights and runs the operations.
        ctx_size: the longest text.
        adapters: task -> matrix name -> change (models/lora/adapter.py).
        separator: the token that ends a segment of a text, after which tokens are of the next kind; None: all are of
            the first kind.
    """

    host_experts: None = None  # as a Decoder has

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, QuantTensor],
        backend: Backend[Any],
        ctx_size: int,
        separator: int | None = None,
        adapters: Mapping[str, Mapping[str, LowRank]] | None = None,
    ) -> None:
        assert config.encoder is not None
        self.config = config
        self.backend = backend
        self.chunk_size = ctx_size
        self.separator = separator
        self._task: str | None = None
        sizes, width = config.encoder, config.embedding_length
        top = LayerTensors(tensors, None, backend, config.rms_eps, config.block.norms.kind)
        self.token_embd = top.weight("token_embd")
        self.positions = None if sizes.rotates else top.vector("position_embd").view(-1, width)
        self.token_types = top.vector("token_types").view(-1, width) if sizes.token_types else None
        self.norm = top.norm("token_embd_norm", top.has("token_embd_norm"))
        self.blk = _layers(config, tensors, backend, ctx_size)
        self.output_norm = top.norm("output_norm", top.has("output_norm"))
        self._adapters = {
            task: {
                name: LowRank(a.to(backend.device, backend.dtype), b.to(backend.device, backend.dtype), scale)
                for name, (a, b, scale) in each.items()
            }
            for task, each in (adapters or {}).items()
        }
        self._head = _Head(top, width, sizes) if sizes.classes else None
        self._projections = [
            top.vector(name).view(shape[::-1])
            for name, shape in zip(PROJECTIONS, sizes.projections, strict=False)
        ]

    def use_task(self, task: str | None) -> None:
        """Sets the task that the texts of the next steps are embedded for. It must have an adapter; None: no task."""
        self._task = task

    def hidden(self, batch: ForwardBatch, _cache: Sequence[LayerState] = ()) -> Tensor:
        """The hidden rows of all tokens of whole texts: [T, embedding length].

        Raises:
            EngineError: a text does not begin in this step.
        """
        if any(start for _, start, _ in batch.chunks(0)):
            raise EngineError(
                "a text for an encoder is computed in one step, and this one goes on from another"
            )
        assert self.config.encoder is not None
        changes = {} if self._task is None else self._adapters[self._task]
        x = self.backend.embed(batch, self.token_embd, self.config.embedding_scale)
        if (change := changes.get("token_embd.weight")) is not None:
            x = x + change.scale * (change.b[batch.token_ids] @ change.a)
        if self.positions is not None:
            x = x + self.positions[self._positions(batch)]
        if self.token_types is not None:
            types = self.token_types
            if (change := changes.get("token_types.weight")) is not None:
                types = types + change.delta()
            x = x + types[self._kinds(batch)]
        if self.norm is not None:
            x = self.backend.normed(x, self.norm)
        for number, layer in enumerate(self.blk):
            if changes and isinstance(layer, EncoderLayer):
                x = layer.adapted(batch, x, changes, f"blk.{number}.")
            else:
                x = layer(batch, x)
        if self.output_norm is not None:
            x = self.backend.normed(x, self.output_norm)
        return x if isinstance(x, Tensor) else torch.as_tensor(x)

    def projected(self, vector: Tensor) -> Tensor:
        """A pooled vector [embedding length] multiplied by the model's matrices for it; on any device."""
        moved = vector
        for weight in self._projections:
            moved = weight @ moved.to(weight.device, weight.dtype)
        return moved.to(vector.device, vector.dtype)

    def scores(self, rows: Tensor) -> Tensor:
        """Outputs of the trained head for the hidden rows of a text [T, embedding length]: [classes].

        Raises:
            EngineError: there is none.
        """
        if self._head is None:
            raise EngineError("the model has no trained head: it makes embeddings, and does not rank")
        return self._head(rows)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Raises EngineError: there are no logits."""
        raise EngineError(no_text(self.config))

    def _positions(self, batch: ForwardBatch) -> Tensor:
        """Each token's row in the table: int64 [T]. If texts begin at row `first_position` > 0, a token whose id is the
        number of the row before is padding: it has that row, and does not count as a position."""
        assert self.config.encoder is not None
        padding = self.config.encoder.first_position - 1
        if padding < 0:
            return batch.positions.long()
        counted = (batch.token_ids != padding).long()
        found = [counted[rows].cumsum(0) * counted[rows] for rows, _, _ in batch.chunks(0)]
        return torch.cat(found) + padding

    def _kinds(self, batch: ForwardBatch) -> Tensor:
        """The segment kind of each token, int64 [T]: the number of separators before it in its text, up to the last
        kind."""
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


def _layers(
    config: ModelConfig, tensors: Mapping[str, QuantTensor], backend: Backend[Any], ctx_size: int
) -> list[BidirectionalLayer | EncoderLayer]:
    assert config.encoder is not None
    turns: dict[Rotation, tuple[Tensor, Tensor]] = {}
    found: list[BidirectionalLayer | EncoderLayer] = []
    for i, block in enumerate(layers_of(config)):
        rotation = config.rotation(i)
        if config.encoder.rotates and rotation not in turns:
            turns[rotation] = rope_table(rotation.spec(ctx_size), ctx_size, backend.device)
        of_layer = LayerTensors(tensors, i, backend, config.rms_eps, config.block.norms.kind)
        kind = BidirectionalLayer if isinstance(block.mixer, BidirectionalAttention) else EncoderLayer
        found.append(kind(block, of_layer, turns.get(rotation)))
    return found


class _Head:
    """An optional dense layer with activation and norm, then the projection to classes. It reads a single row, with
    plain matrices."""

    def __init__(self, top: LayerTensors, width: int, sizes: EncoderSizes) -> None:
        self._dense = _plain(top, "cls", width) if sizes.head_dense else None
        self._activation: Callable[[Tensor], Tensor] = (
            torch.tanh if sizes.head_activation == "tanh" else torch.nn.functional.gelu
        )
        self._norm = _layer_norm(top, "cls.norm") if sizes.head_normed else None
        self._output = _plain(top, "cls.output", width)
        self._mean = sizes.head_pooling == "mean"

    def __call__(self, rows: Tensor) -> Tensor:
        row = rows.mean(0) if self._mean else rows[0]
        if self._dense is not None:
            row = self._activation(_product(self._dense, row))
        if self._norm is not None:
            row = layer_norm(row, self._norm.weight, self._norm.bias, self._norm.eps)
        return _product(self._output, row)


def _plain(top: LayerTensors, name: str, width: int) -> tuple[Tensor, Tensor | None]:
    return top.vector(name).view(-1, width), _bias(top, name)


def _product(matrix: tuple[Tensor, Tensor | None], row: Tensor) -> Tensor:
    weight, bias = matrix
    return weight @ row if bias is None else weight @ row + bias
