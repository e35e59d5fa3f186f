"""The CUDA backend with LoRA adapters."""

from dataclasses import replace

from torch import Tensor

from quengine.kernels.backend import Branch
from quengine.kernels.cuda.backend import CudaBackend, Residual, Rows, begun_norm, exact, stream_of
from quengine.kernels.cuda.embedded_rows import place_embeddings
from quengine.kernels.cuda.gemm.fp16_operand import (
    OPERAND_COLUMNS,
    Fp16Operand,
    OperandLayout,
    ScaledProduct,
)
from quengine.kernels.cuda.gemm.matmul import lets_follow, matmul, operand_of, paired_matmul
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.row_change import takes_change
from quengine.kernels.cuda.glu import glu_rows
from quengine.kernels.cuda.layer_inputs import input_glu_quantize
from quengine.kernels.cuda.lora.embedding import add_row_changes
from quengine.kernels.cuda.lora.from_rank import add_from_rank, glu_from_rank, norm_from_rank
from quengine.kernels.cuda.lora.low_rank import CudaChanges, LowRankScratch, add_low_rank
from quengine.kernels.cuda.lora.rank_matmul import rank_matmul, takes_ranks
from quengine.kernels.cuda.pointwise import pointwise, pointwise_quantize
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.softcap import softcap_logits
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight
from quengine.kernels.embedded_rows import EmbeddedRows
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Gating
from quengine.kernels.layer_norm import Norm
from quengine.kernels.lora.adapted import Adapted
from quengine.kernels.lora.low_rank import Changes
from quengine.kernels.pointwise import Pointwise
from quengine.kernels.rms_norm import RMSNorm


