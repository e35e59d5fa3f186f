"""One launch of each matvec of a Mistral-7B layer, to run under a profiler:

ncu --clock-control none --set basic -k "regex:_(matvec|swiglu)_kernel" python -m benchmarks.cuda.matvec_profile
"""

import torch

from benchmarks.cuda.cuda_timing import random_part
from quengine.kernels.cuda.gemv.activations import quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_glu import matvec_glu
from quengine.kernels.cuda.weights.packed import PackedWeight


def main() -> None:
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    narrow = quantize_activations(torch.randn(1, 4096, device="cuda"))
    wide = quantize_activations(torch.randn(1, 14336, device="cuda"))
    matvec_glu(narrow, PackedWeight((random_part("Q4_K", 28672, 4096),), paired=True), pdl=pdl)
    matvec(wide, PackedWeight((random_part("Q4_K", 4096, 14336),)), pdl=pdl)
    matvec(narrow, PackedWeight((random_part("Q4_K", 4096, 4096),)), pdl=pdl)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
