"""The operations of layers with alternating updates on the CPU: recorded in decode, torch's in prompts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quengine.kernels.altup_operations import AltUpOperations, AltUpSpec
from quengine.kernels.cpu.step_recorder import CpuWeight, recorded
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import Norm
from quengine.kernels.rms_norm import RMSNorm


class CpuAltUp(AltUpOperations):
    """See `AltUpOperations`."""

    def opened(self, batch: ForwardBatch, x: Tensor, project: CpuWeight) -> Tensor:
        if batch.phase == "prefill":
            return super().opened(batch, x, project)
        with recorded(batch, len(x)) as step:
            return step.altup_opened(x, project)

    def closed(self, batch: ForwardBatch, x: Tensor, unembed: Sequence[CpuWeight]) -> Tensor:
        if batch.phase == "prefill":
            return super().closed(batch, x, unembed)
        with recorded(batch, x.shape[1]) as step:
            return step.altup_closed(x, unembed)

    def predicted(self, batch: ForwardBatch, x: Tensor, spec: AltUpSpec) -> tuple[Tensor, Tensor]:
        if batch.phase == "prefill":
            return super().predicted(batch, x, spec)
        with recorded(batch, x.shape[1]) as step:
            return step.altup_predicted(x, spec)

    def beside(
        self, batch: ForwardBatch, x: Tensor, norm: Norm, left: CpuWeight, right: CpuWeight, post: RMSNorm
    ) -> Tensor:
        if batch.phase == "prefill":
            found: Tensor = super().beside(batch, x, norm, left, right, post)
            return found
        with recorded(batch, len(x)) as step:
            return step.altup_beside(x, norm, left, right, post)

    def joined(self, batch: ForwardBatch, y: Tensor, beside: Tensor) -> Tensor:
        if batch.phase == "prefill":
            return super().joined(batch, y, beside)
        with recorded(batch, len(y)) as step:
            return step.altup_joined(y, beside)

    def gated(
        self, batch: ForwardBatch, x: Tensor, norm: Norm | None, gate_up: CpuWeight, deviations: float
    ) -> Tensor:
        if batch.phase == "prefill":
            return super().gated(batch, x, norm, gate_up, deviations)
        with recorded(batch, len(x)) as step:
            return step.sparse_gated(x, norm, gate_up, deviations)

    def corrected(self, batch: ForwardBatch, x: Tensor, y: Tensor, spec: AltUpSpec) -> tuple[Tensor, Tensor]:
        if batch.phase == "prefill":
            return super().corrected(batch, x, y, spec)
        with recorded(batch, len(y)) as step:
            return step.altup_corrected(x, y, spec)

    def added(self, batch: ForwardBatch, x: Tensor, rows: Tensor) -> Tensor:
        if batch.phase == "prefill":
            return super().added(batch, x, rows)
        with recorded(batch, x.shape[1]) as step:
            return step.altup_added(x, rows)
