"""The CUDA backend: packed weights through Triton, int16 activations in decode, fp16 matrix units in prefill.

A decode layer takes five launches: QKV; attention (rotation, cache write, KV splits and their combination,
quantization); output with the residual; gate and up with their activation and quantization; down with the residual.
The launches of output and down also begin the norm of their sum, and the matmul that reads the norm ends it. Where a
product has a norm of its own, the two launches compute both norms. Row scales of a product take one more launch. A
mixture of experts takes three launches in place of the last two. A gated delta net takes one launch in place of
attention, or two in batches. Where ranks share a model, the launches of output and down also sum over the ranks. The
residual stream is fp32. Implements kernels.backend.Backend.

Kernels that few models need are imported on first use: reading the sources of all takes a fifth of a second.

The kernels that compute a row, and so its last bits, depend on the number of rows. With `batch_invariant`, one family
of kernels serves every number of rows instead, and a row's bits follow from its own sequence alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quengine.kernels.altup_operations import AltUpOperations
from quengine.kernels.backend import AttentionSpec, Branch, KVLayer, SlotLayer
from quengine.kernels.block_formats import dequantize
from quengine.kernels.cuda.attention.attention_arguments import DecodeWorkspace
from quengine.kernels.cuda.attention.attention_decode import attention_decode
from quengine.kernels.cuda.attention.attention_prefill import (
    attention_prefill,
    prefill_tiles,
    stores_wgmma_layout,
)
from quengine.kernels.cuda.attention.prefill_tiles import cut_tiles
from quengine.kernels.cuda.attention.qk_row_norm import has_row_norms, qk_row_norm
from quengine.kernels.cuda.attention.rope_store import rope_store
from quengine.kernels.cuda.embedded_rows import place_embeddings
from quengine.kernels.cuda.embedding import embedding
from quengine.kernels.cuda.flat_rows import flattened, unflattened
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, ScaledProduct, to_fp16_operand
from quengine.kernels.cuda.gemm.matmul import (
    matmul,
    matmul_glu,
    matmul_norm,
    matmul_product,
)
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_glu import matvec_glu
from quengine.kernels.cuda.gemv.matvec_norm import can_begin_norm, matvec_norm
from quengine.kernels.cuda.gemv.matvec_post_norm import can_end_with_norm, matvec_post_norm
from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.hidden_rows import hidden_before, joined, keep_hidden
from quengine.kernels.cuda.latent.shapes import check_latent
from quengine.kernels.cuda.launch.gpu import gpu_of
from quengine.kernels.cuda.launch.triton_cache import use_private_cache
from quengine.kernels.cuda.layer_inputs import input_glu, input_glu_quantize, layer_inputs
from quengine.kernels.cuda.layer_norm import layer_norm, layer_norm_fp16, layer_norm_quantize
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights, pack_experts, pack_gate_up_experts
from quengine.kernels.cuda.pointwise import pointwise, pointwise_quantize
from quengine.kernels.cuda.post_norm import post_norm_add
from quengine.kernels.cuda.ranks.peers import PeerBuffers
from quengine.kernels.cuda.ranks.push import push_all_reduce
from quengine.kernels.cuda.rms_norm import rms_norm, rms_norm_fp16, rms_norm_quantize
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.softcap import softcap_logits
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight, first_rows, pack, pack_on_host
from quengine.kernels.encoder_attention import EncoderAttentionSpec, fused_attention
from quengine.kernels.forward_batch import ForwardBatch, PrefillTiles
from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.glu import Activation, Gating
from quengine.kernels.hidden_rows import spread_logits
from quengine.kernels.image_attention import attend_within_images, spans_of
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.layer_norm import LayerNorm, Norm
from quengine.kernels.mamba2 import Mamba2Spec
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.pointwise import Pointwise
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import ONE_RANK, Communicator
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.short_conv import ShortConvSpec

if TYPE_CHECKING:
    from quengine.kernels.cuda.gated_delta.rows import StateRows
    from quengine.kernels.cuda.latent.latent_attention import LatentOperations
    from quengine.kernels.cuda.moe.experts import ExpertOperations, GatedRows

HOPPER = (9, 0)

Q_DOT_ROWS = 1
"""The most rows that q-dot kernels take: a kernel for more compiles for a minute, too long before a short prompt."""

MAX_DEQUANTIZED = 80 << 20
"""The most weights dequantized to fp16 at a time in prefill: 160 MiB. Larger matrices are dequantized in pieces, and
so are gate and up, at no loss. If no matrix is dequantized whole, pieces have at most half as many weights.
"""

Rows = Tensor | QuantizedActivations | Fp16Operand
"""Inputs of a matmul: quantized activations for q-dot; else an fp16 operand after a norm, or fp32."""

Residual = Tensor | RmsNormed
"""The residual stream: fp32 rows, after a layer together with their normalised form for the next."""


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start, and read its weights, before the previous one has ended (sm_90 and later)."""
    gpu = gpu_of(device)
    return gpu is not None and gpu.capability >= HOPPER


