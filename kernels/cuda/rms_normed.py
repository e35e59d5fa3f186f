"""The residual stream between two layers on CUDA, together with its normalised form for the next."""

from dataclasses import dataclass

from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemv.activations import QuantizedActivations


@dataclass(frozen=True)
class RmsNormed:
    """hidden: rows of the residual stream, fp32 [T, D]. rms_normed: the same after the next RMSNorm,
    quantized for q-dot with the norm's last step pending, or as an fp16 operand.
    """

    hidden: Tensor
    rms_normed: QuantizedActivations | Fp16Operand
