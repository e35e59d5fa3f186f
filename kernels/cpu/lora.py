"""The CPU backend with adapters: their matrices are plain floats, multiplied by the kernels of such weights.

A step reads the first matrices of only those adapters that its rows have, but the second matrices of all adapters. The
sums are then the same whichever adapters the step has, so a row has the bits that it has alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.backend import Branch
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.backend import CpuBackend, added_rows
from quengine.kernels.cpu.rows import place_rows
from quengine.kernels.cpu.step_recorder import CpuWeight, StepBatch, recorded
from quengine.kernels.embedded_rows import EmbeddedRows
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Gating, glu
from quengine.kernels.layer_norm import Norm
from quengine.kernels.lora.adapted import Adapted
from quengine.kernels.lora.low_rank import Changes, exact_dtype
from quengine.kernels.pointwise import Pointwise, pointwise
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm


class AdaptedCpu(Adapted, CpuBackend):
    """See kernels/lora/adapted.py."""

    _back: tuple[Changes, QuantTensor] | None = None
    """The token embedding's changes, and their A transposed."""

    def placed(self, changes: Changes) -> Changes:
        return changes.to(exact_dtype(changes))

    def changed_rows(
        self, batch: ForwardBatch, x: Tensor, changes: Changes, scales: Tensor, factor: float
    ) -> Tensor:
        if self._back is None or self._back[0] is not changes:
            self._back = changes, _matrix(changes.a.flatten(0, 2).T.contiguous())
        with recorded(batch, len(batch)) as step:
            return step.changed_rows(x, _matrix(changes.b.flatten(1)), self._back[1], scales, factor)

    def placed_rows(self, x: Tensor, given: EmbeddedRows | None) -> Tensor:
        return place_rows(x, given)

    def normed_rows(self, batch: ForwardBatch, x: Tensor, norm: Norm | None) -> Tensor:
        if batch.phase == "prefill":
            return cpu.normed(x, norm)
        with recorded(batch, len(x)) as step:
            return step.normed(x, norm)

    def changed_product(
        self,
        batch: ForwardBatch,
        x: Tensor,
        weight: CpuWeight,
        bias: Tensor | None,
        changes: Changes,
        scales: Tensor,
    ) -> Tensor:
        shrunk = self._shrunk(batch, x, changes, scales)  # before the product, which may write over x
        product = CpuBackend.norm_linear(self, batch, x, None, weight, bias)
        return self._add_changes(batch, product, shrunk, changes)

    def changed_sum(
        self,
        batch: ForwardBatch,
        x: Tensor,
        weight: CpuWeight,
        residual: Tensor,
        next_norm: Norm | None,
        bias: Tensor | None,
        changes: Changes,
        scales: Tensor,
    ) -> Tensor:
        changed = self._add_changes(batch, residual, self._shrunk(batch, x, changes, scales), changes)
        return CpuBackend.linear_add(self, batch, x, weight, changed, next_norm, None, bias)

    def _shrunk(self, batch: ForwardBatch, x: Tensor, changes: Changes, scales: Tensor) -> Tensor | None:
        """The scaled products of A with x, [T, P * M * R], zeros for adapters that no row has; None if none has any."""
        if not (used := _used(batch, scales)):
            return None
        matrices = [[_matrix(of_part[number]) for number in used] for of_part in changes.a]
        if batch.phase == "decode":
            with recorded(batch, len(x)) as step:
                return step.shrunk(x, matrices, used, scales)
        found = x.new_zeros(len(x), len(changes.parts), len(scales), changes.rank)
        for part, of_part in enumerate(matrices):
            for number, a in zip(used, of_part, strict=True):
                found[:, part, number] = cpu.prompt_linear(x, [a]) * scales[number, :, None]
        return found.view(len(x), -1)

    def _add_changes(self, batch: ForwardBatch, y: Tensor, shrunk: Tensor | None, changes: Changes) -> Tensor:
        if shrunk is None:
            return y
        parts = [_matrix(part.flatten(1)) for part in torch.split(changes.b, list(changes.parts))]
        if batch.phase == "decode":
            with recorded(batch, len(y)) as step:
                return step.add_changes(y, shrunk, parts)
        of_parts = shrunk.view(len(y), len(parts), -1).unbind(1)
        added = [cpu.prompt_linear(rows, [b]) for rows, b in zip(of_parts, parts, strict=True)]
        return cpu.add_rows(y, added[0] if len(added) == 1 else torch.cat(added, 1))

    def glu_of(self, batch: ForwardBatch, y: Tensor, activation: Gating) -> Tensor:
        if batch.phase == "prefill":
            return glu(y, activation) if activation == "gelu_erf" else cpu.glu(y, activation)
        with recorded(batch, len(y)) as step:
            return step.glu(y, activation)

    def pointwise_of(self, batch: ForwardBatch, y: Tensor, activation: Pointwise) -> Tensor:
        if batch.phase == "prefill":
            return pointwise(y, activation) if activation == "gelu" else cpu.glu(y, activation)
        with recorded(batch, len(y)) as step:
            return step.glu(y, activation)

    def added(
        self,
        batch: ForwardBatch,
        y: Tensor,
        residual: Tensor,
        _next_norm: Norm | None,
        post_norm: RMSNorm | None,
        row_scale: Tensor | None,
        branch: Branch | None,
    ) -> Tensor:
        if batch.phase == "prefill":
            y = y if row_scale is None else y.mul_(row_scale.view(-1, 1))
            return added_rows(y, residual, post_norm, branch)
        with recorded(batch, len(y)) as step:
            return step.added(y, residual, post_norm, row_scale, branch)

    def logits(self, batch: ForwardBatch, x: Tensor, norm: Norm, weight: Any, softcap: float = 0.0) -> Tensor:
        # A single last row takes the decode kernel.
        alone = batch.adapters is not None and len(x) == 1
        return super().logits(replace(batch, phase="decode") if alone else batch, x, norm, weight, softcap)

    def capped(self, batch: ForwardBatch, y: Tensor, cap: float) -> Tensor:
        if batch.phase == "prefill":
            return cpu.softcap(y, cap)
        with recorded(batch, len(y)) as step:
            return step.capped(y, cap)


def _used(batch: ForwardBatch, scales: Tensor) -> Sequence[int]:
    """The adapters that rows of the step have."""
    if isinstance(batch, StepBatch):
        return batch.used_adapters
    return [number for number, of_adapter in enumerate(scales) if bool(of_adapter.any())]


def _matrix(values: Tensor) -> QuantTensor:
    """A contiguous matrix of plain floats."""
    assert values.is_contiguous()
    name = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[values.dtype]
    return QuantTensor("adapter", FORMATS[name], tuple(values.shape), values.view(torch.uint8))
