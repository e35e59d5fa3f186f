"""Compiles a decode step: the operations of kernels.backend.Backend, as kernels over buffers at fixed addresses.

A layer is five stages (runtime/stage.py), between which the threads synchronise: QKV | attention | output projection |
gate and up | down; with experts, the router comes before the last two. Norms, rotation, quantization and residuals are
parts of these stages; for several rows, those too large for one thread get stages of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from quengine.kernels.backend import AttentionSpec, Branch, KVLayer, SlotLayer
from quengine.kernels.cpu.attention.attention import Visible, attention_launches, check_caches, part_bytes
from quengine.kernels.cpu.attention.latent_attention import head_launches, record_bytes, views_of_heads
from quengine.kernels.cpu.gemv.matmul import embed_launch, matvec_launch, quantize_launch, task_rows
from quengine.kernels.cpu.gemv.quantized_rows import quantized_row_bytes
from quengine.kernels.cpu.moe.experts import CpuExperts, down_launches, gate_up_launch, spread_launch
from quengine.kernels.cpu.moe.groups import GROUP, HEAD, Groups
from quengine.kernels.cpu.moe.operations import ExpertRows
from quengine.kernels.cpu.moe.router import logits_launches, logits_width, router_launch
from quengine.kernels.cpu.ops.add import add_launch, scale_launch
from quengine.kernels.cpu.ops.gated_delta import gated_delta_launches
from quengine.kernels.cpu.ops.glu import glu_launch
from quengine.kernels.cpu.ops.latent_store import latent_store_launch
from quengine.kernels.cpu.ops.layer_norm import norm_launch
from quengine.kernels.cpu.ops.mamba2 import mamba2_launches
from quengine.kernels.cpu.ops.output_gate import output_gate_launch
from quengine.kernels.cpu.ops.rms_norm import rms_norm_launch
from quengine.kernels.cpu.ops.rope_store import rope_store_launches
from quengine.kernels.cpu.ops.short_conv import short_conv_launch
from quengine.kernels.cpu.ops.softcap import softcap_launch
from quengine.kernels.cpu.runtime.stage import Stage
from quengine.kernels.cpu.runtime.threads import Launch, get_threads
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.glu import Activation, Gating
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.layer_norm import Norm
from quengine.kernels.mamba2 import Mamba2Spec
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.pointwise import Pointwise
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.short_conv import ShortConvSpec

# Tasks per thread and stage, if a matrix has enough rows, so that threads finish close together.
_SHARES = 4


Buffers: TypeAlias = dict[tuple[str, int], Tensor]
"""Buffers by role and width."""


@dataclass(frozen=True)
class CpuWeight:
    """Matrices on one input, each where it lies in the file."""

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


@dataclass
class Rows:
    """Activations of a step being compiled: their buffer, and the stage that writes it.

    values: fp32 [B, K]. records: the same values quantized, if the stage quantizes them.
    """

    values: Tensor
    stage: Stage
    records: Tensor | None = None


@dataclass(frozen=True)
class RecordedAttention:
    """A recorded attention: its stage, whose number of tasks depends on the visible positions."""

    stage: Stage
    kv_heads: int
    window: int | None
    visible: Visible


@dataclass
class StepRecorder:
    """Records the operations of a decode step of `rows` tokens.

    `tokens` and `positions`, int64 [rows], are a run's inputs; `tables`, int64 [groups, rows, blocks], are the block
    tables of each cache group; `batch` holds all three. Operations of one kind share a buffer: a hidden state is valid
    until the second `linear_add` or `experts_add` after the one that made it, any other result until the next
    operation of its kind. Steps with the same `buffers` share them too, so only one of these may run at a time.
    """

    rows: int
    blocks: int
    buffers: Buffers
    groups: int = 1
    vocabulary: int = 0
    context: int = 0
    stages: list[Stage] = field(default_factory=list)
    attentions: list[RecordedAttention] = field(default_factory=list)
    # Rows of a step, where they are kept, whether only a sequence's last one is.
    kept: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # rows to be filled from kept ones
    _visible: dict[tuple[int, int | None, int], Visible] = field(default_factory=dict)
    _cleared: set[int] = field(default_factory=set)
    _row_stage: Stage | None = None  # the newest stage with one task per row
    # The last normalised hidden state: input, norm, result. Router and experts read the same.
    _latest: tuple[Rows, Norm, Rows] | None = None

    def __post_init__(self) -> None:
        self.tokens = torch.zeros(self.rows, dtype=torch.int64)
        self.positions = torch.zeros(self.rows, dtype=torch.int64)
        # The cache rows for the tokens' keys and values, per cache group.
        self.slots = torch.zeros(self.groups, self.rows, dtype=torch.int64)
        self.tables = torch.zeros(self.groups, self.rows, self.blocks, dtype=torch.int64)
        self.batch = ForwardBatch("decode", self.tokens, self.positions, self.tables)

    def embed(self, weight: CpuWeight, ids: Tensor, scale: float) -> Rows:
        assert ids is self.tokens
        (part,) = weight.parts
        self.vocabulary = part.rows
        out = self._fp32("hidden 0", part.cols)
        return Rows(out, self._stage([embed_launch(part, ids, out, scale)]))

    def norm_linear(self, x: Rows, norm: Norm | None, weight: CpuWeight, bias: Tensor | None) -> Rows:
        source = self._normed(x, norm)
        y = self._fp32("linear", weight.rows)
        if _share_memory(x.values, y):
            y = self._fp32("second linear", weight.rows)
        return Rows(y, self._matvecs(source, weight, y, bias))

    def columns(self, x: Rows, first: int, last: int) -> Rows:
        return Rows(x.values[:, first:last], x.stage)

    def norm_glu(self, x: Rows, norm: Norm | None, gate_up: CpuWeight, activation: Gating) -> Rows:
        source = self._normed(x, norm)
        gate, up = gate_up.parts
        between, out = self._fp32("gate_up", 2 * gate.rows), self._fp32("gated", gate.rows)
        records = None if gate.rows % 32 else self._records("gated", gate.rows)
        # Whole groups of 32, as a task quantizes its own outputs; half the usual rows, as it computes gate and up.
        step = max(32, min(task_rows(gate) // 2, _fair_rows(gate.rows)) // 32 * 32)
        stage = self._stage(
            [
                matvec_launch(self._input(source, gate), gate, between, 0, step=step),
                matvec_launch(self._input(source, up), up, between, gate.rows, step=step),
                glu_launch(between, out, records, step, activation),
            ]
        )
        return Rows(out, stage, records)

    def norm_pointwise(self, x: Rows, norm: Norm | None, up: CpuWeight, activation: Pointwise) -> Rows:
        source, (part,) = self._normed(x, norm), up.parts
        out = self._fp32("gated", part.rows)
        records = None if part.rows % 32 else self._records("gated", part.rows)
        step = max(32, min(task_rows(part), _fair_rows(part.rows)) // 32 * 32)
        stage = self._stage(
            [
                matvec_launch(self._input(source, part), part, out, 0, step=step),
                glu_launch(out, out, records, step, activation),
            ]
        )
        return Rows(out, stage, records)

    def linear_add(
        self,
        x: Rows,
        weight: CpuWeight,
        residual: Rows,
        post_norm: RMSNorm | None,
        bias: Tensor | None,
        row_scale: Rows | Tensor | None,
        branch: Branch | None,
    ) -> Rows:
        y = self._hidden(weight.rows, residual)
        scales = row_scale.values if isinstance(row_scale, Rows) else row_scale
        if post_norm is None:
            return Rows(y, self._matvecs(x, weight, y, bias, scales, residual.values))
        product = self._fp32("product", weight.rows)
        stage = self._matvecs(x, weight, product, bias, scales)
        if branch is not None:
            stage = self._add_branch(stage, product, branch)
        stage = self._after(stage, rms_norm_launch(product, post_norm.weight, post_norm.eps, y))
        return Rows(y, self._after(stage, _add_rows(y, residual.values, post_norm.residual_scale)))

    def _add_branch(self, stage: Stage, product: Tensor, branch: Branch) -> Stage:
        """product = branch.first_norm(product) + branch.norm(branch.rows), after `stage`."""
        own, norm = branch.first_norm, branch.norm
        other = self._fp32("normed branch", product.shape[1])
        stage = self._after(stage, rms_norm_launch(product, own.weight, own.eps, product))
        stage = self._after(stage, rms_norm_launch(branch.rows.values, norm.weight, norm.eps, other))
        return self._after(stage, _add_rows(product, other))

    def route(self, x: Rows, norm: RMSNorm, router: Router, experts: Tensor | None) -> Routing:
        source, used = self._normed(x, norm), router.kind.used
        logits = self._fp32("router logits", logits_width(router))
        shared = None if router.shared_gate is None else self._fp32("shared weight", 1)[:, 0]
        chosen = self._buffer("experts", used, torch.int32)
        routing = Routing(chosen, self._fp32("expert weights", used), shared)
        stage = self._stage(*([launch] for launch in logits_launches(source.values, router, logits)))
        self._after(stage, router_launch(logits, router, routing, experts))
        return routing

    def weighed(self, x: Rows, norm: RMSNorm, weights: Tensor) -> Rows:
        width = x.values.shape[1]
        out = self._fp32("weighed", width)
        stage = self._after(self.stages[-1], norm_launch(x.values, norm, out))
        return Rows(out, self._after(stage, scale_launch(out, weights, 0, width, width)))

    def experts_glu(
        self, x: Rows, norm: RMSNorm | None, routing: Routing, gate_up: CpuExperts, activation: Activation
    ) -> ExpertRows:
        source, used, parts = self._normed(x, norm), routing.experts.shape[1], gate_up.parts
        order, places = (self._buffer(role, used, torch.int64) for role in ("slot order", "slot places"))
        groups = Groups(order, places, self._buffer("expert groups", HEAD + GROUP * used, torch.int64))
        self._after(self.stages[-1], groups.launch(routing.experts, len(parts[0].matrices)))
        inputs = [self._input(source, part.first) for part in parts]
        if self.rows > 1:
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
        self, gated: ExpertRows, routing: Routing, down: CpuExperts, residual: Rows | None
    ) -> Rows:
        w, groups = down.parts[0].first, gated.groups
        if w.cols != gated.values.shape[1]:
            raise ValueError(f"{w.name} has width {w.cols}; the activations have {gated.values.shape[1]}")
        y = self._fp32("branch", w.rows) if residual is None else self._hidden(w.rows, residual)
        added = self._zeros(w.rows) if residual is None else residual.values
        source = gated.records if w.format.is_quantized else gated.values
        assert source is not None
        products = self._by_place("experts' products", w.rows, groups)
        product, *sums = down_launches(down, groups, source, products, routing.weights, added, y)
        stage = self._stage([product])
        for launch in sums:
            stage = self._after(stage, launch)
        return Rows(y, stage)

    def _spread(self, inputs: Sequence[Tensor], groups: Groups) -> list[Tensor]:
        """Copies the sources to their places, each distinct one once; returns the kernels' inputs."""
        spread: dict[int, Tensor] = {}
        for rows in inputs:
            if rows.data_ptr() not in spread:
                out = self._by_place("experts' input", rows.shape[1], groups, rows.dtype)
                self._after(self.stages[-1], spread_launch(rows, groups, out))
                spread[rows.data_ptr()] = out
        return [spread[rows.data_ptr()] for rows in inputs]

    def _by_place(self, role: str, width: int, groups: Groups, dtype: torch.dtype = torch.float32) -> Tensor:
        """A buffer [slots, width]."""
        return self._buffer(f"{role} {dtype}", groups.used * width, dtype).view(groups.slots, width)

    def attention(self, qkv: Rows, spec: AttentionSpec, layer: KVLayer, batch: ForwardBatch) -> Rows:
        assert batch is self.batch
        context = min(spec.cos.shape[0], self.blocks * BLOCK_SIZE)
        self.context = min(context, self.context or context)
        width = spec.heads * spec.head_dim
        moved = self._fp32("queries", width) if spec.gated else None
        queries = qkv.values[:, :width] if moved is None else moved
        queries = queries.view(self.rows, spec.heads, spec.head_dim)
        check_caches(queries, layer)
        slots, stage = self.slots[spec.cache_group], qkv.stage
        for launch in rope_store_launches(qkv.values, spec, layer, self.positions, slots, moved):
            stage = self._after(stage, launch)
        visible = self._visible_of(context, spec.window, spec.cache_group)
        size = part_bytes(visible, spec.heads, spec.head_dim)
        parts = self._buffer("parts", size // self.rows, torch.uint8)
        out = self._fp32("attended", width)
        splits, combine = attention_launches(
            queries, layer, visible, spec.scale, out, parts, spec.sinks, spec.softcap
        )
        stage = self._stage([splits])
        self.attentions.append(RecordedAttention(stage, spec.kv_heads, spec.window, visible))
        stage = self._after(stage, combine)
        return Rows(
            out, self._after(stage, output_gate_launch(out, qkv.values, spec)) if spec.gated else stage
        )

    def latent_attention(self, q: Rows, latent: Rows, spec: LatentSpec, layer: KVLayer) -> Rows:
        context = min(spec.cos.shape[0], self.blocks * BLOCK_SIZE)
        self.context = min(context, self.context or context)
        heads = spec.heads
        queries = self._fp32("queries", heads * spec.row).view(self.rows, heads, spec.row)
        slots, held = self.slots[spec.cache_group], views_of_heads(layer, spec)
        store = latent_store_launch(q.values, latent.values, spec, layer, self.positions, slots, queries)
        self._stage([store])
        plain = q.values.view(self.rows, heads, spec.query)[..., : spec.plain]
        self._of_heads("absorbed", plain, spec.absorb, queries[..., : spec.rank])
        check_caches(queries, held)
        visible = self._visible_of(context, None, spec.cache_group)
        size = part_bytes(visible, heads, spec.rank)
        parts = self._buffer("parts", size // self.rows, torch.uint8)
        sums = self._fp32("attended", heads * spec.rank).view(self.rows, heads, spec.rank)
        splits, combine = attention_launches(queries, held, visible, spec.scale, sums, parts)
        stage = self._stage([splits])
        self.attentions.append(RecordedAttention(stage, heads, None, visible))
        self._stage([combine])
        out = self._fp32("values", heads * spec.values)
        stage = self._of_heads("expanded", sums, spec.expand, out.view(self.rows, heads, spec.values))
        return Rows(out, stage)

    def _of_heads(self, role: str, x: Tensor, matrices: CpuExperts, out: Tensor) -> Stage:
        """The stages of `head_launches`."""
        heads, size = x.shape[1], record_bytes(matrices)
        records = self._buffer(f"{role} rounded", heads * size, torch.uint8) if size else None
        rounded = None if records is None else records.view(self.rows, heads, size)
        quantizes, products = head_launches(x, matrices, out, rounded)
        if quantizes:
            self._stage(*([launch] for launch in quantizes))
        return self._stage(*([launch] for launch in products))

    def short_conv(self, bcx: Rows, spec: ShortConvSpec, layer: SlotLayer) -> Rows:
        out = self._fp32("convolved", spec.channels)
        tables = self.tables[spec.cache_group]
        launch = short_conv_launch(bcx.values, spec, layer, self.positions, tables, out)
        if self.rows == 1:
            return Rows(out, self._after(bcx.stage, launch))
        return Rows(out, self._stage([launch]))  # a task is a few channels of all rows, never a row

    def gated_delta(self, x: Rows, spec: GatedDeltaSpec, layer: SlotLayer) -> Rows:
        out = self._fp32("gated delta", spec.value_heads * spec.head_dim)
        tables = self.tables[spec.cache_group]
        launches = gated_delta_launches(x.values, spec, layer, self.positions, tables, out)
        convolution, memory, output = launches
        self._stage([convolution])
        return Rows(out, self._after(self._stage([memory]), output))

    def mamba2(self, x: Rows, spec: Mamba2Spec, layer: SlotLayer) -> Rows:
        out = self._fp32("scanned", spec.inner)
        tables = self.tables[spec.cache_group]
        launches = mamba2_launches(x.values, spec, layer, self.positions, tables, out)
        convolution, scan, output = launches
        self._stage([convolution])
        return Rows(out, self._after(self._stage([scan]), output))

    def logits(self, x: Rows, norm: Norm, weight: CpuWeight, softcap: float) -> Tensor:
        y = self._fp32("logits", weight.rows)
        self._matvecs(self._normed(x, norm), weight, y, cap=softcap)
        return y

    def keep_hidden(self, x: Rows, norm: Norm, kept: Tensor, newest: bool) -> None:
        """The rows are copied to `kept` after the list of kernels (Step.run)."""
        out = self._fp32("kept", x.values.shape[1])
        self._after(self.stages[-1], norm_launch(x.values, norm, out))
        self.kept.append((out, kept, newest))

    def join_hidden(self, x: Rows, norm: Norm, kept: Tensor, kept_norm: Norm, weight: CpuWeight) -> Rows:
        """The rows before are copied from `kept` ahead of the list of kernels (Step.run)."""
        width = x.values.shape[1]
        both, before = self._fp32("joined", 2 * width), self._fp32("before", width)
        self.before.append((before, kept))
        stage = self._after(x.stage, norm_launch(x.values, norm, both[:, :width]))
        stage = self._after(stage, norm_launch(before, kept_norm, both[:, width:]))
        y = self._hidden(weight.rows, x)
        return Rows(y, self._matvecs(Rows(both, stage), weight, y))

    def _visible_of(self, context: int, window: int | None, group: int) -> Visible:
        """The visible positions of layers alike, in memory that they share."""
        seen = (context, window, group)
        if seen not in self._visible:
            self._visible[seen] = Visible(min(context, window or context), self.tables[group])
        return self._visible[seen]

    def _stage(self, *parts: list[Launch]) -> Stage:
        self.stages.append(Stage(list(parts)))
        return self.stages[-1]

    def _matvecs(
        self,
        x: Rows,
        weight: CpuWeight,
        y: Tensor,
        bias: Tensor | None = None,
        row_scale: Tensor | None = None,
        residual: Tensor | None = None,
        cap: float = 0.0,
    ) -> Stage:
        """The stage of row_scale * (products + bias) + residual, soft-capped by `cap` if that is not 0."""
        parts, column = [], 0
        fair = _fair_rows(weight.rows)
        for w in weight.parts:
            step = min(task_rows(w), fair)
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
        return self._stage(*parts)

    def _normed(self, x: Rows, norm: Norm | None) -> Rows:
        if norm is None:
            return Rows(x.values, x.stage)
        if self._latest is not None and self._latest[0] is x and self._latest[1] is norm:
            return self._latest[2]
        out = self._fp32("normed", x.values.shape[1])
        # After the newest stage: what was normalised before may have been overwritten, and is made again.
        stage = self._after(self.stages[-1], norm_launch(x.values, norm, out))
        self._latest = x, norm, Rows(out, stage)
        return self._latest[2]

    def _input(self, x: Rows, w: QuantTensor) -> Tensor:
        """A matvec's input: x itself, or x quantized, once, after the stage that writes it."""
        if w.cols != x.values.shape[1]:
            raise ValueError(f"{w.name} has width {w.cols}; the activations have {x.values.shape[1]}")
        if not w.format.is_quantized:
            return x.values
        if x.records is None:
            if self._latest is not None and self._latest[2] is not x:
                self._latest = None  # its quantized rows are overwritten
            x.records = self._records("input", w.cols)
            x.stage = self._after(x.stage, quantize_launch(x.values, x.records))
        return x.records

    def _after(self, stage: Stage, launch: Launch) -> Stage:
        """Adds a kernel that needs all of a stage's results; returns the stage that runs it.

        With one row, the thread that finishes the stage runs it. With several, it gets a stage of its own, shared by
        consecutive kernels with one task per row.
        """
        if self.rows == 1:
            stage.finals.append(launch)
            return stage
        if launch.tasks == self.rows and self.stages[-1] is self._row_stage:
            self._row_stage.parts[0].append(launch)
            return self._row_stage
        stage = self._stage([launch])
        if launch.tasks == self.rows:
            self._row_stage = stage
        return stage

    def _hidden(self, width: int, residual: Rows) -> Tensor:
        """A buffer for a hidden state other than the residual's."""
        y = self._fp32("hidden 0", width)
        return self._fp32("hidden 1", width) if y.data_ptr() == residual.values.data_ptr() else y

    def _zeros(self, width: int) -> Tensor:
        """fp32 zeros [rows, width], which nothing writes."""
        if self._buffer("zeros", width, torch.float32).data_ptr() not in self._cleared:
            self._cleared.add(self.buffers["zeros", width].zero_().data_ptr())
        return self._buffer("zeros", width, torch.float32)

    def _fp32(self, role: str, width: int) -> Tensor:
        return self._buffer(role, width, torch.float32)

    def _records(self, role: str, width: int) -> Tensor:
        return self._buffer(f"{role} rounded", quantized_row_bytes(width), torch.uint8)

    def _buffer(self, role: str, width: int, dtype: torch.dtype) -> Tensor:
        """A buffer [rows, width], allocated for the next power of two of rows."""
        held = self.buffers.get((role, width))
        if held is None or held.shape[0] < self.rows:
            room = 1 << (self.rows - 1).bit_length()
            held = self.buffers[role, width] = torch.empty(room, width, dtype=dtype)
        return held[: self.rows]


def _add_rows(y: Tensor, addend: Tensor, scale: float = 1.0) -> Launch:
    """y += scale * addend, both fp32 [rows, width], contiguous: as one long row, so that a task is a row."""
    flat = y.view(1, -1)
    return add_launch(flat, addend.view(1, -1), 0, flat.shape[1], y.shape[1], scale)


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _fair_rows(rows: int) -> int:
    """Rows per task, an even number, for _SHARES tasks per thread."""
    return -(-rows // (2 * _SHARES * get_threads())) * 2