def takes_q_dot(rows: int) -> bool:
    """Whether `rows` rows are quantized to int16 for q-dot; more rows use fp16 matrix units."""
    return rows <= Q_DOT_ROWS


class CudaBackend:
    """The CUDA backend, see the module docstring. `device`: a CUDA device of compute capability 8.0 or later.

    `batch_invariant`: a row's result is bit-identical alone and in every batch, captured or not, and a prompt's row in
    every chunk. Batches and prompts then share all kernels but attention's. Prompts and single sequences are slower,
    and a single sequence's rows are rounded to fp16, as a batch's are.
    """

    def __init__(self, device: torch.device, batch_invariant: bool = False) -> None:
        if device.type == "cuda":
            use_private_cache()
        self.name = "cuda"
        self.device = device
        self.batch_invariant = batch_invariant
        self.dtype = torch.float32
        self.pdl = has_dependent_launch(device)
        self.communicator: Communicator = ONE_RANK
        self._decode_workspaces: dict[tuple[int, int, int], list[DecodeWorkspace]] = {}
        self._scratch: QuantizationScratch | None = None
        self._matmul_workspace: MatmulWorkspace | None = None
        self._tiles: tuple[ForwardBatch, PrefillTiles] | None = None
        self._state_tiles: tuple[ForwardBatch, PrefillTiles] | None = None
        self._widest = 0
        self._largest = 0
        self._packed = False

    @cached_property
    def _experts(self) -> "ExpertOperations":
        from quengine.kernels.cuda.moe.experts import ExpertOperations

        return ExpertOperations(self.device, self._room, self.pdl)

    @cached_property
    def _latent(self) -> "LatentOperations":
        from quengine.kernels.cuda.latent.latent_attention import LatentOperations

        return LatentOperations(self.device, self.batch_invariant, self.pdl)

    def weight(self, parts: Sequence[QuantTensor]) -> PackedWeight:
        return self._noted(pack(parts, self.device))

    def first_rows(self, weight: PackedWeight, rows: int) -> PackedWeight:
        return first_rows(weight, rows)

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> PackedWeight:
        return self._noted(pack([gate, up], self.device, paired=True))

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return torch.cat([dequantize(part.format, part.data).flatten() for part in parts]).to(self.device)

    def embed(self, batch: ForwardBatch, weight: PackedWeight, scale: float = 1.0) -> Tensor:
        rows = embedding(weight, batch.token_ids, scale, self.pdl)
        return place_embeddings(rows, batch.embeds, self.pdl)

    def row_table(self, table: QuantTensor) -> PackedWeight:
        return pack_on_host(table, self.device)

    def layer_inputs(
        self,
        batch: ForwardBatch,
        projected: Tensor | ScaledProduct,
        norm: RMSNorm,
        table: PackedWeight,
        scale: float,
    ) -> Tensor:
        return layer_inputs(projected, norm, table, batch.token_ids, scale, self.pdl)

    def input_glu(
        self,
        batch: ForwardBatch,
        x: Residual,
        gate: PackedWeight,
        inputs: Tensor,
        layer: int,
        activation: Gating,
    ) -> Tensor | QuantizedActivations:
        product = self.norm_linear(batch, x, None, gate)
        if isinstance(product, Tensor) and self._takes_q_dot(len(product)):
            return input_glu_quantize(product, inputs, layer, activation, self.pdl)
        return input_glu(product, inputs, layer, activation, self.pdl)

    def norm_linear(
        self,
        batch: ForwardBatch,
        x: Residual | ScaledProduct,
        norm: Norm | None,
        weight: PackedWeight,
        bias: Tensor | None = None,
    ) -> Tensor | ScaledProduct:
        rows = self._normed(x.finish() if isinstance(x, ScaledProduct) else x, norm)
        if bias is None:
            return self._product(batch, rows, weight)
        if isinstance(rows, QuantizedActivations):
            bias = bias.view(1, -1)
        return self._matmul(batch, rows, weight, bias)

    def linear(self, batch: ForwardBatch, x: Tensor, weight: PackedWeight) -> Tensor:
        return self._matmul(batch, x, weight, None)

    def norm_glu(
        self,
        batch: ForwardBatch,
        x: Residual,
        norm: Norm | None,
        gate_up: PackedWeight,
        activation: Gating = "silu",
    ) -> Rows:
        rows = self._normed(x, norm)
        if isinstance(rows, QuantizedActivations):
            return matvec_glu(rows, gate_up, activation, scratch=self._quantization_scratch(), pdl=self.pdl)
        return matmul_glu(rows, gate_up, self._room(), activation, self.pdl, exact(batch))

    def norm_pointwise(
        self,
        batch: ForwardBatch,
        x: Residual,
        norm: Norm | None,
        up: PackedWeight,
        activation: Pointwise,
        bias: Tensor | None = None,
    ) -> Rows:
        product = self.norm_linear(batch, x, norm, up, bias)
        if isinstance(product, Tensor) and self._takes_q_dot(len(product)):
            return pointwise_quantize(product, activation, self.pdl)
        return pointwise(product, activation, self.pdl)

    def linear_add(
        self,
        batch: ForwardBatch,
        x: Rows,
        weight: PackedWeight,
        residual: Residual,
        next_norm: Norm | None = None,
        post_norm: RMSNorm | None = None,
        bias: Tensor | None = None,
        row_scale: Tensor | None = None,
        branch: Branch | None = None,
        *,
        partial: bool = False,
    ) -> Residual:
        rows, next_norm = self._rounded(x), begun_norm(next_norm)
        if partial:
            return self._add_partial(
                batch, rows, weight, residual, next_norm, post_norm, bias, row_scale, branch
            )
        stream = stream_of(residual)
        if isinstance(rows, QuantizedActivations) and can_begin_norm(weight) and row_scale is None:
            if post_norm is None and next_norm is not None:
                return self._matvec_norm(rows, weight, stream, next_norm, bias)
            if post_norm is not None and bias is None and can_end_with_norm(weight):
                scratch = self._quantization_scratch()
                return matvec_post_norm(rows, weight, stream, post_norm, next_norm, branch, scratch, self.pdl)
        if post_norm is not None or row_scale is not None or bias is not None:
            product = self._product(batch, rows, weight)
            return self._add_product(product, stream, post_norm, next_norm, bias, row_scale, branch)
        if next_norm is None or isinstance(rows, QuantizedActivations):
            return self._matmul(batch, rows, weight, stream)
        if self._norms_in_groups(next_norm, len(stream)):
            return self._matmul(batch, rows, weight, stream)
        return RmsNormed(*matmul_norm(rows, weight, self._room(), stream, next_norm, self.pdl, exact(batch)))

    def gate_up_experts(
        self,
        gate: Sequence[QuantTensor] | None,
        up: Sequence[QuantTensor],
        bias: Tensor | None = None,
        share: ExpertShare | None = None,
    ) -> ExpertWeights:
        if gate is None:
            return self.down_experts(up, bias, share)
        return self._noted_experts(pack_gate_up_experts(gate, up, self.device, bias, share))

    def down_experts(
        self, down: Sequence[QuantTensor], bias: Tensor | None = None, share: ExpertShare | None = None
    ) -> ExpertWeights:
        return self._noted_experts(pack_experts(down, self.device, bias, share))

    def route(
        self, _batch: ForwardBatch, x: Residual, norm: RMSNorm, router: Router, experts: Tensor | None = None
    ) -> Routing:
        return self._experts.route(stream_of(x), norm, router, experts)

    def weighed(self, _batch: ForwardBatch, x: Residual, norm: RMSNorm, weights: Tensor) -> Tensor:
        return self.normed(x, norm).mul_(weights)

    def experts_glu(
        self,
        batch: ForwardBatch,
        x: Residual,
        norm: RMSNorm | None,
        routing: Routing,
        gate_up: ExpertWeights,
        activation: Activation = "silu",
    ) -> "GatedRows":
        if norm is not None and isinstance(x, Tensor) and self._norms_in_groups(norm, len(x)):
            return self._experts.glu(x, routing, gate_up, activation, exact(batch), norm)
        return self._experts.glu(self._normed(x, norm), routing, gate_up, activation, exact(batch))

    def experts_add(
        self,
        batch: ForwardBatch,
        gated: "GatedRows",
        routing: Routing,
        down: ExpertWeights,
        residual: Residual | None,
        next_norm: Norm | None = None,
        *,
        partial: bool = False,
    ) -> Residual:
        next_norm = begun_norm(next_norm)
        if residual is None:
            residual = torch.zeros(len(routing.experts), down.expert_rows, device=self.device)
        if partial:
            stream = stream_of(residual)
            added = self._experts.add(gated, routing, down, torch.zeros_like(stream), None, exact(batch))
            peers = self._peers(*stream.shape)
            return self._add_sum(stream_of(added), stream, peers, None, next_norm, None, None, None)
        return self._experts.add(gated, routing, down, stream_of(residual), next_norm, exact(batch))

    @property
    def altup(self) -> AltUpOperations:
        from quengine.kernels.cuda.altup import CudaAltUp

        return CudaAltUp(self)

    def attention(
        self, batch: ForwardBatch, qkv: Tensor | ScaledProduct, spec: AttentionSpec, layer: KVLayer
    ) -> Rows:
        if has_row_norms(spec):
            qkv = qkv.finish() if isinstance(qkv, ScaledProduct) else qkv
            spec = qk_row_norm(qkv, spec, self.pdl)
        if batch.phase == "prefill" and (len(batch) > 1 or self.batch_invariant):
            return self._prefill(batch, qkv, spec, layer)
        if batch.shares_sequences and not spec.shared:
            qkv = self._write_rows(batch, qkv, spec, layer)
        # Rows written by the previous launch must be complete: a chunk's positions, keys that other rows read.
        overlaps = self.pdl and batch.phase == "decode" and not batch.shares_sequences
        return self._decode(batch, qkv, spec, layer, overlaps)

    def columns(self, x: Tensor | ScaledProduct, first: int, last: int) -> Tensor | ScaledProduct:
        if isinstance(x, ScaledProduct):
            return replace(x, values=x.values[:, first:last])
        return x[:, first:last]

    def latent_attention(
        self,
        batch: ForwardBatch,
        q: Tensor | ScaledProduct,
        latent: Tensor | ScaledProduct,
        spec: LatentSpec,
        layer: KVLayer,
    ) -> Tensor:
        prompt = batch.phase == "prefill" and (len(batch) > 1 or self.batch_invariant)
        if not prompt and self._takes_q_dot(len(batch)):
            return self._latent.one_row(batch, q, latent, spec, layer)
        tiles = self._tiles_of(batch) if prompt else None
        return self._latent.many_rows(batch, q, latent, spec, layer, tiles, self._room())

    def check_latent(self, spec: LatentSpec) -> None:
        check_latent(spec)
        self._latent.prepare(spec)

    def encoder_attention(
        self, batch: ForwardBatch, qkv: Tensor | ScaledProduct, spec: EncoderAttentionSpec
    ) -> Tensor:
        """Attention in fp16, the type in which a cache stores keys and values."""
        rows = qkv.finish() if isinstance(qkv, ScaledProduct) else qkv
        return fused_attention(batch, rows, spec, torch.float16).float()

    def short_conv(
        self, batch: ForwardBatch, x: Tensor | ScaledProduct, spec: ShortConvSpec, state: SlotLayer
    ) -> Tensor:
        from quengine.kernels.cuda.short_conv import short_conv

        x = x.finish() if isinstance(x, ScaledProduct) else x
        tables, sequences = batch.block_tables_of(spec.cache_group), None
        if batch.phase == "prefill":
            sequences = self._state_tiles_of(batch).sequences
        shares = batch.shares_sequences
        return short_conv(x, spec, state, batch.positions, tables, sequences, shares, self.pdl)

    def gated_delta(
        self, batch: ForwardBatch, x: Tensor | ScaledProduct, spec: GatedDeltaSpec, state: SlotLayer
    ) -> Rows:
        from quengine.kernels.cuda.gated_delta.gated_delta import gated_delta_decode, gated_delta_rows

        step, several = self._state_step(batch, x, spec.cache_group)
        out = self._heads_operand(len(batch), spec.value_heads * spec.head_dim)
        if several:
            gated_delta_rows(step, spec, state, out, self.batch_invariant, self.pdl, batch.pending)
        else:
            gated_delta_decode(step, spec, state, out, self._reads_ahead(batch), self.pdl)
        return out

    def mamba2(
        self, batch: ForwardBatch, x: Tensor | ScaledProduct, spec: Mamba2Spec, state: SlotLayer
    ) -> Rows:
        from quengine.kernels.cuda.mamba2.mamba2 import mamba2_decode, mamba2_rows

        step, several = self._state_step(batch, x, spec.cache_group)
        out = self._heads_operand(len(batch), spec.inner)
        if several:
            mamba2_rows(step, spec, state, out, self.batch_invariant, self.pdl)
        else:
            mamba2_decode(step, spec, state, out, self._reads_ahead(batch), self.pdl)
        return out

    def check_mamba2(self, spec: Mamba2Spec) -> None:
        from quengine.kernels.cuda.mamba2.arithmetic import check_sizes

        check_sizes(spec)

    def _state_step(
        self, batch: ForwardBatch, x: Tensor | ScaledProduct, cache_group: int
    ) -> tuple["StateRows", bool]:
        """A step's rows for a layer with a state, and whether a sequence may have several rows or checkpoints: any
        prompt may, even one of a single row."""
        from quengine.kernels.cuda.gated_delta.rows import StateRows

        prompt = batch.phase == "prefill"
        several = batch.shares_sequences or prompt
        if not isinstance(x, ScaledProduct) or not several:
            rows = x.finish() if isinstance(x, ScaledProduct) else x
            x = ScaledProduct(rows, self._room().ones(len(rows)), 1.0)
        tiles = self._state_tiles_of(batch) if several and prompt else None
        tables = batch.block_tables_of(cache_group)
        scale = 1.0 / x.weight_scale
        return StateRows(x.values, x.row_scale, scale, batch.positions, tables, tiles), several

    def _reads_ahead(self, batch: ForwardBatch) -> bool:
        """Whether positions and tables may be read before the previous launch has ended. In prefill they may not: a
        chunk's positions may have been written just before."""
        return self.pdl and batch.phase != "prefill"

    def check_gated_delta(self, spec: GatedDeltaSpec) -> None:
        from quengine.kernels.cuda.gated_delta.arithmetic import check_state_head_dim

        check_state_head_dim(spec.head_dim)

    def kept(self, x: Rows) -> Rows:
        if (
            not isinstance(x, Fp16Operand) or x.is_wgmma
        ):  # a buffer of its own, or one that only `norm_glu` has
            return x
        return replace(x, values=x.values.clone(), row_scale=x.row_scale.clone())

    def gather_rows(self, x: Rows | Residual, rows: Tensor) -> Tensor:
        """Selected rows, fp32. A single row then takes the decode kernels, unless the backend is batch-invariant."""
        if isinstance(x, Fp16Operand):
            return x.gather(rows)
        assert not isinstance(x, QuantizedActivations), "nothing is gathered of a single token"
        return stream_of(x).index_select(0, rows)

    def add_to_rows(self, x: Residual, rows: Tensor, values: Tensor) -> Tensor:
        return stream_of(x).index_add_(0, rows, values)

    def flat_hidden(self, x: Residual) -> Tensor:
        return flattened(x)

    def hidden_of(self, flat: Tensor, rows: int, norm: Norm | None) -> Residual:
        return unflattened(flat, rows, begun_norm(norm))

    def normed(self, x: Residual, norm: Norm) -> Tensor:
        if isinstance(norm, LayerNorm):
            return layer_norm(stream_of(x), norm, self.pdl)
        return rms_norm(
            stream_of(x), norm.weight, norm.eps, pdl=self.pdl, batch_invariant=self.batch_invariant
        )

    def keep_hidden(
        self, batch: ForwardBatch, x: Residual, norm: Norm | None, kept: Tensor, newest: bool = False
    ) -> None:
        assert norm is None or isinstance(norm, RMSNorm), "no model with LayerNorm has a layer that drafts"
        keep_hidden(batch, stream_of(x), norm, kept, self._sequences_of(batch), newest, self.pdl)

    def join_hidden(
        self,
        batch: ForwardBatch,
        x: Residual,
        norm: Norm,
        kept: Tensor,
        kept_norm: Norm,
        weight: PackedWeight,
    ) -> Tensor:
        assert isinstance(norm, RMSNorm) and isinstance(kept_norm, RMSNorm)
        rows = joined(batch, stream_of(x), norm, kept, kept_norm, self._sequences_of(batch), self.pdl)
        return self._matmul(batch, rows, weight, None)

    def hidden_before(self, batch: ForwardBatch, kept: Tensor, norm: Norm | None) -> Tensor:
        assert norm is None or isinstance(norm, RMSNorm)
        return hidden_before(batch, kept, norm, self._sequences_of(batch), self.pdl)

    def fused(self, batch: ForwardBatch, x: Residual, weight: PackedWeight, before: Tensor | None) -> Tensor:
        stream = stream_of(x)
        if self._takes_q_dot(len(stream)):
            return self._matmul(batch, stream, weight, before)
        # The workspace's operand holds the next layer's normalized rows.
        (count, width), layout = stream.shape, self._room().layout(len(stream))
        own = Fp16Operand.empty(count, width, stream.device, layout)
        rows = to_fp16_operand(stream, own, self.pdl)
        return matmul(rows, weight, self._room(), before, self.pdl, exact(batch))

    def spread_logits(self, _batch: ForwardBatch, logits: Tensor, tokens: Tensor, vocab: int) -> Tensor:
        return spread_logits(logits, tokens, vocab)

    def _sequences_of(self, batch: ForwardBatch) -> Tensor | None:
        """The sequence of each row of a prompt's step; None in decode."""
        return self._state_tiles_of(batch).sequences if batch.phase == "prefill" else None

    def logits(
        self, batch: ForwardBatch, x: Residual, norm: Norm, weight: PackedWeight, softcap: float = 0.0
    ) -> Tensor:
        logits = self._matmul(batch, self._normed(x, norm), weight, None)
        return softcap_logits(logits, softcap, self.pdl) if softcap else logits

    def _product(self, batch: ForwardBatch, x: Rows, weight: PackedWeight) -> Tensor | ScaledProduct:
        if isinstance(x, QuantizedActivations):
            return matvec(x, weight, pdl=self.pdl)
        return matmul_product(x, weight, self._room(), self.pdl, exact(batch))

    def _add_partial(
        self,
        batch: ForwardBatch,
        rows: Rows,
        weight: PackedWeight,
        residual: Residual,
        next_norm: RMSNorm | None,
        post_norm: RMSNorm | None,
        bias: Tensor | None,
        row_scale: Tensor | None,
        branch: Branch | None,
    ) -> Residual:
        """`linear_add` of this rank's part of the columns, summed over the ranks."""
        shape, own = stream_of(residual).shape, post_norm is None and row_scale is None
        peers = self._peers(*shape)
        stream, begins = stream_of(residual), own and next_norm is not None and can_begin_norm(weight)
        if begins and peers is not None and isinstance(rows, QuantizedActivations):
            assert next_norm is not None
            return self._matvec_norm(rows, weight, stream, next_norm, bias, peers)
        part = (
            self._matmul(batch, rows, weight, None) if peers is None else self._product(batch, rows, weight)
        )
        return self._add_sum(part, stream, peers, post_norm, next_norm, bias, row_scale, branch)

    def _peers(self, rows: int, width: int) -> PeerBuffers | None:
        """The buffers with which a launch sums [rows, width] over the ranks itself. None where a separate launch sums
        them, as it always does in batch-invariant mode."""
        return None if self.batch_invariant else self.communicator.peers(rows, width)

    def _matvec_norm(
        self,
        x: QuantizedActivations,
        weight: PackedWeight,
        residual: Tensor,
        norm: RMSNorm,
        bias: Tensor | None,
        peers: PeerBuffers | None = None,
    ) -> RmsNormed:
        scratch = self._quantization_scratch()
        return matvec_norm(x, weight, residual, norm.weight, norm.eps, scratch, self.pdl, bias, peers)

    def _add_sum(
        self, product: Tensor | ScaledProduct, residual: Tensor, peers: PeerBuffers | None, *others: Any
    ) -> Residual:
        """The sum of the ranks' products, added to the residual; others: arguments of `_add_product`."""
        if peers is None:
            assert isinstance(product, Tensor)
            product = self.communicator.all_reduce(product)
        return self._add_product(product, residual, *others, peers=peers)

    def _add_product(
        self,
        product: Tensor | ScaledProduct,
        residual: Tensor,
        post_norm: RMSNorm | None,
        next_norm: RMSNorm | None,
        bias: Tensor | None,
        row_scale: Tensor | None,
        branch: Branch | None,
        peers: PeerBuffers | None = None,
    ) -> Residual:
        """Adds a product to the residual, with the steps that the matmul leaves out (norm, bias, row scales), and norms
        the sum: in one launch, unless `_add_pushed` does it.
        """
        plain = all(each is None for each in (post_norm, bias, row_scale, branch))
        if plain and peers is not None and isinstance(product, Tensor) and len(product) > 1:
            return self._add_pushed(product, residual, next_norm, peers)
        normed: QuantizedActivations | Fp16Operand | None = None
        if next_norm is not None and self._takes_q_dot(len(residual)):
            normed = QuantizedActivations.empty(1, residual.shape[1], self.device)
        elif next_norm is not None:
            normed = self._room().fp16_operand(*residual.shape)
        post_norm_add(
            product, residual, post_norm, next_norm, normed, self.pdl, bias, row_scale, peers, branch
        )
        return residual if normed is None else RmsNormed(residual, normed)

    def _add_pushed(
        self, product: Tensor, residual: Tensor, next_norm: RMSNorm | None, peers: PeerBuffers
    ) -> Residual:
        """Adds the ranks' sum of several rows to the residual, and norms the result in a second launch: many programs
        exchange a row's values, but one program norms a row."""
        push_all_reduce(product, peers, self.pdl, residual)
        if next_norm is None:
            return residual
        normed = self._room().fp16_operand(*residual.shape)
        rms_norm_fp16(residual, next_norm.weight, next_norm.eps, normed, self.pdl, self.batch_invariant)
        return RmsNormed(residual, normed)

    def _prefill(
        self, batch: ForwardBatch, qkv: Tensor | ScaledProduct, spec: AttentionSpec, layer: KVLayer
    ) -> Rows:
        """Attention on a step's chunks, whose rows are cut into tiles."""
        tokens, width, tiles = (
            len(batch),
            spec.heads * spec.head_dim,
            self._tiles_of(batch),
        )
        positions, tables = batch.positions, batch.block_tables_of(spec.cache_group)
        both_ways = bool(spans_of(batch, spec))
        if both_ways and spec.gated:
            raise NotImplementedError("rows that attend both ways, of an attention with output gates")
        if both_ways and isinstance(qkv, ScaledProduct):
            qkv = qkv.finish()
        gates = qkv if spec.gated else None
        room, scaled = self._room(), isinstance(qkv, ScaledProduct)
        q = rope_store(
            qkv, spec, layer, positions, tables, tiles.sequences, room.wide(tokens, width) if scaled else None,
            self.pdl, batch.angle_rows,
        )  # fmt: skip
        form = OperandLayout.ROW_MAJOR
        out = q.view(tokens, width) if scaled else torch.empty(tokens, width, device=self.device)
        wgmma = width % 128 == 0 and room.layout(tokens) is OperandLayout.WGMMA
        if wgmma and not both_ways and not self.batch_invariant and stores_wgmma_layout(spec, layer, tiles):
            out, form = room.fp16_operand(tokens, width).values, OperandLayout.WGMMA
        in_layout = form is OperandLayout.WGMMA
        attention_prefill(
            q, spec, layer, tables, tiles, out, self.batch_invariant, in_layout, self.pdl, gates
        )  # fmt: skip
        if both_ways:
            return attend_within_images(out, q.float(), spec, layer, batch)
        return room.without_row_scales(out, tokens, form) if scaled or in_layout else out

    def _tiles_of(self, batch: ForwardBatch) -> PrefillTiles:
        """The step's tiles, made once for all layers."""
        if batch.tiles is not None:
            return batch.tiles
        if self._tiles is None or self._tiles[0] is not batch:
            self._tiles = (batch, prefill_tiles(batch, self.batch_invariant))
        return self._tiles[1]

    def _state_tiles_of(self, batch: ForwardBatch) -> PrefillTiles:
        """The chunks of a prompt's step for layers that keep states, made once for the layers of a step."""
        if batch.tiles is not None:
            return batch.tiles
        if self._state_tiles is None or self._state_tiles[0] is not batch:
            from quengine.kernels.cuda.gated_delta.gated_delta import TILE_ROWS

            self._state_tiles = (batch, cut_tiles(batch, TILE_ROWS))
        return self._state_tiles[1]

    def _write_rows(
        self, batch: ForwardBatch, qkv: Tensor | ScaledProduct, spec: AttentionSpec, layer: KVLayer
    ) -> Tensor:
        """Writes all rows' keys and values to the cache, before attention reads those of other rows.

        It runs attention of each row to itself alone, and discards the result. The next launch writes the same bits
        again, so a row may read either.
        """
        qkv = qkv.finish() if isinstance(qkv, ScaledProduct) else qkv
        rows = qkv.shape[0]
        unused = torch.empty(rows, spec.heads * spec.head_dim, dtype=torch.float32, device=self.device)
        alone, workspace = replace(spec, window=1, sinks=None), self._decode_workspace(spec, rows)
        tables, positions = batch.block_tables_of(spec.cache_group), batch.positions
        attention_decode(
            qkv, alone, layer, positions, tables, workspace, unused, True, self.pdl, batch.angle_rows
        )
        return qkv

    def _decode(
        self, batch: ForwardBatch, qkv: Tensor | ScaledProduct, spec: AttentionSpec, layer: KVLayer, pdl: bool
    ) -> Rows:
        """Attention of single rows, each with its block table, in the form of the next matmul's input."""
        positions, tables, turns = batch.positions, batch.block_tables_of(spec.cache_group), batch.angle_rows
        qkv = qkv.finish() if isinstance(qkv, ScaledProduct) else qkv
        rows, width = qkv.shape[0], spec.heads * spec.head_dim
        workspace = self._decode_workspace(spec, rows)
        if self._takes_q_dot(rows):
            rounded = QuantizedActivations.empty(rows, width, self.device)
            return attention_decode(
                qkv, spec, layer, positions, tables, workspace, rounded, False, pdl, turns
            )
        room = self._room()
        half = room.fp16_operand(rows, width)
        half.clear_padding(width)
        out = room.without_row_scales(half.values, rows, half.layout)
        return attention_decode(qkv, spec, layer, positions, tables, workspace, out, True, pdl, turns)

    def _heads_operand(self, rows: int, width: int) -> QuantizedActivations | Fp16Operand:
        """An empty operand, with row scales, for rows of heads that the next matmul reads. Its layout pads no columns,
        as some of the rows may be gathered."""
        if self._takes_q_dot(rows):
            return QuantizedActivations.empty(rows, width, self.device)
        if width % 128:
            return Fp16Operand.empty(rows, width, self.device)
        return self._room().fp16_operand(rows, width)

    def _normed(self, x: Residual, norm: Norm | None) -> Rows:
        if norm is None:
            stream = stream_of(x)
            return quantize_activations(stream, pdl=self.pdl) if self._takes_q_dot(len(stream)) else stream
        if isinstance(norm, LayerNorm):
            stream = stream_of(x)
            if self._takes_q_dot(len(stream)):
                return layer_norm_quantize(stream, norm, self.pdl)
            return layer_norm_fp16(stream, norm, self._room().fp16_operand(*stream.shape), self.pdl)
        if isinstance(x, RmsNormed):
            return x.rms_normed
        if self._takes_q_dot(x.shape[0]):
            return rms_norm_quantize(x, norm.weight, norm.eps, pdl=self.pdl)
        room = self._room().fp16_operand(*x.shape)
        return rms_norm_fp16(x, norm.weight, norm.eps, room, self.pdl, self.batch_invariant)

    def _rounded(self, x: Rows) -> Rows:
        return quantize_activations(x) if isinstance(x, Tensor) and self._takes_q_dot(x.shape[0]) else x

    def _norms_in_groups(self, norm: RMSNorm, rows: int) -> bool:
        """Whether one launch normalises `rows` rows and copies them to their experts' places."""
        if not norm.experts:
            return False
        from quengine.kernels.cuda.moe.grouped import norms_in_groups

        return norms_in_groups(rows, norm.experts, self.device) and not self._takes_q_dot(rows)

    def _takes_q_dot(self, rows: int) -> bool:
        return not self.batch_invariant and takes_q_dot(rows)

    def _matmul(self, batch: ForwardBatch, x: Rows, weight: PackedWeight, residual: Tensor | None) -> Tensor:
        x = self._rounded(x)
        if isinstance(x, QuantizedActivations):
            return matvec(x, weight, residual, pdl=self.pdl)
        return matmul(x, weight, self._room(), residual, self.pdl, exact(batch))

    def _noted(self, weight: PackedWeight) -> PackedWeight:
        """Records the workspace that prefill needs for this weight."""
        self._widest = max(self._widest, weight.cols)
        self._packed |= any(isinstance(part, PackedPart) for part in weight.parts)
        size = weight.rows * weight.cols
        whole = size <= MAX_DEQUANTIZED and not weight.paired
        self._largest = max(self._largest, size if whole else min(size, MAX_DEQUANTIZED // 2))
        return weight

    def _noted_experts(self, weights: ExpertWeights) -> ExpertWeights:
        self._packed |= any(isinstance(part, PackedPart) for part in weights.parts)
        return weights

    def _room(self) -> MatmulWorkspace:
        if self._matmul_workspace is None:
            self._matmul_workspace = MatmulWorkspace(
                self._largest, self.device, self.batch_invariant, self._packed
            )
        return self._matmul_workspace

    @property
    def rooms_left(self) -> int:
        """How often a larger buffer of many rows replaced a smaller one. Graphs from before that must not run again."""
        return self._room().rooms_left

    def _quantization_scratch(self) -> QuantizationScratch:
        """One scratch for all launches: each uses it only after the launch before it has ended."""
        if self._scratch is None:
            self._scratch = QuantizationScratch.empty(2 * self._widest, self.device)
        return self._scratch

    def _decode_workspace(self, spec: AttentionSpec, rows: int) -> DecodeWorkspace:
        """The workspace of layers with these heads, enlarged to the largest batch so far. Smaller ones stay allocated:
        captured graphs may write to them."""
        shape = (spec.heads, spec.kv_heads, spec.head_dim)
        held = self._decode_workspaces.setdefault(shape, [])
        if not held or held[-1].acc.shape[0] < rows:
            held.append(DecodeWorkspace.allocate(rows, *shape, self.device))
        return held[-1]


def stream_of(x: Residual) -> Tensor:
    return x.hidden if isinstance(x, RmsNormed) else x


def begun_norm(norm: Norm | None) -> RMSNorm | None:
    """An RMSNorm, which the launch before it begins or computes; None for a LayerNorm, which is a launch of its own."""
    return norm if isinstance(norm, RMSNorm) else None


def exact(batch: ForwardBatch) -> bool:
    """Whether few rows round weights once, as many rows do (MatmulMode): in prefill, not in batched decode."""
    return batch.phase == "prefill"
