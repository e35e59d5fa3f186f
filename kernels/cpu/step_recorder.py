"""Records the operations of kernels.backend.Backend as stages of kernels over buffers at fixed addresses.

A decode step is compiled once and run for every token (step.py); elsewhere an operation is recorded and run at once
(`recorded`). A layer of one row is five stages (runtime/stage.py), between which the threads synchronise: QKV |
attention | output projection | gate and up | down; with experts, the router comes before the last two. Norms, rotation,
quantization and residuals are parts of these stages; with several rows, work that is too large for one thread gets a
stage of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from quengine.kernels.altup_operations import AltUpSpec
from quengine.kernels.backend import AttentionSpec, Branch, KVLayer, SlotLayer
from quengine.kernels.cpu.attention.attention import (
    ALL,
    Seen,
    Visible,
    attention_launches,
    check_caches,
    part_bytes,
)
from quengine.kernels.cpu.attention.latent_attention import head_launches, record_bytes, views_of_heads
from quengine.kernels.cpu.gemv.amx_rows import whole_panels
from quengine.kernels.cpu.gemv.matmul import (
    check_width,
    embed_launch,
    matvec_launch,
    quantize_launch,
    task_rows,
)
from quengine.kernels.cpu.gemv.quantized_rows import quantized_row_bytes
from quengine.kernels.cpu.moe.exchange import await_rows_launch, sums_ready_launch
from quengine.kernels.cpu.moe.experts import CpuExperts, down_launches, gate_up_launch, spread_launch
from quengine.kernels.cpu.moe.groups import GROUP, HEAD, ExpertSlots
from quengine.kernels.cpu.moe.operations import ExpertRows
from quengine.kernels.cpu.moe.router import logits_launches, logits_width, router_launch
from quengine.kernels.cpu.ops import altup
from quengine.kernels.cpu.ops.add import add_launch, add_rows_launch, scale_launch
from quengine.kernels.cpu.ops.gated_delta import gated_delta_launches
from quengine.kernels.cpu.ops.glu import glu_launch, input_glu_launch
from quengine.kernels.cpu.ops.latent_store import latent_store_launch
from quengine.kernels.cpu.ops.layer_inputs import norm_parts_launch
from quengine.kernels.cpu.ops.layer_norm import norm_launch
from quengine.kernels.cpu.ops.mamba2 import mamba2_launches
from quengine.kernels.cpu.ops.output_gate import output_gate_launch
from quengine.kernels.cpu.ops.rms_norm import rms_norm_launch
from quengine.kernels.cpu.ops.rope_store import rope_store_launches
from quengine.kernels.cpu.ops.short_conv import short_conv_launch
from quengine.kernels.cpu.ops.softcap import softcap_launch
from quengine.kernels.cpu.ops.state_copy import state_copy_launches
from quengine.kernels.cpu.runtime.stage import KernelStage
from quengine.kernels.cpu.runtime.threads import Launch, get_threads, run
from quengine.kernels.cpu.step_inputs import BatchInputs, StepInputs
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.glu import Activation, Gating, glu_width
from quengine.kernels.hidden_rows import NOT_DRAFTED
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.layer_norm import Norm
from quengine.kernels.mamba2 import Mamba2Spec
from quengine.kernels.moe.exchange import Exchange
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.pointwise import Pointwise
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.short_conv import ShortConvSpec

# Tasks per thread and stage, so that threads finish close together: _SHARES if a matrix has enough rows, and up to
# _MOST_SHARES as long as a task keeps _SHARE_BYTES bytes of weights.
_SHARES, _MOST_SHARES, _SHARE_BYTES = 4, 16, 16 << 10


Buffers: TypeAlias = dict[tuple[str, int], Tensor]
"""Buffers by role and width."""


_StateSpec = TypeVar("_StateSpec", ShortConvSpec, GatedDeltaSpec, Mamba2Spec)


@dataclass(frozen=True)
class CpuWeight:
    """Matrices that multiply the same input, each where it lies in the file."""

    parts: tuple[QuantTensor, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class RecordedAttention:
    """A recorded attention: its stage, whose number of tasks depends on the visible positions."""

    stage: KernelStage
    kv_heads: int
    seen: Seen
    visible: Visible


@dataclass
class StepRecorder:
    """Records operations on `rows` rows as stages of kernels, which only `run` or a `CompiledStep` runs.

    Operations take and return buffers that the stages read and write. Operations of one kind share a buffer: a hidden
    state is valid until the second `linear_add` or `experts_add` after the one that made it, any other result until the
    next operation of its kind. Steps with the same `buffers` share them too, so only one such step may run at a time.
    """

    rows: int
    inputs: StepInputs
    buffers: Buffers = field(default_factory=dict)
    stages: list[KernelStage] = field(default_factory=list)
    attentions: list[RecordedAttention] = field(default_factory=list)
    # (rows of a step, where to keep them, whether to keep only each sequence's last row)
    kept: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # rows to be filled from kept ones
    # (logits of some tokens, the ids of these tokens, where the logits of all tokens go)
    spread: tuple[Tensor, Tensor, Tensor] | None = None
    one_earlier: bool = False  # attention's positions are one before those of the rows
    _cleared: set[int] = field(default_factory=set)
    _row_stage: KernelStage | None = None  # the newest stage with one task per row
    # The last normalised hidden state: input, norm, result. Router and experts read the same one.
    _latest: tuple[Tensor, Norm, Tensor] | None = None
    # By the address of each buffer of quantized rows: the rows that it holds, and the buffer. Each result is a new
    # tensor object, so an object identifies values even after its memory has been overwritten.
    _quantized: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def run(self) -> None:
        """Runs what was recorded."""
        run([launch for stage in self.stages for launch in stage.launches()])

    def embed(self, weight: CpuWeight, scale: float) -> Tensor:
        (part,) = weight.parts
        out = self._fp32("hidden 0", part.cols)
        self._stage([embed_launch(part, self.inputs.tokens(part.rows), out, scale)])
        return out

    def layer_inputs(self, projected: Tensor, norm: RMSNorm, table: CpuWeight, scale: float) -> Tensor:
        (part,) = table.parts
        out = self._fp32("layer inputs", part.cols)
        self._then(norm_parts_launch(projected, norm))
        self._stage([embed_launch(part, self.inputs.tokens_within(part.rows), out, scale)])
        self._then(add_rows_launch(out, projected))
        return out

    def input_glu(self, x: Tensor, gate: CpuWeight, inputs: Tensor, layer: int, activation: Gating) -> Tensor:
        (part,), n = gate.parts, gate.rows
        between, out = self._fp32("input gate", n), self._fp32("gated", n)
        records = self._records("gated", n)
        step = max(32, min(task_rows(part), _fair_rows(n, _row_bytes(part))) // 32 * 32)
        up = inputs[:, layer * n : (layer + 1) * n]
        self._stage(
            [
                matvec_launch(self._input(x, part), part, between, 0, step=step),
                input_glu_launch(between, up, out, records, step, activation),
            ]
        )
        return self._noted(out, records)

    def norm_linear(self, x: Tensor, norm: Norm | None, weight: CpuWeight, bias: Tensor | None) -> Tensor:
        source = self._normed(x, norm)
        y = self._fp32("linear", weight.rows)
        if _share_memory(x, y):
            y = self._fp32("second linear", weight.rows)
        self._matvecs(source, weight, y, bias)
        return y

    def norm_glu(self, x: Tensor, norm: Norm | None, gate_up: CpuWeight, activation: Gating) -> Tensor:
        source = self._normed(x, norm)
        gate, up = gate_up.parts
        between, out = self._fp32("gate_up", 2 * gate.rows), self._fp32("gated", gate.rows)
        records = self._records("gated", gate.rows)
        # Whole groups of 32, as a task quantizes its own outputs; half the usual rows, as it computes gate and up.
        fair = _fair_rows(gate.rows, 2 * _row_bytes(gate))
        step = max(32, min(task_rows(gate) // 2, fair) // 32 * 32)
        self._stage(
            [
                matvec_launch(self._input(source, gate), gate, between, 0, step=step),
                matvec_launch(self._input(source, up), up, between, gate.rows, step=step),
                glu_launch(between, out, records, step, activation),
            ]
        )
        return self._noted(out, records)

    def norm_pointwise(self, x: Tensor, norm: Norm | None, up: CpuWeight, activation: Pointwise) -> Tensor:
        source, (part,) = self._normed(x, norm), up.parts
        out = self._fp32("gated", part.rows)
        records = self._records("gated", part.rows)
        step = max(32, min(task_rows(part), _fair_rows(part.rows, _row_bytes(part))) // 32 * 32)
        self._stage(
            [
                matvec_launch(self._input(source, part), part, out, 0, step=step),
                glu_launch(out, out, records, step, activation),
            ]
        )
        return self._noted(out, records)

    def linear_add(
        self,
        x: Tensor,
        weight: CpuWeight,
        residual: Tensor,
        post_norm: RMSNorm | None,
        bias: Tensor | None,
        row_scale: Tensor | None,
        branch: Branch | None,
    ) -> Tensor:
        y = self._hidden(weight.rows, residual)
        if post_norm is None:
            self._matvecs(x, weight, y, bias, row_scale, residual)
            return y
        product = self._fp32("product", weight.rows)
        self._matvecs(x, weight, product, bias, row_scale)
        self._add_normed(product, residual, post_norm, branch, y)
        return y

    def _add_normed(
        self, product: Tensor, residual: Tensor, post_norm: RMSNorm, branch: Branch | None, y: Tensor
    ) -> None:
        """y = post_norm(product) + residual; `product` is overwritten."""
        if branch is not None:
            self._add_branch(product, branch)
        self._then(rms_norm_launch(product, post_norm.weight, post_norm.eps, y))
        self._then(add_rows_launch(y, residual, post_norm.residual_scale))

    def _add_branch(self, product: Tensor, branch: Branch) -> None:
        """product = branch.first_norm(product) + branch.norm(branch.rows)."""
        own, norm = branch.first_norm, branch.norm
        other = self._fp32("normed branch", product.shape[1])
        self._then(rms_norm_launch(product, own.weight, own.eps, product))
        self._then(rms_norm_launch(branch.rows, norm.weight, norm.eps, other))
        self._then(add_rows_launch(product, other))

    def route(self, x: Tensor, norm: RMSNorm | None, router: Router, experts: Tensor | None) -> Routing:
        source, gate = self._normed(x, norm), router.shared_gate
        logits = self._fp32("router logits", logits_width(router))
        shared = None if gate is None or router.joins_shared else self._fp32("shared weight", 1)[:, 0]
        chosen = self._buffer("experts", router.width, torch.int32)
        weights = self._fp32("expert weights", router.width)
        routing = Routing(chosen, weights, shared, router.joins_shared)
        self._stage(*([launch] for launch in logits_launches(source, router, logits)))
        self._then(router_launch(logits, router, routing, self.inputs.chosen(experts, router)))
        return routing

    def weighed(self, x: Tensor, norm: RMSNorm, weights: Tensor) -> Tensor:
        width = x.shape[1]
        out = self._fp32("weighed", width)
        self._then(norm_launch(x, norm, out))
        self._then(scale_launch(out, weights, 0, width, width))
        return out

    def experts_glu(
        self, x: Tensor, norm: RMSNorm | None, routing: Routing, gate_up: CpuExperts, activation: Activation
    ) -> ExpertRows:
        source, used, parts = self._normed(x, norm), routing.experts.shape[1], gate_up.parts
        order, places = (self._buffer(role, used, torch.int64) for role in ("slot order", "slot places"))
        table = self._buffer("expert groups", HEAD + GROUP * used, torch.int64)
        groups = ExpertSlots(order, places, table)
        self._then(groups.launch(routing.experts, gate_up.held))
        inputs = [self._input(source, part.first) for part in parts]
        if not groups.single_places:
            inputs = self._spread(inputs, groups)
        width = parts[0].first.rows
        between = self._by_place("experts' gate_up", len(parts) * width, groups)
        out = self._by_place("experts' gated", width, groups)
        records = None
        if width % 32 == 0:
            records = self._by_place("experts' gated", quantized_row_bytes(width), groups, torch.uint8)
        self._stage([gate_up_launch(gate_up, groups, inputs, between, out, records, activation)])
        return ExpertRows(out, groups, records)

    def experts_add(
        self, gated: ExpertRows, routing: Routing, down: CpuExperts, residual: Tensor | None
    ) -> Tensor:
        w, groups = down.parts[0].first, gated.groups
        check_width(gated.values, w)
        y = self._fp32("branch", w.rows) if residual is None else self._hidden(w.rows, residual)
        added = self._zeros(w.rows) if residual is None else residual
        source = gated.records if w.format.is_quantized else gated.values
        assert source is not None
        products = self._by_place("experts' products", w.rows, groups)
        product, *sums = down_launches(down, groups, source, products, routing.weights, added, y)
        self._stage([product])
        for launch in sums:
            self._then(launch)
        return y

    def await_rows(self, exchange: Exchange) -> None:
        """What follows reads the rows that another device sends next."""
        self._stage([await_rows_launch(exchange)])

    def sums_ready(self, exchange: Exchange) -> None:
        """Tells the other device that `exchange.sums` are written."""
        self._then(sums_ready_launch(exchange))

    def _spread(self, inputs: Sequence[Tensor], groups: ExpertSlots) -> list[Tensor]:
        """Copies the sources to their places, each distinct one once; returns the kernels' inputs."""
        spread: dict[int, Tensor] = {}
        for rows in inputs:
            if rows.data_ptr() not in spread:
                out = self._by_place("experts' input", rows.shape[1], groups, rows.dtype)
                self._then(spread_launch(rows, groups, out))
                spread[rows.data_ptr()] = out
        return [spread[rows.data_ptr()] for rows in inputs]

    def _by_place(
        self, role: str, width: int, groups: ExpertSlots, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """A buffer [slots, width]."""
        return self._buffer(f"{role} {dtype}", groups.used * width, dtype).view(groups.slots, width)

    def attention(self, qkv: Tensor, spec: AttentionSpec, layer: KVLayer) -> Tensor:
        context, width = spec.cos.shape[0], spec.heads * spec.head_dim
        positions, slots = self.inputs.cache_rows(spec.cache_group, context, layer)
        moved = self._fp32("queries", width) if spec.gated else None
        queries = qkv[:, :width] if moved is None else moved
        queries = queries.view(self.rows, spec.heads, spec.head_dim)
        check_caches(queries, layer)
        angles = self.inputs.angle_rows(spec)
        for launch in rope_store_launches(qkv, spec, layer, positions, slots, moved, angles):
            self._then(launch)
        out = self._fp32("attended", width)
        seen = Seen(spec.window, spec.chunk)
        visible = self.inputs.visible(spec.cache_group, context, seen)
        self._then(self._splits(queries, layer, visible, spec.scale, out, seen, spec.sinks, spec.softcap))
        if spec.gated:
            self._then(output_gate_launch(out, qkv, spec))
        return out

    def latent_attention(self, q: Tensor, latent: Tensor, spec: LatentSpec, layer: KVLayer) -> Tensor:
        heads, held = spec.heads, views_of_heads(layer, spec)
        queries = self._fp32("queries", heads * spec.row).view(self.rows, heads, spec.row)
        positions, slots = self.inputs.cache_rows(spec.cache_group, len(spec.cos), layer)
        self._stage([latent_store_launch(q, latent, spec, layer, positions, slots, queries)])
        plain = q.view(self.rows, heads, spec.query)[..., : spec.plain]
        self._of_heads("absorbed", plain, spec.absorb, queries[..., : spec.rank])
        check_caches(queries, held)
        sums = self._fp32("attended", heads * spec.rank).view(self.rows, heads, spec.rank)
        visible = self.inputs.visible(spec.cache_group, len(spec.cos), ALL)
        self._stage([self._splits(queries, held, visible, spec.scale, sums)])
        out = self._fp32("values", heads * spec.values)
        self._of_heads("expanded", sums, spec.expand, out.view(self.rows, heads, spec.values))
        return out

    def _splits(
        self,
        queries: Tensor,
        layer: KVLayer,
        visible: Visible,
        scale: float,
        out: Tensor,
        seen: Seen = ALL,
        sinks: Tensor | None = None,
        cap: float = 0.0,
    ) -> Launch:
        """Adds the stage of attention's KV splits; returns the kernel that combines them (`attention_launches`)."""
        size = part_bytes(visible, queries.shape[1], layer.value_dim)
        parts = self._buffer("parts", size // self.rows, torch.uint8)
        splits, combine = attention_launches(queries, layer, visible, scale, out, parts, sinks, cap)
        stage = self._stage([splits])
        self.attentions.append(RecordedAttention(stage, layer.k.shape[1], seen, visible))
        return combine

    def _of_heads(self, role: str, x: Tensor, matrices: CpuExperts, out: Tensor) -> None:
        """Adds the stages of `head_launches`."""
        heads, size = x.shape[1], record_bytes(matrices)
        records = self._buffer(f"{role} rounded", heads * size, torch.uint8) if size else None
        rounded = None if records is None else records.view(self.rows, heads, size)
        quantizes, products = head_launches(x, matrices, out, rounded)
        if quantizes:
            self._stage(*([launch] for launch in quantizes))
        self._stage(*([launch] for launch in products))

    def altup_opened(self, x: Tensor, project: CpuWeight) -> Tensor:
        count, width = project.rows // x.shape[1] + 1, x.shape[1]
        projected, out = self._fp32("projected rows", project.rows), self._altup_rows(0, count, width)
        self._matvecs(x, project, projected)
        self._then(altup.open_launch(x, projected, out))
        return out

    def altup_predicted(self, x: Tensor, spec: AltUpSpec) -> tuple[Tensor, Tensor]:
        count, _, width = x.shape
        out = self._altup_rows(1, count, width)
        self._then(altup.predict_launch(x, out, self._fp32("altup room", width + count), spec))
        return out, out[0]

    def altup_beside(self, x: Tensor, norm: Norm, left: CpuWeight, right: CpuWeight, post: RMSNorm) -> Tensor:
        source, low = self._normed(x, norm), self._fp32("low rank", left.rows)
        self._matvecs(source, left, low)
        out = self._fp32("beside", right.rows)
        self._matvecs(low, right, out)
        self._then(rms_norm_launch(out, post.weight, post.eps, out))
        self._then(add_rows_launch(out, source))
        return out

    def altup_joined(self, y: Tensor, beside: Tensor) -> Tensor:
        out = self._fp32("joined", y.shape[1])
        self._then(altup.join_launch(y, beside, out))
        return out

    def sparse_gated(self, x: Tensor, norm: Norm | None, gate_up: CpuWeight, deviations: float) -> Tensor:
        both, out = self._fp32("gate_up", gate_up.rows), self._fp32("gated", gate_up.rows // 2)
        self._matvecs(self._normed(x, norm), gate_up, both)
        self._then(altup.sparse_gate_launch(both, deviations, out))
        return out

    def altup_corrected(self, x: Tensor, y: Tensor, spec: AltUpSpec) -> tuple[Tensor, Tensor]:
        count, _, width = x.shape
        out, scaled = self._altup_rows(0, count, width), self._fp32("scaled row", width)
        room = self._fp32("altup room", width + count)
        self._then(altup.correct_launch(x, y, out, scaled, room, spec))
        return out, scaled

    def altup_added(self, x: Tensor, rows: Tensor) -> Tensor:
        self._then(altup.add_launch(x, rows))
        return x

    def altup_closed(self, x: Tensor, unembed: Sequence[CpuWeight]) -> Tensor:
        total, product = self._fp32("hidden 0", x.shape[2]), self._fp32("product", x.shape[2])
        for number, weight in enumerate(unembed, start=1):
            self._matvecs(x[number], weight, product)
            self._then(altup.close_launch(x, product, total, number))
        return total

    def _altup_rows(self, which: int, count: int, width: int) -> Tensor:
        """A buffer [count, rows, width]."""
        return self._fp32(f"altup {which}", count * width).view(-1).view(count, self.rows, width)

    def normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        return self._normed(x, norm)

    def shrunk(
        self, x: Tensor, matrices: Sequence[Sequence[QuantTensor]], used: Sequence[int], scales: Tensor
    ) -> Tensor:
        """Products of x with the first matrices of LoRA adapters (kernels/lora/low_rank.py), times scales fp32 [M, T]:
        [T, P * M * R], zeros for adapters that are not in `used`.

        matrices: for each of P parts, a matrix [R, K] of each adapter in `used`.
        """
        rank = matrices[0][0].rows
        role = f"shrunk {len(matrices)} {rank} {used}"  # a place for each product; all others stay zero
        y = self._fp32(role, len(matrices) * len(scales) * rank).zero_()
        step, stage = min(rank, _fair_rows(len(matrices) * len(used) * rank)), list[list[Launch]]()
        for part, of_part in enumerate(matrices):
            for number, a in zip(used, of_part, strict=True):
                column = (part * len(scales) + number) * rank
                product = matvec_launch(x, a, y, column, step=step)
                stage.append([product, scale_launch(y, scales[number], column, rank, step)])
        self._stage(*stage)
        return y

    def changed_rows(
        self, x: Tensor, rows: QuantTensor, back: QuantTensor, scales: Tensor, factor: float
    ) -> Tensor:
        """x, rows that were read by token, plus their LoRA changes: `factor` times the tokens' rows of `rows`
        [vocabulary, M * R], scaled by scales fp32 [M, T], times back [K, M * R]."""
        width, each = rows.cols, rows.cols // len(scales)
        read = self._fp32("shrunk", width)
        self._stage([embed_launch(rows, self.inputs.tokens(rows.rows), read, factor)])
        for number, of_adapter in enumerate(scales):
            self._then(scale_launch(read, of_adapter, number * each, each, each))
        return self.add_changes(x, read, [back])

    def add_changes(self, y: Tensor, shrunk: Tensor, parts: Sequence[QuantTensor]) -> Tensor:
        """y plus the products of `shrunk` with the second matrices, one [N, M * R] for each part of y's columns."""
        added, column, width = self._fp32("changes", y.shape[1]), 0, shrunk.shape[1] // len(parts)
        stage = list[list[Launch]]()
        for number, b in enumerate(parts):
            step = min(task_rows(b), _fair_rows(y.shape[1]))
            product = matvec_launch(shrunk[:, number * width :][:, :width], b, added, column, step=step)
            stage.append([product, add_launch(y, added, column, b.rows, step)])
            column += b.rows
        self._stage(*stage)
        return y

    def glu(self, y: Tensor, activation: Activation) -> Tensor:
        """The activation of a product [T, 2F], or [T, F] without a gate."""
        width = glu_width(y.shape[1], activation)
        out, records = self._fp32("gated", width), self._records("gated", width)
        self._stage([glu_launch(y, out, records, max(32, _fair_rows(width) // 32 * 32), activation)])
        return self._noted(out, records)

    def added(
        self,
        product: Tensor,
        residual: Tensor,
        post_norm: RMSNorm | None,
        row_scale: Tensor | None,
        branch: Branch | None,
    ) -> Tensor:
        """The result of `linear_add` from its product, bias included, which is overwritten."""
        width = product.shape[1]
        if row_scale is not None:
            self._then(scale_launch(product, row_scale, 0, width, width))
        if post_norm is not None:
            y = self._hidden(width, residual)
            self._add_normed(product, residual, post_norm, branch, y)
            return y
        self._then(add_rows_launch(residual, product))
        return residual.view_as(residual)

    def capped(self, y: Tensor, cap: float) -> Tensor:
        self._stage([softcap_launch(y, cap, 0, y.shape[1], _fair_rows(y.shape[1]))])
        return y

    def short_conv(
        self, bcx: Tensor, spec: ShortConvSpec, layer: SlotLayer, out: Tensor | None = None
    ) -> Tensor:
        out = self._fp32("convolved", spec.channels) if out is None else out
        launch = short_conv_launch(bcx, spec, layer, *self.inputs.states(spec.cache_group), out)
        if self.rows == 1:
            self._then(launch)
        else:  # a task is a few channels of all rows, never a row
            self._stage([launch])
        return out

    def gated_delta(
        self, x: Tensor, spec: GatedDeltaSpec, layer: SlotLayer, out: Tensor | None = None
    ) -> Tensor:
        out = self._fp32("gated delta", spec.inner) if out is None else out
        return self._scan(
            gated_delta_launches(x, spec, layer, *self.inputs.states(spec.cache_group), out), out
        )

    def mamba2(self, x: Tensor, spec: Mamba2Spec, layer: SlotLayer, out: Tensor | None = None) -> Tensor:
        out = self._fp32("scanned", spec.inner) if out is None else out
        return self._scan(mamba2_launches(x, spec, layer, *self.inputs.states(spec.cache_group), out), out)

    def _scan(self, launches: tuple[Launch, Launch, Launch], out: Tensor) -> Tensor:
        """Adds the stages of a layer's convolution, scan and output, which write `out`."""
        convolution, scan, output = launches
        self._stage([convolution])
        self._stage([scan])
        self._then(output)
        return out

    def logits(self, x: Tensor, norm: Norm, weight: CpuWeight, softcap: float) -> Tensor:
        y = self._fp32("logits", weight.rows)
        self._matvecs(self._normed(x, norm), weight, y, cap=softcap)
        return y

    def keep_hidden(self, x: Tensor, norm: Norm | None, kept: Tensor, newest: bool) -> None:
        """Marks rows that are copied to `kept` after the list of kernels (CompiledStep.run)."""
        if norm is not None:
            out = self._fp32("kept", x.shape[1])
            self._then(norm_launch(x, norm, out))
            x = out
        self.kept.append((x, kept, newest))

    def join_hidden(self, x: Tensor, norm: Norm, kept: Tensor, kept_norm: Norm, weight: CpuWeight) -> Tensor:
        """The rows before are copied from `kept` ahead of the list of kernels (CompiledStep.run)."""
        width = x.shape[1]
        both, before = self._fp32("joined", 2 * width), self._before(kept)
        self._then(norm_launch(x, norm, both[:, :width]))
        self._then(norm_launch(before, kept_norm, both[:, width:]))
        y = self._hidden(weight.rows, x)
        self._matvecs(both, weight, y)
        return y

    def hidden_before(self, kept: Tensor, norm: Norm | None) -> Tensor:
        before = self._before(kept)
        if norm is None:
            return before
        out = self._fp32("normed before", kept.shape[1])
        self._then(norm_launch(before, norm, out))
        return out

    def _before(self, kept: Tensor) -> Tensor:
        """The kept rows of the positions before the step's, in one buffer."""
        if not self.before:
            self.before.append((self._fp32("before", kept.shape[1]), kept))
        return self.before[0][0]

    def fused(self, x: Tensor, weight: CpuWeight, before: Tensor | None) -> Tensor:
        y = self._fp32("fused 0", weight.rows)
        if before is not None and _share_memory(y, before):
            y = self._fp32("fused 1", weight.rows)
        self._matvecs(x, weight, y, residual=before)
        return y

    def spread_logits(self, logits: Tensor, tokens: Tensor, vocab: int) -> Tensor:
        """The logits of all `vocab` tokens, filled in after the list of kernels (CompiledStep.run)."""
        out = self._fp32("spread logits", vocab).fill_(NOT_DRAFTED)
        self.spread = logits, tokens, out
        return out

    def _stage(self, *parts: list[Launch]) -> KernelStage:
        self.stages.append(KernelStage(list(parts)))
        return self.stages[-1]

    def _matvecs(
        self,
        x: Tensor,
        weight: CpuWeight,
        y: Tensor,
        bias: Tensor | None = None,
        row_scale: Tensor | None = None,
        residual: Tensor | None = None,
        cap: float = 0.0,
    ) -> None:
        """y = row_scale * (products + bias) + residual, soft-capped by `cap` if that is not 0."""
        parts, column = [], 0
        for w in weight.parts:
            fair = min(task_rows(w), _fair_rows(weight.rows, _row_bytes(w)))
            step = whole_panels(w, self.rows, fair)
            part = [matvec_launch(self._input(x, w), w, y, column, step=step)]
            if bias is not None:
                part.append(add_launch(y, bias, column, w.rows, step))
            if row_scale is not None:
                part.append(scale_launch(y, row_scale, column, w.rows, step))
            if residual is not None:
                part.append(add_launch(y, residual, column, w.rows, step))
            if cap:
                part.append(softcap_launch(y, cap, column, w.rows, step))
            parts.append(part)
            column += w.rows
        self._stage(*parts)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x
        if self._latest is not None and self._latest[0] is x and self._latest[1] is norm:
            return self._latest[2]
        out = self._fp32("normed", x.shape[1])
        self._then(norm_launch(x, norm, out))
        self._latest = x, norm, out
        return out

    def _input(self, x: Tensor, w: QuantTensor) -> Tensor:
        """A matvec's input: x itself, or x quantized, once for all matrices that read it."""
        check_width(x, w)
        if not w.format.is_quantized:
            return x
        for rows, records in self._quantized.values():
            if rows is x:
                return records
        made = self._records("input", w.cols)
        assert made is not None
        self._then(quantize_launch(x, made))
        self._noted(x, made)
        return made

    def _noted(self, x: Tensor, records: Tensor | None) -> Tensor:
        """x, whose quantized rows `records` holds from now on."""
        if records is not None:
            self._quantized[records.data_ptr()] = x, records
        return x

    def _then(self, launch: Launch) -> None:
        """Adds a kernel that needs all results so far.

        With one row, the thread that finishes the newest stage runs it. With several rows, the kernel gets a stage of
        its own, which it shares with consecutive kernels of one task per row.
        """
        if self.rows == 1 and self.stages:
            self.stages[-1].finals.append(launch)
        elif self.stages and launch.tasks == self.rows and self.stages[-1] is self._row_stage:
            self._row_stage.parts[0].append(launch)
        else:
            stage = self._stage([launch])
            if launch.tasks == self.rows:
                self._row_stage = stage

    def _hidden(self, width: int, residual: Tensor) -> Tensor:
        """A buffer for a hidden state other than the residual's."""
        y = self._fp32("hidden 0", width)
        return self._fp32("hidden 1", width) if y.data_ptr() == residual.data_ptr() else y

    def _zeros(self, width: int) -> Tensor:
        """fp32 zeros [rows, width], which nothing writes."""
        if self._buffer("zeros", width, torch.float32).data_ptr() not in self._cleared:
            self._cleared.add(self.buffers["zeros", width].zero_().data_ptr())
        return self._buffer("zeros", width, torch.float32)

    def _fp32(self, role: str, width: int) -> Tensor:
        return self._buffer(role, width, torch.float32)

    def _records(self, role: str, width: int) -> Tensor | None:
        """A buffer for rows quantized in groups of 32; None for a width that has no whole groups."""
        return (
            None if width % 32 else self._buffer(f"{role} rounded", quantized_row_bytes(width), torch.uint8)
        )

    def _buffer(self, role: str, width: int, dtype: torch.dtype) -> Tensor:
        """A buffer [rows, width]; one that other steps share grows to the next power of two of rows."""
        held = self.buffers.get((role, width))
        if held is None or held.shape[0] < self.rows:
            room = self.rows if held is None else 1 << (self.rows - 1).bit_length()
            held = self.buffers[role, width] = torch.empty(room, width, dtype=dtype)
        return held[: self.rows]


@dataclass(frozen=True, eq=False)
class StepBatch(ForwardBatch):
    """A batch whose operations are recorded, not run; their inputs have no values yet. used_adapters: numbers of
    the adapters whose scales may be other than 0."""

    recorder: StepRecorder = field(kw_only=True)
    used_adapters: Sequence[int] = field(default=(), kw_only=True)

    def with_chunks(self, length: int) -> StepBatch:  # noqa: ARG002 (attention tells its chunk when the step runs)
        """The batch itself: chunks follow from positions, which have no values yet."""
        return self

    def one_earlier(self) -> StepBatch:
        """The batch itself. The attention of the whole step then has positions one earlier."""
        self.recorder.one_earlier = True
        return self


@contextmanager
def recorded(batch: ForwardBatch, rows: int) -> Iterator[StepRecorder]:
    """A recorder of an operation on `rows` rows: that of a StepBatch, or one that runs the operation at the end of the
    `with` block."""
    if isinstance(batch, StepBatch):
        yield batch.recorder
        return
    recorder = StepRecorder(rows, BatchInputs(batch))
    yield recorder
    recorder.run()


def state_operation(
    batch: ForwardBatch,
    x: Tensor,
    width: int,
    spec: _StateSpec,
    layer: SlotLayer,
    operation: Callable[[StepRecorder, Tensor, _StateSpec, SlotLayer, Tensor | None], Tensor],
) -> Tensor:
    """An operation on rows x [T, K] that continues from the states of a layer: [T, width], as one list of kernels.

    Its pieces end where states are kept (ForwardBatch.state_pieces). The copies are kernels too: torch's own threads
    would spin beside the team's after each one.
    """
    if isinstance(batch, StepBatch):
        return operation(batch.recorder, x, spec, layer, None)
    out, stages = torch.empty(len(x), width), list[KernelStage]()
    for rows, kept in batch.state_pieces(spec.cache_group):
        step = StepRecorder(rows.stop - rows.start, BatchInputs(batch, rows.start))
        operation(step, x[rows], spec, layer, out[rows])
        stages += step.stages
        if kept is not None:
            stages.append(KernelStage([[launch] for launch in state_copy_launches(layer.parts, *kept)]))
    run([launch for stage in stages for launch in stage.launches()])
    return out


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _fair_rows(rows: int, row_bytes: int = 0) -> int:
    """Rows per task, an even number, for _SHARES tasks per thread, or more if tasks keep _SHARE_BYTES."""
    threads = get_threads()
    most, least = (-(-rows // (2 * shares * threads)) * 2 for shares in (_SHARES, _MOST_SHARES))
    if not row_bytes:
        return most
    return max(least, min(most, -(-_SHARE_BYTES // (2 * row_bytes)) * 2))


def _row_bytes(w: QuantTensor) -> int:
    return w.data.shape[1] * w.data.element_size()