class AdaptedCuda(Adapted, CudaBackend):
    """See kernels/lora/adapted.py."""

    _low_rank_scratch: LowRankScratch | None = None

    def placed(self, changes: Changes) -> CudaChanges:
        if self._low_rank_scratch is None:  # at load: a captured step would clear its counters at every run
            self._low_rank_scratch = LowRankScratch(self.device)
        return CudaChanges.of(changes, self.device)

    def with_change(self, weight: PackedWeight, changes: Changes, scales: Tensor) -> PackedWeight | None:
        assert isinstance(changes, CudaChanges)
        if not self._takes_q_dot(scales.shape[1]) or not takes_change(weight):
            return None
        return replace(weight, change=changes.of_row(scales))

    def changed_rows(
        self, batch: ForwardBatch, x: Tensor, changes: Changes, scales: Tensor, factor: float
    ) -> Tensor:
        return add_row_changes(x, batch.token_ids, changes, scales, factor, self.pdl)

    def placed_rows(self, x: Tensor, given: EmbeddedRows | None) -> Tensor:
        return place_embeddings(x, given, self.pdl)

    def normed_rows(
        self, _batch: ForwardBatch, x: Residual | Rows | ScaledProduct, norm: Norm | None
    ) -> Rows:
        x = x.finish() if isinstance(x, ScaledProduct) else x
        if isinstance(x, Tensor | RmsNormed):
            return self._normed(x, norm)
        assert norm is None, "norms read the residual stream, or a product"
        return x

    def changed_product(
        self,
        batch: ForwardBatch,
        x: Rows,
        weight: PackedWeight,
        bias: Tensor | None,
        changes: Changes,
        scales: Tensor,
    ) -> Tensor:
        return self._changed(batch, x, weight, bias, None, changes, scales)

    def changed_glu(
        self,
        batch: ForwardBatch,
        x: Rows,
        weight: PackedWeight,
        activation: Gating,
        changes: Changes,
        scales: Tensor,
    ) -> Rows:
        if self._takes_q_dot(scales.shape[1]):
            product = self.changed_product(batch, x, weight, None, changes, scales)
            return self.glu_of(batch, product, activation)
        operand, width, part = self._of_ranks(x, weight, changes), weight.rows // 2, weight.parts[0]
        if operand is None or not weight.paired or width % OPERAND_COLUMNS:
            rows = x if operand is None else operand
            return self._changed(batch, rows, weight, None, activation, changes, scales)
        assert isinstance(changes, CudaChanges) and isinstance(part, PackedPart)
        y, sums = self._rank_matmul(batch, operand, weight, None, changes, scales)
        out = self._room().glu_operand(operand.rows, width)
        return glu_from_rank(y, sums, changes, scales, activation, operand, part, out, self.pdl)

    def changed_sum(
        self,
        batch: ForwardBatch,
        x: Rows,
        weight: PackedWeight,
        residual: Residual,
        next_norm: Norm | None,
        bias: Tensor | None,
        changes: Changes,
        scales: Tensor,
    ) -> Residual:
        stream, norm = stream_of(residual), begun_norm(next_norm)
        operand = self._of_ranks(x, weight, changes)
        if operand is not None and norm is not None and bias is None and not norm.experts:
            assert isinstance(changes, CudaChanges)
            y, sums = self._rank_matmul(batch, operand, weight, stream, changes, scales)
            out = self._room().fp16_operand(*y.shape)
            return RmsNormed(y, norm_from_rank(y, sums, changes, scales, norm, out, self.pdl))
        rows = x if operand is None else operand
        y = self._changed(batch, rows, weight, stream, None, changes, scales)
        return y if bias is None else y.add_(bias)

    def _changed(
        self,
        batch: ForwardBatch,
        x: Rows,
        weight: PackedWeight,
        addend: Tensor | None,
        activation: Gating | None,
        changes: Changes,
        scales: Tensor,
    ) -> Tensor:
        """The product plus a bias or residual and the changes, or the gated unit of that."""
        assert isinstance(changes, CudaChanges) and self._low_rank_scratch is not None
        operand = self._of_ranks(x, weight, changes) if activation is None else None
        if operand is not None:
            y, sums = self._rank_matmul(batch, operand, weight, addend, changes, scales)
            return add_from_rank(y, sums, changes, scales, self.pdl)
        x, early = self._rounded(x), False
        if isinstance(x, QuantizedActivations):
            y = matvec(
                x, weight, addend if addend is None or addend.ndim > 1 else addend.view(1, -1), pdl=self.pdl
            )
        else:
            x = operand_of(x, weight, self._room(), self.pdl)
            early = self.pdl and lets_follow(x, weight)
            y = self._matmul_changed(batch, x, weight, addend, early)
        return add_low_rank(
            y, x, changes, scales, self._low_rank_scratch, activation=activation,
            fixed_splits=self.batch_invariant, early=early, pdl=self.pdl,
        )  # fmt: skip

    def _of_ranks(self, x: Rows, weight: PackedWeight, changes: Changes) -> Fp16Operand | None:
        """The rows as the operand of a launch that also multiplies them by A; None: there is no such launch."""
        assert isinstance(changes, CudaChanges)
        rows = len(x) if isinstance(x, Tensor) else x.rows
        if isinstance(x, QuantizedActivations) or not takes_ranks(rows, weight, changes, self._room()):
            return None
        return None if self._takes_q_dot(rows) else operand_of(x, weight, self._room(), self.pdl)

    def _rank_matmul(
        self,
        batch: ForwardBatch,
        x: Fp16Operand,
        weight: PackedWeight,
        addend: Tensor | None,
        changes: CudaChanges,
        scales: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert self._low_rank_scratch is not None
        scratch, room = self._low_rank_scratch, self._room()
        return rank_matmul(x, weight, changes, scales, room, scratch, addend, self.pdl, exact(batch))

    def _matmul_changed(
        self, batch: ForwardBatch, x: Fp16Operand, weight: PackedWeight, addend: Tensor | None, early: bool
    ) -> Tensor:
        room = self._room()
        if weight.paired and x.layout is OperandLayout.ROW_MAJOR:
            assert addend is None, "gates have no biases"
            return paired_matmul(x, weight, room, self.pdl)
        return matmul(x, weight, room, addend, self.pdl, exact(batch), followed=early)

    def glu_of(self, _batch: ForwardBatch, y: Tensor, activation: Gating) -> Tensor | QuantizedActivations:
        if self._takes_q_dot(len(y)):
            return input_glu_quantize(y[:, : y.shape[1] // 2], y, 1, activation, self.pdl)
        return glu_rows(y, activation, self.pdl)

    def pointwise_of(
        self, _batch: ForwardBatch, y: Tensor, activation: Pointwise
    ) -> Tensor | QuantizedActivations:
        if self._takes_q_dot(len(y)):
            return pointwise_quantize(y, activation, self.pdl)
        return pointwise(y, activation, self.pdl)

    def added(
        self,
        _batch: ForwardBatch,
        y: Tensor,
        residual: Residual,
        next_norm: Norm | None,
        post_norm: RMSNorm | None,
        row_scale: Tensor | None,
        branch: Branch | None,
    ) -> Residual:
        stream, norm = stream_of(residual), begun_norm(next_norm)
        return self._add_product(y, stream, post_norm, norm, None, row_scale, branch)

    def capped(self, _batch: ForwardBatch, y: Tensor, cap: float) -> Tensor:
        return softcap_logits(y, cap, self.pdl)
