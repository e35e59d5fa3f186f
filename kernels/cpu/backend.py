"""The CPU backend: weights as stored in the mapped file, int16 activations in decode, fp32, int16 or bf16 in prefill.

Implements kernels.backend.Backend with the kernels of kernels/cpu/. A row's result does not depend on its chunk in
prefill, nor on the other rows in decode. A decode step can be compiled to one list of kernels, with bit-identical
results.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.backend import AttentionSpec, Branch, Hidden, KVLayer, SlotLayer
from quengine.kernels.block_formats import dequantize
from quengine.kernels.cpu.moe.experts import CpuExperts
from quengine.kernels.cpu.moe.operations import down_experts, experts_add, experts_glu, gate_up_experts
from quengine.kernels.cpu.moe.router import route
from quengine.kernels.cpu.step import Step
from quengine.kernels.cpu.step_recorder import Buffers, CpuWeight, StepRecorder
from quengine.kernels.embedded_rows import place_embeddings
from quengine.kernels.encoder_attention import EncoderAttentionSpec, fused_attention
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.glu import Activation, Gating
from quengine.kernels.image_attention import attend_within_images
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.layer_norm import Norm
from quengine.kernels.mamba2 import Mamba2Spec
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.pointwise import Pointwise, pointwise
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import ONE_RANK, Communicator
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.short_conv import ShortConvSpec


class CpuBackend:
    """See the module docstring.

    Raises:
        EngineError: more threads than this machine allows.
    """

    def __init__(self, threads: int) -> None:
        self.name = "cpu"
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.communicator: Communicator = ONE_RANK
        self._recorder: StepRecorder | None = None
        cpu.set_threads(threads)

    def record(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        rows: int,
        blocks: int,
        buffers: Buffers,
        groups: int = 1,
    ) -> Step:
        """Compiles a decode step of `rows` tokens to a list of kernels that can be run with any tokens and positions.

        forward(batch) calls this backend's operations, `logits` last, and returns its result; nothing is computed
        during the call. Each sequence has a block table of at most `blocks` blocks for each of `groups` cache groups.
        Steps that never run at once may share `buffers`.
        """
        self._recorder = recorder = StepRecorder(rows, blocks, buffers, groups)
        try:
            return Step(recorder, forward(recorder.batch))
        finally:
            self._recorder = None

    def weight(self, parts: Sequence[QuantTensor]) -> CpuWeight:
        return CpuWeight(tuple(parts))

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> CpuWeight:
        return self.weight([gate, up])

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return torch.cat([dequantize(part.format, part.data).flatten() for part in parts])

    def embed(self, batch: ForwardBatch, weight: CpuWeight, scale: float = 1.0) -> Hidden:
        if self._recorder is not None:
            return self._recorder.embed(weight, batch.token_ids, scale)
        (part,) = weight.parts
        return place_embeddings(cpu.embed(part, batch.token_ids, scale), batch.embeds)

    def norm_linear(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: Norm | None,
        weight: CpuWeight,
        bias: Tensor | None = None,
    ) -> Hidden:
        if self._recorder is not None:
            return self._recorder.norm_linear(x, norm, weight, bias)
        addend = None if bias is None else bias.unsqueeze(0)
        return _linear(batch, cpu.normed(x, norm), weight, addend)

    def norm_glu(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: Norm | None,
        gate_up: CpuWeight,
        activation: Gating = "silu",
    ) -> Hidden:
        if self._recorder is not None:
            return self._recorder.norm_glu(x, norm, gate_up, activation)
        return cpu.glu(_linear(batch, cpu.normed(x, norm), gate_up), activation)

    def norm_pointwise(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: Norm | None,
        up: CpuWeight,
        activation: Pointwise,
        bias: Tensor | None = None,
    ) -> Hidden:
        if self._recorder is not None:
            assert bias is None, "only encoders have biases here, of whose steps there is no list"
            return self._recorder.norm_pointwise(x, norm, up, activation)
        addend = None if bias is None else bias.unsqueeze(0)
        y = _linear(batch, cpu.normed(x, norm), up, addend)
        return pointwise(y, activation) if activation == "gelu" else cpu.glu(y, activation)

    def linear_add(
        self,
        batch: ForwardBatch,
        x: Hidden,
        weight: CpuWeight,
        residual: Hidden,
        next_norm: Norm | None = None,  # noqa: ARG002 (the norm is an operation of its own here)
        post_norm: RMSNorm | None = None,
        bias: Tensor | None = None,
        row_scale: Hidden | None = None,
        branch: Branch | None = None,
        *,
        partial: bool = False,
    ) -> Hidden:
        if self._recorder is not None:
            return self._recorder.linear_add(x, weight, residual, post_norm, bias, row_scale, branch)
        addend = None if bias is None else bias.unsqueeze(0)
        y = _linear(batch, x, weight, None if partial else addend)
        if partial:
            y = self.communicator.all_reduce(y)
            y = y if addend is None else y.add_(addend)
        y = y if row_scale is None else y.mul_(row_scale.view(-1, 1))
        # The residual is added last: beside its large values, partial sums of the product would lose bits.
        if branch is not None:
            y = cpu.normed(y, branch.first_norm).add_(cpu.normed(branch.rows, branch.norm))
        scale = 1.0 if post_norm is None else post_norm.residual_scale
        return cpu.normed(y, post_norm).add_(residual if scale == 1.0 else residual * scale)

    def gate_up_experts(
        self, gate: Sequence[QuantTensor] | None, up: Sequence[QuantTensor], bias: Tensor | None = None
    ) -> CpuExperts:
        return gate_up_experts(gate, up, bias)

    def down_experts(self, down: Sequence[QuantTensor], bias: Tensor | None = None) -> CpuExperts:
        return down_experts(down, bias)

    def route(
        self,
        _batch: ForwardBatch,
        x: Hidden,
        norm: RMSNorm,
        router: Router,
        experts: Tensor | None = None,
    ) -> Routing:
        if self._recorder is not None:
            return self._recorder.route(x, norm, router, experts)
        return route(cpu.normed(x, norm), router, experts)

    def weighed(self, x: Hidden, norm: RMSNorm, weights: Tensor) -> Hidden:
        if self._recorder is not None:
            return self._recorder.weighed(x, norm, weights)
        return cpu.normed(x, norm).mul_(weights)

    def experts_glu(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: RMSNorm | None,
        routing: Routing,
        gate_up: CpuExperts,
        activation: Activation = "silu",
    ) -> Hidden:
        if self._recorder is not None:
            return self._recorder.experts_glu(x, norm, routing, gate_up, activation)
        return experts_glu(cpu.normed(x, norm), routing, gate_up, activation, batch.phase)

    def experts_add(
        self,
        batch: ForwardBatch,
        gated: Hidden,
        routing: Routing,
        down: CpuExperts,
        residual: Hidden | None,
        next_norm: Norm | None = None,  # noqa: ARG002 (the norm is an operation of its own here)
        *,
        partial: bool = False,
    ) -> Hidden:
        if self._recorder is not None:
            return self._recorder.experts_add(gated, routing, down, residual)
        if partial:
            y = self.communicator.all_reduce(experts_add(gated, routing, down, None, batch.phase))
            return y if residual is None else y.add_(residual)
        return experts_add(gated, routing, down, residual, batch.phase)

    def attention(self, batch: ForwardBatch, qkv: Hidden, spec: AttentionSpec, layer: KVLayer) -> Hidden:
        if self._recorder is not None:
            return self._recorder.attention(qkv, spec, layer, batch)
        q = cpu.rope_store(qkv, spec, layer, batch)
        if batch.phase == "decode":
            group = spec.cache_group
            out = cpu.batch_attention(
                q, layer, batch, spec.scale, spec.window, group, spec.sinks, spec.softcap
            )
        else:
            chunks = [
                cpu.prefill_attention(
                    q[rows], layer, start, spec.scale, spec.window, table, spec.sinks, spec.softcap
                )
                for rows, start, table in batch.chunks(spec.cache_group)
            ]
            out = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        y = attend_within_images(out.reshape(len(q), -1), q, spec, layer, batch)
        return cpu.output_gate(y, qkv, spec) if spec.gated else y

    def columns(self, x: Hidden, first: int, last: int) -> Hidden:
        return x[:, first:last] if self._recorder is None else self._recorder.columns(x, first, last)

    def latent_attention(
        self, batch: ForwardBatch, q: Hidden, latent: Hidden, spec: LatentSpec, layer: KVLayer
    ) -> Hidden:
        if self._recorder is not None:
            return self._recorder.latent_attention(q, latent, spec, layer)
        return cpu.latent_attention(batch, q, latent, spec, layer)

    def check_latent(self, spec: LatentSpec) -> None:
        cpu.check_latent(spec)

    def encoder_attention(self, batch: ForwardBatch, qkv: Hidden, spec: EncoderAttentionSpec) -> Hidden:
        assert self._recorder is None
        return fused_attention(batch, qkv, spec)

    def short_conv(self, batch: ForwardBatch, x: Hidden, spec: ShortConvSpec, state: SlotLayer) -> Hidden:
        if self._recorder is not None:
            return self._recorder.short_conv(x, spec, state)
        return cpu.short_conv(batch, x, spec, state)

    def gated_delta(self, batch: ForwardBatch, x: Hidden, spec: GatedDeltaSpec, state: SlotLayer) -> Hidden:
        if self._recorder is not None:
            return self._recorder.gated_delta(x, spec, state)
        return cpu.gated_delta(batch, x, spec, state)

    def check_gated_delta(self, spec: GatedDeltaSpec) -> None:
        """Heads of every size are computed."""

    def kept(self, x: Hidden) -> Hidden:
        return x

    def mamba2(self, batch: ForwardBatch, x: Hidden, spec: Mamba2Spec, state: SlotLayer) -> Hidden:
        if self._recorder is not None:
            return self._recorder.mamba2(x, spec, state)
        return cpu.mamba2(batch, x, spec, state)

    def check_mamba2(self, spec: Mamba2Spec) -> None:
        """Heads of every size are computed."""

    def gather_rows(self, x: Hidden, rows: Tensor) -> Hidden:
        return x[rows]

    def flat_hidden(self, x: Tensor) -> Tensor:
        return x.flatten()

    def hidden_of(self, flat: Tensor, rows: int, _norm: Norm | None) -> Hidden:
        return flat.view(rows, -1)

    def normed(self, x: Hidden, norm: Norm) -> Tensor:
        return cpu.normed(x, norm)

    def logits(
        self, batch: ForwardBatch, x: Hidden, norm: Norm, weight: CpuWeight, softcap: float = 0.0
    ) -> Tensor:
        if self._recorder is not None:
            return self._recorder.logits(x, norm, weight, softcap)
        x = cpu.normed(x, norm)
        # A single last row takes the decode kernel.
        decodes = len(x) == 1 or batch.phase == "decode"
        y = cpu.decode_linear(x, weight.parts) if decodes else cpu.prompt_linear(x, weight.parts)
        return cpu.softcap(y, softcap)


def _linear(batch: ForwardBatch, x: Tensor, weight: CpuWeight, addend: Tensor | None = None) -> Tensor:
    if batch.phase == "prefill":
        return cpu.prompt_linear(x, weight.parts, addend)
    y = cpu.decode_linear(x, weight.parts)
    return y if addend is None else y.add_(addend)
