"""The decoder of every architecture: its layers one after the other, as the architecture declares them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.backend import Backend, Hidden, LayerState
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.layer_norm import Norm
from quengine.kernels.moe.host_experts import PlacedExperts
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.altup import AltUpLayer, Streams
from quengine.models.architectures import layers_of
from quengine.models.blocks.altup import AltUp
from quengine.models.blocks.block import Block
from quengine.models.config import ModelConfig, Stage
from quengine.models.decoder_layer import DecoderLayer
from quengine.models.experts import MixtureOfExperts
from quengine.models.fused_rows import FusedRows
from quengine.models.handed_rows import HandedRows
from quengine.models.layer_input import LayerInputs
from quengine.models.layer_tables import LayerTables
from quengine.models.layers import LayerTensors
from quengine.models.tensor_split import vocab_shares


class Decoder:
    """Computes logits from token ids, over a KV cache of at most `ctx_size` positions.

    A pipeline stage computes only its own layers: it receives rows from the previous stage and sends them to the next
    one; the last stage broadcasts the logits.

    Args:
        config: the model's shape.
        tensors: every tensor of the model by its GGUF name.
        backend: holds the weights and runs the operations.
        ctx_size: number of positions of the rotary tables and the causal mask, which are made here once.
        chunk_size: maximum number of tokens of one sequence in a `forward`.
        host_experts: computes the experts of the first `host_experts.layers` layers; None: the backend computes all.

    Raises:
        EngineError: the model is an encoder, or computes no context of this size.
    """

    keeps_newest = False
    """Whether `kept` gets only the last of a sequence's rows in a step."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, QuantTensor],
        backend: Backend[Any],
        ctx_size: int,
        chunk_size: int,
        host_experts: PlacedExperts | None = None,
    ) -> None:
        if config.encoder is not None:
            raise EngineError(f"a {config.architecture} model is an encoder: it computes no logits")
        self.chunk = config.attention_chunk if config.attention_chunk < ctx_size else 0
        """Positions of an attention chunk; 0: no layer attends within chunks, or the context is a single one."""
        if self.chunk % BLOCK_SIZE:
            raise EngineError(
                f"context of {ctx_size} tokens is more than a chunk of this {config.architecture} model's attention, "
                f"{self.chunk}, and chunks are only implemented in multiples of {BLOCK_SIZE}"
            )
        self.config = config
        self.host_experts = host_experts
        self.backend = backend
        self.chunk_size = chunk_size
        top = LayerTensors(tensors, None, backend, config.rms_eps, config.block.norms.kind)
        self._stage = stage = config.stage or Stage(0, (0, config.block_count))
        self.token_embd: Any = top.weight("token_embd") if top.has("token_embd") else None
        self.kept: Tensor | None = None
        """Hidden rows are written here for a layer that drafts tokens (kernels/hidden_rows.py); None: there is none."""
        self.fused: FusedRows | None = None
        """Keeps what an EAGLE-3 draft model reads of the layers' inputs; None: there is no such model."""
        self.output: Any = None
        self.output_norm: Norm | None = None
        if stage.is_last:
            self.output_norm = top.scaled_norm(config.output_norm, config.logit_scale)
            self.output = top.weight("output") if top.has("output") else self.token_embd
        self._ranking_head = (
            None if config.ranker is None else top.vector("cls.output").view(-1, config.embedding_length)
        )
        self._output_rows = vocab_shares(config.vocab_size, config.ranks)
        inputs = config.layer_input
        self.inputs = (
            None
            if inputs is None
            else LayerInputs(top, config.embedding_length, inputs.length, config.vocab_size)
        )
        self.streams = None if config.altup is None else Streams(top)
        tables = self._layer_tables(ctx_size)
        self.turn_images = tables.turn_images
        layers = layers_of(config)
        self.blk = [_layer(layers[i], self._of_layer(tensors, i), tables) for i in config.held_layers]
        last_norm = self.output_norm
        if not stage.is_last:
            behind = self._of_layer(tensors, stage.layers.stop)
            last_norm = behind.norm("attn_norm", config.block.norms.before_mixer)
        self._step_bytes: dict[int, int] = {}
        self._next_norms = [*(block.norm for block in self.blk[1:]), last_norm]
        self._last_mixer = max((i for i, block in enumerate(self.blk) if block.mixer is not None), default=0)
        # Layers after this one write no keys, so in prefill they compute only the rows whose logits are wanted.
        self.last_writer = self._last_mixer
        if config.shared_kv_layers:
            self.last_writer = config.block_count - config.shared_kv_layers - 1
        self._sources = [config.kv_source(i) for i in config.held_layers]
        self._handed = HandedRows(stage, backend, config.embedding_length)

    def _layer_tables(self, ctx_size: int) -> LayerTables:
        """The tables that the layers share."""
        return LayerTables(self.config, self.backend.device, ctx_size, self.chunk_size, self.host_experts)

    def _of_layer(self, tensors: Mapping[str, QuantTensor], layer: int) -> LayerTensors:
        config = self.config
        return LayerTensors(tensors, layer, self.backend, config.rms_eps, config.block.norms.kind)

    def forward(self, batch: ForwardBatch, cache: Sequence[LayerState]) -> Tensor:
        """Logits [n, vocab] of the rows `batch.logits_rows`, or of all rows, given the cache before them."""
        rows = batch.logits_rows
        later = 0 if batch.embeds is None else len(batch.embeds.of_later_layers)
        if rows is None or self._keeps(batch) or later > self.last_writer:
            x = self._all_rows(batch, cache)
            x = x if rows is None else self.backend.gather_rows(x, rows)
        else:
            x = self._layers(batch, cache, rows)
        count, of_rows = (len(batch), batch) if rows is None else (len(rows), batch.selected(rows))
        return self._logits(of_rows, x, count)

    def forward_parts(
        self, batch: ForwardBatch, cache: Sequence[LayerState], parts: Iterable[Tensor]
    ) -> Iterator[Tensor]:
        """Logits [n, vocab] of the rows in each of `parts`, int64 [n] on the device; `batch.logits_rows` is not read.

        They are computed lazily, so that only one part's logits need be in memory.
        """
        x = self._all_rows(batch, cache)
        for rows in parts:
            yield self._logits(batch.selected(rows), self.backend.gather_rows(x, rows), len(rows))

    def hidden(self, batch: ForwardBatch, cache: Sequence[LayerState]) -> Tensor:
        """The hidden rows that the output matrix would read, of all tokens: [T, embedding length]."""
        x = self._all_rows(batch, cache)
        if self.output_norm is None:
            return self._of_last_stage(None, len(batch), self.config.embedding_length)
        hidden = self.backend.normed(x, self.output_norm) / self.config.logit_scale
        return hidden if self.config.stage is None else self._of_last_stage(hidden, *hidden.shape)

    def use_task(self, task: str | None) -> None:
        """Raises EngineError for a task: a decoder has no adapters."""
        if task is not None:
            raise EngineError(f"task {task}: a decoder has no adapters for tasks")

    def projected(self, vector: Tensor) -> Tensor:
        """A pooled vector as it is: a decoder has no matrices for it."""
        return vector

    def scores(self, rows: Tensor) -> Tensor:
        """The trained head's outputs [classes] for the last of the hidden rows [T, embedding length]; their softmax
        if the model's `Ranker` says so.

        Raises:
            EngineError: the model has no such head.
        """
        if self._ranking_head is None or self.config.ranker is None:
            raise EngineError("the model has no trained head: it makes embeddings, and does not rank")
        outputs = self._ranking_head @ rows[-1].to(self._ranking_head)
        return outputs.softmax(0) if self.config.ranker.softmax else outputs

    def _logits(self, batch: ForwardBatch, x: Hidden, rows: int) -> Tensor:
        if self.output_norm is None:
            return self._of_last_stage(None, rows, self.config.vocab_size)
        cap = (self.config.logit_softcap,) if self.config.logit_softcap else ()
        logits = self.backend.logits(batch, x, self.output_norm, self.output, *cap)
        if self.config.stage is not None:
            return self._of_last_stage(logits, *logits.shape)
        return self.backend.communicator.all_gather(logits, self._output_rows)

    def _keeps(self, _batch: ForwardBatch) -> bool:
        """Whether the last layers must compute all rows of a step, because a draft layer or draft model reads them."""
        return self.kept is not None or (self.fused is not None and self.fused.last > self.last_writer)

    @property
    def kept_norm(self) -> Norm | None:
        """The norm of the rows that are kept."""
        return self.output_norm

    def _all_rows(self, batch: ForwardBatch, cache: Sequence[LayerState]) -> Hidden:
        """The residual stream of all rows after the layers; a copy goes to `kept` if a layer that drafts reads it."""
        x = self._layers(batch, cache, None)
        if self.kept is not None and self._keeps(batch):
            self.backend.keep_hidden(batch, x, self.kept_norm, self.kept, self.keeps_newest)
        return x

    def _embedded(self, batch: ForwardBatch) -> Hidden:
        """The first layer's input."""
        return self.backend.embed(batch, self.token_embd, self.config.embedding_scale)

    def _layers(self, batch: ForwardBatch, cache: Sequence[LayerState], rows: Tensor | None) -> Hidden:
        """The residual stream after the layers. `rows`: the rows to keep after the last mixer; None: all."""
        stage = self._stage
        batch = batch.with_chunks(self.chunk) if self.chunk else batch
        x = self._embedded(batch) if stage.is_first else self._handed.receive(len(batch), self.blk[0].norm)
        inputs = None if self.inputs is None else self.inputs(batch, x)
        x = x if self.streams is None else self.streams.open(batch, x)
        held = [cache[source] for source in self._sources]
        gathers_at, every, fused = self._gathers_at(batch, rows), batch, None
        embeds, later = batch.embeds, () if batch.embeds is None else batch.embeds.of_later_layers
        for i, (block, layer, next_norm) in enumerate(zip(self.blk, held, self._next_norms, strict=True)):
            kept = rows if i == gathers_at else None
            if self.fused is not None:
                fused = self.fused.add(every, i, x, fused)
            adds = i < len(later)
            x = block(batch, x, layer, None if adds else next_norm, kept, inputs)
            if adds and embeds is not None:
                x = self.backend.add_to_rows(x, embeds.rows, later[i])
            if kept is not None and i >= self._last_mixer:
                batch = batch.selected(kept)
            elif kept is not None:
                batch = batch.of_last_rows(kept)
                batch = batch.with_chunks(self.chunk) if self.chunk else batch
                inputs = None if inputs is None else self.backend.gather_rows(inputs, kept)
        if self.fused is not None:
            self.fused.add(every, len(self.blk), x, fused)
        if not stage.is_last:
            self._handed.send(x, len(batch))
        return x if self.streams is None else self.streams.close(batch, x)

    def _gathers_at(self, batch: ForwardBatch, rows: Tensor | None) -> int | None:
        """The last layer whose mixer needs all rows; after it only `rows` are computed. None: there is none."""
        if rows is None or not self._stage.is_last:
            return None
        return self.last_writer if batch.starts else self._last_mixer

    def _of_last_stage(self, x: Tensor | None, rows: int, columns: int) -> Tensor:
        """Broadcasts the last stage's x [rows, columns] to all stages; on the other stages x is None."""
        backend = self.backend
        x = (
            torch.empty(rows, columns, dtype=backend.dtype, device=backend.device)
            if x is None
            else x.contiguous()
        )
        backend.communicator.broadcast(x, self._stage.count - 1)
        return x

    @cached_property
    def bytes_per_token(self) -> int:
        """Weight bytes that one decoded token reads: every matrix once, the selected experts, one embedding row."""
        blocks = sum(block.nbytes for block in self.blk)
        read = self.token_embd.nbytes // self.token_embd.rows if self._stage.is_first else 0
        read += sum(part.nbytes for part in (self.inputs, self.streams, self.fused) if part is not None)
        return int(blocks + read + (self.output.nbytes if self._stage.is_last else 0))

    def step_bytes(self, rows: int) -> int:
        """Weight bytes that a decode step of `rows` rows reads: every matrix once, and the expected number of experts.

        Computed once for each number of rows, as every request asks for it at its end.
        """
        if rows not in self._step_bytes:
            experts = [block.ffn for block in self.blk if isinstance(block.ffn, MixtureOfExperts)]
            more = sum(ffn.step_bytes(rows) - ffn.nbytes for ffn in experts)
            self._step_bytes[rows] = self.bytes_per_token + more
        return self._step_bytes[rows]


def _layer(declared: Block, tensors: LayerTensors, tables: LayerTables) -> DecoderLayer:
    if isinstance(declared.around, AltUp):
        return AltUpLayer(declared, declared.around, tensors, tables)
    return DecoderLayer(declared, tensors, tables)
