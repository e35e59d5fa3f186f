"""The reference backend with adapters: float64."""

import torch
from torch import Tensor

from quengine.kernels.attention import softcap
from quengine.kernels.backend import Branch
from quengine.kernels.embedded_rows import EmbeddedRows, place_embeddings
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Gating, glu
from quengine.kernels.layer_norm import Norm, normed
from quengine.kernels.lora.adapted import Adapted
from quengine.kernels.lora.low_rank import Changes, add_changes, add_row_changes
from quengine.kernels.pointwise import Pointwise, pointwise
from quengine.kernels.reference import ReferenceBackend, ReferenceWeight
from quengine.kernels.rms_norm import RMSNorm


class AdaptedReference(Adapted, ReferenceBackend):
    """See kernels/lora/adapted.py."""

    def placed(self, changes: Changes) -> Changes:
        return changes.to(torch.float64)

    def changed_rows(
        self, batch: ForwardBatch, x: Tensor, changes: Changes, scales: Tensor, factor: float
    ) -> Tensor:
        return add_row_changes(x, batch.token_ids, changes, scales, factor)

    def placed_rows(self, x: Tensor, given: EmbeddedRows | None) -> Tensor:
        return place_embeddings(x, given)

    def normed_rows(self, _batch: ForwardBatch, x: Tensor, norm: Norm | None) -> Tensor:
        return normed(x, norm)

    def changed_product(
        self,
        _batch: ForwardBatch,
        x: Tensor,
        weight: ReferenceWeight,
        bias: Tensor | None,
        changes: Changes,
        scales: Tensor,
    ) -> Tensor:
        y = self._matmul(x, weight)
        return add_changes(y if bias is None else y + bias, x, changes, scales)

    def changed_sum(
        self,
        batch: ForwardBatch,
        x: Tensor,
        weight: ReferenceWeight,
        residual: Tensor,
        next_norm: Norm | None,
        bias: Tensor | None,
        changes: Changes,
        scales: Tensor,
    ) -> Tensor:
        changed = add_changes(residual, x, changes, scales)
        return ReferenceBackend.linear_add(self, batch, x, weight, changed, next_norm, None, bias)

    def glu_of(self, _batch: ForwardBatch, y: Tensor, activation: Gating) -> Tensor:
        return glu(y, activation)

    def pointwise_of(self, _batch: ForwardBatch, y: Tensor, activation: Pointwise) -> Tensor:
        return pointwise(y, activation)

    def added(
        self,
        _batch: ForwardBatch,
        y: Tensor,
        residual: Tensor,
        _next_norm: Norm | None,
        post_norm: RMSNorm | None,
        row_scale: Tensor | None,
        branch: Branch | None,
    ) -> Tensor:
        return self._added(y, residual, post_norm, row_scale, branch)

    def capped(self, _batch: ForwardBatch, y: Tensor, cap: float) -> Tensor:
        return softcap(y, cap)
