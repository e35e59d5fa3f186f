"""The reference backend: torch definitions in float64 over dequantized weights. Slow, exact, the oracle.

Nothing is rounded but the KV cache, which is stored in the type that the run uses. With `keep`, weights are
dequantized once (8 bytes per weight); otherwise each matmul dequantizes its rows again, so any file that can be mapped
can be checked.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.altup_operations import AltUpOperations
from quengine.kernels.attention import attention, gate_output, mask_slice, softcap, split_gates
from quengine.kernels.backend import AttentionSpec, Branch, KVLayer, SlotLayer
from quengine.kernels.block_formats import dequantize
from quengine.kernels.embedded_rows import place_embeddings
from quengine.kernels.encoder_attention import EncoderAttentionSpec, encoder_attention
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.gated_delta import GatedDeltaSpec, gated_delta
from quengine.kernels.glu import Activation, Gating, glu
from quengine.kernels.hadamard import hadamard
from quengine.kernels.hidden_rows import keep_rows, rows_before, spread_logits
from quengine.kernels.image_attention import attend_within_images
from quengine.kernels.kv.kv_rows import read_rows, slot_mapping
from quengine.kernels.latent_attention import latent_attention
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.layer_inputs import input_glu, layer_inputs
from quengine.kernels.layer_norm import Norm
from quengine.kernels.layer_norm import normed as _normed
from quengine.kernels.mamba2 import Mamba2Spec, mamba2
from quengine.kernels.moe.experts import ExpertShare, experts_add, experts_glu
from quengine.kernels.moe.router import Router, Routing, route
from quengine.kernels.plain_rows import PlainRows
from quengine.kernels.pointwise import Pointwise, pointwise
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import ONE_RANK, Communicator
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.rope_store import first_visible, rope_store
from quengine.kernels.short_conv import ShortConvSpec, short_conv

_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class ReferenceWeight:
    """Matrices that multiply the same input. dense: their rows, dequantized; None: each matmul dequantizes them."""

    parts: tuple[QuantTensor, ...]
    dense: Tensor | None

    @property
    def rows(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return self.rows * self.cols * 8


@dataclass(frozen=True)
class ReferenceExperts:
    """The matrices of E experts. bias: [E, N]. share: which of the layer's experts they are; None: all."""

    experts: tuple[ReferenceWeight, ...]
    bias: Tensor | None
    share: ExpertShare | None = None

    @property
    def numbers(self) -> range:
        """The numbers of these experts in a routing."""
        return range(len(self.experts)) if self.share is None else self.share.numbers(len(self.experts))

    @property
    def rows(self) -> int:
        return sum(weight.rows for weight in self.experts)

    @property
    def cols(self) -> int:
        return self.experts[0].cols

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.experts)


