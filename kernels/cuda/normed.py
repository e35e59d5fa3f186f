"""The residual stream between two layers on CUDA, with the norm that reads it next. Does not know: who made it."""

from dataclasses import dataclass

from torch import Tensor

from quengine.kernels.cuda.gemm.half import HalfRows
from quengine.kernels.cuda.gemv.activations import RoundedActivations


@dataclass(frozen=True)
class NormedRows:
    """Rows of the residual stream, fp32 [T, D], and the same after the RMSNorm that reads them: rounded for the q-dot,
    with the norm's last step left to do, or as scaled fp16 for the matmul of a prompt."""

    hidden: Tensor
    normed: RoundedActivations | HalfRows
