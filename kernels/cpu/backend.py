"""The CPU backend: weights as stored in the mapped file, int16 activations in decode; prefill in fp32, in int16, or
in two terms of each operand on AMX tiles.

Implements kernels.backend.Backend with the kernels of kernels/cpu/. A row's result does not depend on its chunk in
prefill, nor on the other rows in decode. An operation is recorded as kernels (step_recorder.py) and run at once; a
decode step can be recorded whole and run as one list. For chunks of prompts, matmuls and attention have kernels of
their own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.altup_operations import AltUpOperations
from quengine.kernels.backend import AttentionSpec, Branch, KVLayer, SlotLayer
from quengine.kernels.block_formats import dequantize
from quengine.kernels.cpu.altup import CpuAltUp
from quengine.kernels.cpu.moe.experts import CpuExperts
from quengine.kernels.cpu.moe.operations import (
    ExpertRows,
    down_experts,
    gate_up_experts,
    prompt_experts_add,
    prompt_experts_glu,
)
from quengine.kernels.cpu.rows import add_to_rows, place_rows, taken_rows
from quengine.kernels.cpu.runtime.scratch import keep_freed_memory, scratch
from quengine.kernels.cpu.step_recorder import CpuWeight, StepBatch, StepRecorder, recorded, state_operation
from quengine.kernels.encoder_attention import EncoderAttentionSpec, fused_attention
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.glu import Activation, Gating, glu
from quengine.kernels.hidden_rows import keep_rows, rows_before, spread_logits
from quengine.kernels.image_attention import attend_within_images
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.layer_norm import Norm
from quengine.kernels.mamba2 import Mamba2Spec
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.plain_rows import PlainRows
from quengine.kernels.pointwise import Pointwise, pointwise
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import ONE_RANK, Communicator
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.short_conv import ShortConvSpec


class CpuBackend(PlainRows):
    """See the module docstring.

    Raises:
        EngineError: more threads than this machine allows.
    """

    def __init__(self, threads: int) -> None:
        self.name = "cpu"
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.communicator: Communicator = ONE_RANK
        cpu.set_threads(threads)
        keep_freed_memory()

    def weight(self, parts: Sequence[QuantTensor]) -> CpuWeight:
        return CpuWeight(tuple(parts))

    def first_rows(self, weight: CpuWeight, rows: int) -> CpuWeight:
        (part,) = weight.parts
        return CpuWeight((part.first_rows(rows),))

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> CpuWeight:
        return CpuWeight((gate, up))

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return torch.cat([dequantize(part.format, part.data).flatten() for part in parts])

    def embed(self, batch: ForwardBatch, weight: CpuWeight, scale: float = 1.0) -> Tensor:
        with recorded(batch, len(batch)) as step:
            rows = step.embed(weight, scale)
        return place_rows(rows, batch.embeds)

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return taken_rows(x, rows)

    def add_to_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        add_to_rows(x, rows, values)
        return x

    def row_table(self, table: QuantTensor) -> CpuWeight:
        return CpuWeight((table,))

    def layer_inputs(
        self, batch: ForwardBatch, projected: Tensor, norm: RMSNorm, table: CpuWeight, scale: float
    ) -> Tensor:
        with recorded(batch, len(batch)) as step:
            return step.layer_inputs(projected.contiguous(), norm, table, scale)

    def input_glu(
        self,
        batch: ForwardBatch,
        x: Tensor,
        gate: CpuWeight,
        inputs: Tensor,
        layer: int,
        activation: Gating,
    ) -> Tensor:
        if batch.phase == "prefill":
            n = gate.rows
            up = inputs[:, layer * n : (layer + 1) * n]
            return cpu.input_glu(_prompt_linear(x, gate), up, activation)
        with recorded(batch, len(x)) as step:
            return step.input_glu(x, gate, inputs, layer, activation)

    def norm_linear(
        self,
        batch: ForwardBatch,
        x: Tensor,
        norm: Norm | None,
        weight: CpuWeight,
        bias: Tensor | None = None,
    ) -> Tensor:
        if batch.phase == "prefill":
            with cpu.joined():
                return _prompt_linear(cpu.normed(x, norm), weight, bias)
        with recorded(batch, len(x)) as step:
            return step.norm_linear(x, norm, weight, bias)

    def linear(self, batch: ForwardBatch, x: Tensor, weight: CpuWeight) -> Tensor:
        return self.norm_linear(batch, x, None, weight)

    def norm_glu(
        self,
        batch: ForwardBatch,
        x: Tensor,
        norm: Norm | None,
        gate_up: CpuWeight,
        activation: Gating = "silu",
    ) -> Tensor:
        if batch.phase == "prefill":
            between = scratch("gate and up", len(x), gate_up.rows)
            if activation == "gelu_erf":
                return glu(cpu.prompt_linear(cpu.normed(x, norm), gate_up.parts, y=between), activation)
            with cpu.joined():
                return cpu.glu(cpu.prompt_linear(cpu.normed(x, norm), gate_up.parts, y=between), activation)
        with recorded(batch, len(x)) as step:
            return step.norm_glu(x, norm, gate_up, activation)

    def norm_pointwise(
        self,
        batch: ForwardBatch,
        x: Tensor,
        norm: Norm | None,
        up: CpuWeight,
        activation: Pointwise,
        bias: Tensor | None = None,
    ) -> Tensor:
        if batch.phase == "prefill":
            y = _prompt_linear(cpu.normed(x, norm), up, bias)
            return pointwise(y, activation) if activation == "gelu" else cpu.glu(y, activation)
        assert bias is None, "only encoders have biases here, which have no decode steps"
        with recorded(batch, len(x)) as step:
            return step.norm_pointwise(x, norm, up, activation)

    def linear_add(
        self,
        batch: ForwardBatch,
        x: Tensor,
        weight: CpuWeight,
        residual: Tensor,
        next_norm: Norm | None = None,  # noqa: ARG002 (the norm is an operation of its own here)
        post_norm: RMSNorm | None = None,
        bias: Tensor | None = None,
        row_scale: Tensor | None = None,
        branch: Branch | None = None,
        *,
        partial: bool = False,
    ) -> Tensor:
        if batch.phase == "decode" and not partial:
            with recorded(batch, len(x)) as step:
                return step.linear_add(x, weight, residual, post_norm, bias, row_scale, branch)
        if not partial and row_scale is None:
            with cpu.joined():
                return added_rows(_prompt_linear(x, weight, bias), residual, post_norm, branch)
        y = self.norm_linear(batch, x, None, weight, None if partial else bias)
        if partial:
            y = self.communicator.all_reduce(y)
            y = y if bias is None else y.add_(bias)
        y = y if row_scale is None else y.mul_(row_scale.view(-1, 1))
        return added_rows(y, residual, post_norm, branch)

    def gate_up_experts(
        self,
        gate: Sequence[QuantTensor] | None,
        up: Sequence[QuantTensor],
        bias: Tensor | None = None,
        share: ExpertShare | None = None,
    ) -> CpuExperts:
        return gate_up_experts(gate, up, bias, share)

    def down_experts(
        self, down: Sequence[QuantTensor], bias: Tensor | None = None, share: ExpertShare | None = None
    ) -> CpuExperts:
        return down_experts(down, bias, share)

    def route(
        self,
        batch: ForwardBatch,
        x: Tensor,
        norm: RMSNorm,
        router: Router,
        experts: Tensor | None = None,
    ) -> Routing:
        with recorded(batch, len(x)) as step:
            return step.route(x, norm, router, experts)

    def weighed(self, batch: ForwardBatch, x: Tensor, norm: RMSNorm, weights: Tensor) -> Tensor:
        with recorded(batch, len(x)) as step:
            return step.weighed(x, norm, weights)

    def experts_glu(
        self,
        batch: ForwardBatch,
        x: Tensor,
        norm: RMSNorm | None,
        routing: Routing,
        gate_up: CpuExperts,
        activation: Activation = "silu",
    ) -> ExpertRows:
        if batch.phase == "prefill":
            with cpu.joined():
                return prompt_experts_glu(cpu.normed(x, norm), routing, gate_up, activation)
        with recorded(batch, len(x)) as step:
            return step.experts_glu(x, norm, routing, gate_up, activation)

    def experts_add(
        self,
        batch: ForwardBatch,
        gated: ExpertRows,
        routing: Routing,
        down: CpuExperts,
        residual: Tensor | None,
        next_norm: Norm | None = None,  # noqa: ARG002 (the norm is an operation of its own here)
        *,
        partial: bool = False,
    ) -> Tensor:
        if partial:
            y = self.communicator.all_reduce(self.experts_add(batch, gated, routing, down, None))
            return y if residual is None else y.add_(residual)
        if batch.phase == "prefill":
            return prompt_experts_add(gated, routing, down, residual)
        with recorded(batch, len(routing.experts)) as step:
            return step.experts_add(gated, routing, down, residual)

    @property
    def altup(self) -> AltUpOperations:
        return CpuAltUp(self)

    def attention(self, batch: ForwardBatch, qkv: Tensor, spec: AttentionSpec, layer: KVLayer) -> Tensor:
        if batch.phase == "decode":
            with recorded(batch, len(qkv)) as step:
                return step.attention(qkv, spec, layer)
        q = cpu.rope_store(qkv, spec, layer, batch)
        chunks = [
            cpu.prefill_attention(
                q[rows], layer, start, spec.scale, spec.window, table, spec.sinks, spec.softcap
            )
            for rows, start, table in batch.chunks(spec.cache_group)
        ]
        y = (chunks[0] if len(chunks) == 1 else torch.cat(chunks)).reshape(len(q), -1)
        y = attend_within_images(y, q, spec, layer, batch)
        return cpu.output_gate(y, qkv, spec) if spec.gated else y

    def latent_attention(
        self, batch: ForwardBatch, q: Tensor, latent: Tensor, spec: LatentSpec, layer: KVLayer
    ) -> Tensor:
        if batch.phase == "prefill":
            return cpu.prompt_latent_attention(batch, q, latent, spec, layer)
        with recorded(batch, len(q)) as step:
            return step.latent_attention(q, latent, spec, layer)

    def check_latent(self, spec: LatentSpec) -> None:
        cpu.check_latent(spec)

    def encoder_attention(self, batch: ForwardBatch, qkv: Tensor, spec: EncoderAttentionSpec) -> Tensor:
        return fused_attention(batch, qkv, spec)

    def short_conv(self, batch: ForwardBatch, x: Tensor, spec: ShortConvSpec, state: SlotLayer) -> Tensor:
        return state_operation(batch, x, spec.channels, spec, state, StepRecorder.short_conv)

    def gated_delta(self, batch: ForwardBatch, x: Tensor, spec: GatedDeltaSpec, state: SlotLayer) -> Tensor:
        return state_operation(batch, x, spec.inner, spec, state, StepRecorder.gated_delta)

    def mamba2(self, batch: ForwardBatch, x: Tensor, spec: Mamba2Spec, state: SlotLayer) -> Tensor:
        return state_operation(batch, x, spec.inner, spec, state, StepRecorder.mamba2)

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        return cpu.normed(x, norm)

    def keep_hidden(
        self, batch: ForwardBatch, x: Tensor, norm: Norm | None, kept: Tensor, newest: bool = False
    ) -> None:
        if isinstance(batch, StepBatch):
            batch.recorder.keep_hidden(x, norm, kept, newest)
        else:
            keep_rows(batch, cpu.normed(x, norm), kept, newest)

    def join_hidden(
        self, batch: ForwardBatch, x: Tensor, norm: Norm, kept: Tensor, kept_norm: Norm, weight: CpuWeight
    ) -> Tensor:
        if isinstance(batch, StepBatch):
            return batch.recorder.join_hidden(x, norm, kept, kept_norm, weight)
        before = cpu.normed(rows_before(batch, kept), kept_norm)
        return self.norm_linear(batch, torch.cat([cpu.normed(x, norm), before], 1), None, weight)

    def hidden_before(self, batch: ForwardBatch, kept: Tensor, norm: Norm | None) -> Tensor:
        if isinstance(batch, StepBatch):
            return batch.recorder.hidden_before(kept, norm)
        return cpu.normed(rows_before(batch, kept), norm)

    def fused(self, batch: ForwardBatch, x: Tensor, weight: CpuWeight, before: Tensor | None) -> Tensor:
        if batch.phase == "prefill":
            product = _prompt_linear(x, weight)
            return product if before is None else cpu.add_rows(product, before)
        with recorded(batch, len(x)) as step:
            return step.fused(x, weight, before)

    def spread_logits(self, batch: ForwardBatch, logits: Tensor, tokens: Tensor, vocab: int) -> Tensor:
        if isinstance(batch, StepBatch):
            return batch.recorder.spread_logits(logits, tokens, vocab)
        return spread_logits(logits, tokens, vocab)

    def logits(
        self, batch: ForwardBatch, x: Tensor, norm: Norm, weight: CpuWeight, softcap: float = 0.0
    ) -> Tensor:
        # A single last row takes the decode kernel.
        if len(x) == 1 or batch.phase == "decode":
            with recorded(batch, len(x)) as step:
                return step.logits(x, norm, weight, softcap)
        return cpu.softcap(cpu.prompt_linear(cpu.normed(x, norm), weight.parts), softcap)


def _prompt_linear(x: Tensor, weight: CpuWeight, bias: Tensor | None = None) -> Tensor:
    return cpu.prompt_linear(x, weight.parts, None if bias is None else bias.unsqueeze(0))


def added_rows(y: Tensor, residual: Tensor, post_norm: RMSNorm | None, branch: Branch | None) -> Tensor:
    """The norms and sums after a product y. The residual is added last: beside its large values, partial sums of the
    product would lose bits."""
    if branch is not None:
        y = cpu.add_rows(cpu.normed(y, branch.first_norm), cpu.normed(branch.rows, branch.norm))
    scale = 1.0 if post_norm is None else post_norm.residual_scale
    return cpu.add_rows(cpu.normed(y, post_norm), residual, scale)
