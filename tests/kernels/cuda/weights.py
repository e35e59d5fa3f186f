"""Small random weights whose values are of ordinary size, for the tests of the CUDA matmul kernels."""

import torch

from quengine.kernels.block_formats import FORMATS, put_split_half
from quengine.kernels.quant_tensor import QuantTensor
from tests.kernels.weights import put_top


def ordinary_weight(name: str, rows: int, cols: int, seed: int = 0) -> QuantTensor:
    """Random codes and sub-scales; super-scales (fp16, or E8M0 for MXFP4) between 0.001 and 0.1, mixed signs."""
    generator = torch.Generator().manual_seed(seed)
    fmt = FORMATS[name]
    if not fmt.is_quantized:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        data = torch.randn(rows, cols, generator=generator).to(dtype).view(torch.uint8)
        return QuantTensor(name, fmt, (rows, cols), data)
    data = torch.randint(
        0, 256, (rows, cols // fmt.block, fmt.nbytes), dtype=torch.uint8, generator=generator
    )
    for field in ("d", "min", "dmin"):
        start, stop = fmt.layout.get(field, (0, 0))
        if stop - start == 2:
            scale = torch.empty(rows, cols // fmt.block, 1).uniform_(0.001, 0.1, generator=generator)
            sign = torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1
            data[..., start:stop] = (scale * sign).half().view(torch.uint8)
        elif name.startswith("NVFP4") and field == "d":
            data[..., start:stop] = torch.randint(16, 64, data[..., start:stop].shape, generator=generator)
            put_top(data, fmt.layout, torch.empty(data.shape[:2]).uniform_(0.01, 0.2, generator=generator))
        elif stop - start == 1:
            data[..., start:stop] = torch.randint(
                118, 126, data[..., start:stop].shape, generator=generator
            ).to(torch.uint8)
    if name == "IQ1_M":
        put_split_half(data, torch.empty(data.shape[:2]).uniform_(0.001, 0.1, generator=generator))
    return QuantTensor(name, fmt, (rows, cols), data.view(rows, -1))


def ordinary_activations(rows: int, cols: int, seed: int = 1) -> torch.Tensor:
    """Normal values with a few large ones, as a transformer's rows have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    return x * torch.where(torch.rand(rows, cols, generator=generator) < 0.02, 30.0, 1.0)


def nmse(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Squared error over squared size."""
    exact = exact.double().cpu()
    return float((ours.double().cpu() - exact).square().sum() / exact.square().sum())
