"""The decode step of one token as a single list of kernels, written down once and run for every token.

`StepRecorder` does the operations of kernels.backend.Backend by noting kernels over buffers that stay where they are;
`Step` runs what was noted, with a token and a position. A layer is five stages (stage.py), between which the threads
meet: QKV | attention | output projection | gate and up | down. Norms, rotation, rounding and residuals are parts of
them.

Does not know: what a model is, or who asks for the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cpu.add import add_launch
from quengine.kernels.cpu.attention import Visible, attention_launches, check_caches
from quengine.kernels.cpu.matmul import embed_launch, matvec_launch, round_launch, task_rows
from quengine.kernels.cpu.rms_norm import rms_norm_launch
from quengine.kernels.cpu.rope_store import rope_store_launch
from quengine.kernels.cpu.row_ir import record_bytes
from quengine.kernels.cpu.stage import Stage
from quengine.kernels.cpu.swiglu import swiglu_launch
from quengine.kernels.cpu.threads import Launch, Program
from quengine.kernels.quant_tensor import QuantTensor

# A stage has at least this many tasks, so that threads end close together where a matrix has few rows.
_SHARES = 32


class Parts(Protocol):
    """Matrices applied to one input, side by side."""

    @property
    def parts(self) -> tuple[QuantTensor, ...]: ...


@dataclass
class Row:
    """One row of activations while a step is recorded: where it will lie, and the stage that writes it.

    values: fp32 [1, K]. records: the same rounded, where the stage rounds it as it goes.
    """

    values: Tensor
    stage: Stage
    records: Tensor | None = None


@dataclass(frozen=True)
class _Attention:
    """A recorded attention: its stage, whose tasks follow from what is visible."""

    stage: Stage
    kv_heads: int
    window: int | None
    visible: Visible


@dataclass
class StepRecorder:
    """Notes the operations of one token. `token` and `position`, int64 [1], are what a step is run with.

    Buffers are shared by operations of the same kind: a hidden state lasts until the second `linear_add` after the
    one that made it, any other row until the next operation of its kind.
    """

    token: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    position: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    vocabulary: int = 0
    context: int = 0
    stages: list[Stage] = field(default_factory=list)
    attentions: list[_Attention] = field(default_factory=list)
    _buffers: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _visible: dict[tuple[int, int | None], Visible] = field(default_factory=dict)

    def embed(self, weight: Parts, ids: Tensor) -> Row:
        assert ids is self.token
        (part,) = weight.parts
        self.vocabulary = part.rows
        out = self._fp32("hidden 0", part.cols)
        return Row(out, self._stage([embed_launch(part, ids, out)]))

    def norm_linear(self, x: Row, norm: Tensor, eps: float, weight: Parts, bias: Tensor | None) -> Row:
        source = self._normed(x, norm, eps)
        y = self._fp32("linear", _rows(weight))
        return Row(y, self._matvecs(source, weight, y, bias))

    def norm_swiglu(self, x: Row, norm: Tensor, eps: float, gate_up: Parts) -> Row:
        source = self._normed(x, norm, eps)
        gate, up = gate_up.parts
        between, out = self._fp32("gate_up", 2 * gate.rows), self._fp32("gated", gate.rows)
        records = None if gate.rows % 32 else self._records("gated", gate.rows)
        # Whole groups of 32, as a task rounds what it makes; half the usual rows, as it makes two of each.
        step = max(32, task_rows(gate) // 2 // 32 * 32)
        stage = self._stage(
            [
                matvec_launch(self._input(source, gate), gate, between, 0, step=step),
                matvec_launch(self._input(source, up), up, between, gate.rows, step=step),
                swiglu_launch(between, out, records, step),
            ]
        )
        return Row(out, stage, records)

    def linear_add(self, x: Row, weight: Parts, residual: Row) -> Row:
        y = self._fp32("hidden 0", _rows(weight))
        if y is residual.values:
            y = self._fp32("hidden 1", _rows(weight))
        return Row(y, self._matvecs(x, weight, y, residual.values))

    def attention(self, qkv: Row, spec: AttentionSpec, layer: KVLayer, start: object) -> Row:
        assert start is self.position
        self.context = layer.k.shape[0]
        queries = qkv.values[:, : spec.heads * spec.head_dim].view(spec.heads, spec.head_dim)
        check_caches(queries, layer)
        qkv.stage.finals.append(rope_store_launch(qkv.values, spec, layer, self.position))
        visible = self._visible.get((self.context, spec.window))
        if visible is None:
            visible = Visible(min(self.context, spec.window or self.context))
            self._visible[self.context, spec.window] = visible
        out = self._fp32("mixed", spec.heads * spec.head_dim)
        stretches, join = attention_launches(queries, layer, visible, spec.scale, out)
        stage = self._stage([stretches])
        stage.finals.append(join)
        self.attentions.append(_Attention(stage, spec.kv_heads, spec.window, visible))
        return Row(out, stage)

    def logits(self, x: Row, norm: Tensor, eps: float, weight: Parts) -> Tensor:
        y = torch.empty(1, _rows(weight))
        self._matvecs(self._normed(x, norm, eps), weight, y, None)
        return y

    def finish(self, logits: Tensor) -> Step:
        """What was recorded, ready to run; `logits` is what `logits` gave."""
        return Step(self, logits)

    def _stage(self, *parts: list[Launch]) -> Stage:
        self.stages.append(Stage(list(parts)))
        return self.stages[-1]

    def _matvecs(self, x: Row, weight: Parts, y: Tensor, addend: Tensor | None) -> Stage:
        parts, column = [], 0
        fair = -(-_rows(weight) // _SHARES)
        for w in weight.parts:
            step = min(task_rows(w), fair)
            part = [matvec_launch(self._input(x, w), w, y, column, step=step)]
            if addend is not None:
                part.append(add_launch(y, addend, column, w.rows, step))
            parts.append(part)
            column += w.rows
        return self._stage(*parts)

    def _normed(self, x: Row, norm: Tensor, eps: float) -> Row:
        out = self._fp32("normed", x.values.shape[1])
        x.stage.finals.append(rms_norm_launch(x.values, norm, eps, out))
        return Row(out, x.stage)

    def _input(self, x: Row, w: QuantTensor) -> Tensor:
        """What a matvec with w reads: x itself, or x rounded, once, at the end of the stage that makes it."""
        if w.cols != x.values.shape[1]:
            raise ValueError(f"{w.name} has width {w.cols}; the activations have {x.values.shape[1]}")
        if not w.format.is_quantized:
            return x.values
        if x.records is None:
            x.records = self._records("input", w.cols)
            x.stage.finals.append(round_launch(x.values, x.records))
        return x.records

    def _fp32(self, role: str, width: int) -> Tensor:
        return self._buffer(role, width, lambda: torch.zeros(1, width))

    def _records(self, role: str, width: int) -> Tensor:
        return self._buffer(
            f"{role} rounded", width, lambda: torch.zeros(1, record_bytes(width), dtype=torch.uint8)
        )

    def _buffer(self, role: str, width: int, make: Callable[[], Tensor]) -> Tensor:
        if (role, width) not in self._buffers:
            self._buffers[role, width] = make()
        return self._buffers[role, width]


def _rows(weight: Parts) -> int:
    return sum(part.rows for part in weight.parts)


class Step:
    """A recorded decode step."""

    def __init__(self, recorder: StepRecorder, logits: Tensor) -> None:
        self._vocabulary, self._context = recorder.vocabulary, recorder.context
        self._token, self._position = recorder.token.numpy(), recorder.position.numpy()
        self._logits = logits
        numbers: dict[int, int] = {}
        launches: list[Launch] = []
        for stage in recorder.stages:
            numbers[id(stage)] = len(launches)
            launches += stage.launches()
        self._program = Program(launches)
        # Attentions that see the same positions, each with the number of its launch.
        self._alike: dict[Visible, list[tuple[_Attention, int]]] = {}
        for attention in recorder.attentions:
            self._alike.setdefault(attention.visible, []).append((attention, numbers[id(attention.stage)]))

    def run(self, token: int, position: int) -> Tensor:
        """Logits [1, V] fp32 after `token` at `position`; its keys and values are written to the caches.

        Raises ValueError for a token outside the embedding or a position outside the cache.
        """
        if not 0 <= token < self._vocabulary:
            raise ValueError(f"the embedding has rows 0 to {self._vocabulary - 1}; asked for {token}")
        if not 0 <= position < self._context:
            raise ValueError(f"position {position} is not in a cache of {self._context}")
        self._token[0], self._position[0] = token, position
        self._see(position + 1)
        self._program.run()
        return self._logits.clone()

    def _see(self, length: int) -> None:
        for visible, attentions in self._alike.items():
            window, stretches = attentions[0][0].window, visible.stretches
            visible.set(0 if window is None else max(0, length - window), length)
            if visible.stretches == stretches:
                continue
            for attention, number in attentions:
                tasks = attention.kv_heads * visible.stretches
                attention.stage.set_tasks(tasks)
                self._program.set_tasks(number, tasks)