class ReferenceBackend(PlainRows):
    """The reference backend, see the module docstring; implements kernels.backend.Backend."""

    def __init__(self, keep: bool, dtype: torch.dtype = torch.float64) -> None:
        self.name = "reference"
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.keep = keep
        self.communicator: Communicator = ONE_RANK

    def weight(self, parts: Sequence[QuantTensor]) -> ReferenceWeight:
        return self._loaded(parts)

    def _loaded(self, parts: Sequence[QuantTensor]) -> ReferenceWeight:
        """What `weight` does; no subclass overrides this method."""
        dense = torch.cat([self._dense(part) for part in parts]) if self.keep else None
        return ReferenceWeight(tuple(parts), dense)

    def first_rows(self, weight: ReferenceWeight, rows: int) -> ReferenceWeight:
        (part,) = weight.parts
        return ReferenceWeight(
            (part.first_rows(rows),), None if weight.dense is None else weight.dense[:rows]
        )

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> ReferenceWeight:
        return self._loaded([gate, up])

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return torch.cat([self._dense(part).flatten() for part in parts])

    def embed(self, batch: ForwardBatch, weight: ReferenceWeight, scale: float = 1.0) -> Tensor:
        ids = batch.token_ids
        if weight.dense is not None:
            return place_embeddings(weight.dense[ids] * scale, batch.embeds)
        (part,) = weight.parts
        rows = dequantize(part.format, part.data[ids]).to(self.dtype) * scale
        return place_embeddings(rows, batch.embeds)

    def row_table(self, table: QuantTensor) -> ReferenceWeight:
        return ReferenceWeight((table,), None)

    def layer_inputs(
        self, batch: ForwardBatch, projected: Tensor, norm: RMSNorm, table: ReferenceWeight, scale: float
    ) -> Tensor:
        return layer_inputs(projected, norm, self.embed(batch, table, scale))

    def input_glu(
        self,
        _batch: ForwardBatch,
        x: Tensor,
        gate: ReferenceWeight,
        inputs: Tensor,
        layer: int,
        activation: Gating,
    ) -> Tensor:
        return input_glu(self._matmul(x, gate), inputs, layer, activation)

    def norm_linear(
        self,
        _batch: ForwardBatch,
        x: Tensor,
        norm: Norm | None,
        weight: ReferenceWeight,
        bias: Tensor | None = None,
    ) -> Tensor:
        y = self._matmul(_normed(x, norm), weight)
        return y if bias is None else y + bias

    def linear(self, _batch: ForwardBatch, x: Tensor, weight: ReferenceWeight) -> Tensor:
        return self._matmul(x, weight)

    def norm_glu(
        self,
        _batch: ForwardBatch,
        x: Tensor,
        norm: Norm | None,
        gate_up: ReferenceWeight,
        activation: Gating = "silu",
    ) -> Tensor:
        return glu(self._matmul(_normed(x, norm), gate_up), activation)

    def norm_pointwise(
        self,
        _batch: ForwardBatch,
        x: Tensor,
        norm: Norm | None,
        up: ReferenceWeight,
        activation: Pointwise,
        bias: Tensor | None = None,
    ) -> Tensor:
        y = self._matmul(_normed(x, norm), up)
        return pointwise(y if bias is None else y + bias, activation)

    def linear_add(
        self,
        _batch: ForwardBatch,
        x: Tensor,
        weight: ReferenceWeight,
        residual: Tensor,
        next_norm: Norm | None = None,  # noqa: ARG002 (the norm is an operation of its own here)
        post_norm: RMSNorm | None = None,
        bias: Tensor | None = None,
        row_scale: Tensor | None = None,
        branch: Branch | None = None,
        *,
        partial: bool = False,
    ) -> Tensor:
        y = self._matmul(x, weight)
        y = self.communicator.all_reduce(y) if partial else y
        return self._added(y if bias is None else y + bias, residual, post_norm, row_scale, branch)

    def _added(
        self,
        y: Tensor,
        residual: Tensor,
        post_norm: RMSNorm | None,
        row_scale: Tensor | None,
        branch: Branch | None,
    ) -> Tensor:
        """What `linear_add` computes of its product y, bias included."""
        y = y if row_scale is None else y * row_scale.view(-1, 1)
        if branch is not None:
            y = _normed(y, branch.first_norm) + _normed(branch.rows, branch.norm)
        return _normed(y, post_norm) + residual * (1.0 if post_norm is None else post_norm.residual_scale)

    def gate_up_experts(
        self,
        gate: Sequence[QuantTensor] | None,
        up: Sequence[QuantTensor],
        bias: Tensor | None = None,
        share: ExpertShare | None = None,
    ) -> ReferenceExperts:
        if gate is None:
            return ReferenceExperts(tuple(self._loaded([expert]) for expert in up), bias, share)
        return ReferenceExperts(tuple(self._loaded(pair) for pair in zip(gate, up, strict=True)), bias, share)

    def down_experts(
        self, down: Sequence[QuantTensor], bias: Tensor | None = None, share: ExpertShare | None = None
    ) -> ReferenceExperts:
        return ReferenceExperts(tuple(self._loaded([expert]) for expert in down), bias, share)

    def route(
        self,
        _batch: ForwardBatch,
        x: Tensor,
        norm: RMSNorm,
        router: Router,
        experts: Tensor | None = None,
    ) -> Routing:
        return route(_normed(x, norm), router, experts)

    def weighed(self, _batch: ForwardBatch, x: Tensor, norm: RMSNorm, weights: Tensor) -> Tensor:
        return _normed(x, norm) * weights

    def experts_glu(
        self,
        _batch: ForwardBatch,
        x: Tensor,
        norm: RMSNorm | None,
        routing: Routing,
        gate_up: ReferenceExperts,
        activation: Activation = "silu",
    ) -> Tensor:
        linear = functools.partial(self._expert, gate_up)
        return experts_glu(_normed(x, norm), routing, linear, activation, gate_up.numbers)

    def experts_add(
        self,
        _batch: ForwardBatch,
        gated: Tensor,
        routing: Routing,
        down: ReferenceExperts,
        residual: Tensor | None,
        next_norm: Norm | None = None,  # noqa: ARG002 (the norm is an operation of its own here)
        *,
        partial: bool = False,
    ) -> Tensor:
        linear = functools.partial(self._expert, down)
        if residual is None:
            residual = gated.new_zeros(len(gated), down.experts[0].rows)
        if partial:
            y = experts_add(gated, routing, linear, torch.zeros_like(residual), down.numbers)
            return self.communicator.all_reduce(y) + residual
        return experts_add(gated, routing, linear, residual, down.numbers)

    def _expert(self, weight: ReferenceExperts, expert: int, x: Tensor) -> Tensor:
        number = weight.numbers.index(expert)
        y = self._matmul(x, weight.experts[number])
        return y if weight.bias is None else y + weight.bias[number]

    @property
    def altup(self) -> AltUpOperations:
        return AltUpOperations(self)

    def attention(self, batch: ForwardBatch, qkv: Tensor, spec: AttentionSpec, layer: KVLayer) -> Tensor:
        gates = None
        if spec.gated:
            qkv, gates = split_gates(qkv, spec.heads, spec.head_dim)
        q = rope_store(qkv, spec, layer, batch)
        if batch.phase == "prefill":
            parts = [(q[rows], start, table) for rows, start, table in batch.chunks(spec.cache_group)]
        else:
            tables = batch.block_tables_of(spec.cache_group)
            parts = list(zip(q[:, None], batch.positions.tolist(), tables, strict=True))
        y = torch.cat([self._attend(rows, spec, layer, start, table) for rows, start, table in parts])
        y = attend_within_images(y, q, spec, layer, batch)
        return y if gates is None else gate_output(y, gates)

    def _attend(self, q: Tensor, spec: AttentionSpec, layer: KVLayer, start: int, table: Tensor) -> Tensor:
        """Attention of T tokens of one sequence, from position `start` on: [T, heads * head_dim]."""
        tokens = len(q)
        end = start + tokens
        mask = mask_slice(spec.mask_band, start, tokens) if tokens > 1 else None
        first = first_visible(spec, end) if tokens == 1 else 0
        rows = slot_mapping(torch.arange(first, end), table)
        keys, values = (t.to(self.dtype) for t in read_rows(layer, rows))
        y = attention(q, keys, values, mask, spec.scale, spec.sinks, spec.softcap)
        return (hadamard(y) if layer.format.hadamard else y).reshape(tokens, -1)

    def latent_attention(
        self, batch: ForwardBatch, q: Tensor, latent: Tensor, spec: LatentSpec, layer: KVLayer
    ) -> Tensor:
        absorb, expand = (self._matrices(weights) for weights in (spec.absorb, spec.expand))
        return latent_attention(batch, q, latent, spec, layer, absorb, expand)

    def check_latent(self, spec: LatentSpec) -> None:
        """Every size is supported."""

    def encoder_attention(self, batch: ForwardBatch, qkv: Tensor, spec: EncoderAttentionSpec) -> Tensor:
        return encoder_attention(batch, qkv, spec)

    def short_conv(self, batch: ForwardBatch, x: Tensor, spec: ShortConvSpec, state: SlotLayer) -> Tensor:
        return short_conv(batch, x, spec, state.parts[0])

    def gated_delta(self, batch: ForwardBatch, x: Tensor, spec: GatedDeltaSpec, state: SlotLayer) -> Tensor:
        return gated_delta(batch, x, spec, *state.parts)

    def mamba2(self, batch: ForwardBatch, x: Tensor, spec: Mamba2Spec, state: SlotLayer) -> Tensor:
        return mamba2(batch, x, spec, *state.parts)

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        return _normed(x, norm)

    def keep_hidden(
        self, batch: ForwardBatch, x: Tensor, norm: Norm | None, kept: Tensor, newest: bool = False
    ) -> None:
        keep_rows(batch, _normed(x, norm), kept, newest)

    def join_hidden(
        self,
        batch: ForwardBatch,
        x: Tensor,
        norm: Norm,
        kept: Tensor,
        kept_norm: Norm,
        weight: ReferenceWeight,
    ) -> Tensor:
        before = rows_before(batch, kept, self.dtype)
        return self._matmul(torch.cat([_normed(x, norm), _normed(before, kept_norm)], 1), weight)

    def hidden_before(self, batch: ForwardBatch, kept: Tensor, norm: Norm | None) -> Tensor:
        return _normed(rows_before(batch, kept, self.dtype), norm)

    def fused(
        self, _batch: ForwardBatch, x: Tensor, weight: ReferenceWeight, before: Tensor | None
    ) -> Tensor:
        product = self._matmul(x, weight)
        return product if before is None else before + product

    def spread_logits(self, _batch: ForwardBatch, logits: Tensor, tokens: Tensor, vocab: int) -> Tensor:
        return spread_logits(logits, tokens, vocab)

    def logits(
        self, _batch: ForwardBatch, x: Tensor, norm: Norm, weight: ReferenceWeight, cap: float = 0.0
    ) -> Tensor:
        return softcap(self._matmul(_normed(x, norm), weight), cap)

    def _dense(self, part: QuantTensor) -> Tensor:
        return dequantize(part.format, part.data).reshape(part.shape).to(self.dtype)

    def _matrices(self, weights: ReferenceExperts) -> Tensor:
        """The matrices of all experts, or heads: [E, N, K]."""
        held = [w.parts[0] if w.dense is None else w.dense for w in weights.experts]
        return torch.stack([w if isinstance(w, Tensor) else self._dense(w) for w in held])

    def _matmul(self, x: Tensor, weight: ReferenceWeight) -> Tensor:
        if weight.dense is not None:
            return x @ weight.dense.T
        tiles = [
            x @ dequantize(part.format, part.data[row : row + _ROWS_AT_A_TIME]).to(self.dtype).T
            for part in weight.parts
            for row in range(0, part.shape[0], _ROWS_AT_A_TIME)
        ]
        return torch.cat(tiles, dim=1)
