"""The CUDA backend with LoRA adapters."""

from dataclasses import replace

from torch import Tensor

from quengine.kernels.backend import Branch
from quengine.kernels.cuda.backend import CudaBackend, Residual, Rows, begun_norm, stream_of
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, ScaledProduct
from quengine.kernels.cuda.gemm.matmul import paired_matmul
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.gemv.row_change import takes_change
from quengine.kernels.cuda.glu import glu_rows
from quengine.kernels.cuda.layer_inputs import input_glu_quantize
from quengine.kernels.cuda.lora.low_rank import CudaChanges, from_rank, to_rank
from quengine.kernels.cuda.pointwise import pointwise, pointwise_quantize
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.softcap import softcap_logits
from quengine.kernels.cuda.weights.packed import PackedWeight
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Gating
from quengine.kernels.layer_norm import Norm
from quengine.kernels.lora.adapted import Adapted
from quengine.kernels.lora.low_rank import Changes
from quengine.kernels.pointwise import Pointwise
from quengine.kernels.rms_norm import RMSNorm


class AdaptedCuda(Adapted, CudaBackend):
    """See kernels/lora/adapted.py."""

    def placed(self, changes: Changes) -> CudaChanges:
        return CudaChanges.of(changes, self.device)

    def with_change(self, weight: PackedWeight, changes: Changes, scales: Tensor) -> PackedWeight | None:
        assert isinstance(changes, CudaChanges)
        if not self._takes_q_dot(scales.shape[1]) or not takes_change(weight):
            return None
        return replace(weight, change=changes.of_row(scales))

    def normed_rows(
        self, _batch: ForwardBatch, x: Residual | Rows | ScaledProduct, norm: Norm | None
    ) -> Rows:
        x = x.finish() if isinstance(x, ScaledProduct) else x
        if isinstance(x, Tensor | RmsNormed):
            return self._normed(x, norm)
        assert norm is None, "norms read the residual stream, or a product"
        return x

    def plain_product(
        self, batch: ForwardBatch, x: Rows, weight: PackedWeight, bias: Tensor | None
    ) -> Tensor:
        if isinstance(x, QuantizedActivations):
            return self._matmul(batch, x, weight, None if bias is None else bias.view(1, -1))
        rows = x.rows if isinstance(x, Fp16Operand) else len(x)
        if weight.paired and self._room().layout(rows) is OperandLayout.ROW_MAJOR:
            assert bias is None, "gates have no biases"
            return paired_matmul(x, weight, self._room(), self.pdl)
        return self._matmul(batch, x, weight, bias)

    def shrunk(self, _batch: ForwardBatch, x: Rows, changes: Changes, scales: Tensor) -> Tensor:
        assert isinstance(changes, CudaChanges)
        return to_rank(x, changes, scales, self.batch_invariant, self.pdl)

    def add_changes(
        self, _batch: ForwardBatch, y: Tensor, shrunk: Tensor, changes: Changes, scales: Tensor
    ) -> Tensor:
        assert isinstance(changes, CudaChanges)
        return from_rank(y, shrunk, changes, scales, self.pdl)

    def stream(self, residual: Residual) -> Tensor:
        return stream_of(residual)

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
