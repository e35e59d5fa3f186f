"""The residual stream between two layers on CUDA, together with the norm that reads it next."""

from dataclasses import dataclass

from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemv.activations import QuantizedActivations


@dataclass(frozen=True)
class RmsNormed:
    """hidden: rows of the residual stream, fp32 [T, D]. rms_normed: the same after the RMSNorm that reads them,
    quantized for the q-dot, with the norm's last step left to do, or as the fp16 operand of a matmul."""

    hidden: Tensor
    rms_normed: QuantizedActivations | Fp16Operand
