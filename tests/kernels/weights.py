"""Random weights as stored, and the error measure, for the kernel tests."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS, put_split_half
from quengine.kernels.quant_tensor import QuantTensor


def random_weight(name: str, rows: int, blocks: int, seed: int = 0) -> QuantTensor:
    """Random codes and sub-scales; fp16 scales as a real model has them, some negative, some zero."""
    fmt, generator = FORMATS[name], torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, blocks, fmt.nbytes), dtype=torch.uint8, generator=generator)
    for field in ("d", "min", "dmin", "codes"):
        start, stop = fmt.layout.get(field, (0, 0))
        values = torch.randn(rows, blocks, generator=generator) * 0.02
        values[torch.rand(rows, blocks, generator=generator) < 0.05] = 0.0
        if name == "MXFP4" and field == "d":
            data[..., 0] = torch.randint(115, 125, (rows, blocks), dtype=torch.uint8, generator=generator)
        elif name.startswith("NVFP4") and field == "d":
            data[..., start:stop] = torch.randint(0, 64, (rows, blocks, stop - start), generator=generator)
            put_top(data, fmt.layout, values)
        elif name == "IQ1_M" and field == "d":
            put_split_half(data, values)
        elif stop - start == 2:
            dtype = torch.bfloat16 if name == "BF16" else torch.float16
            data[..., start:stop] = values.to(dtype).unsqueeze(-1).view(torch.uint8)
        elif stop - start == 4 and name == "F32":
            data[...] = values.unsqueeze(-1).view(torch.uint8)
    return QuantTensor(f"random {name}", fmt, (rows, blocks * fmt.block), data.view(rows, -1))


def put_top(blocks: Tensor, layout: Mapping[str, tuple[int, int]], top: Tensor) -> None:
    """Writes the tensor's scale, fp32 [R, B], where blocks [R, B, nbytes] have it."""
    start, stop = layout.get("top", (0, 0))
    if stop:
        blocks[..., start:stop] = top.float().unsqueeze(-1).view(torch.uint8)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal fp32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nmse(value: Tensor, reference: Tensor) -> float:
    """Squared error over squared reference."""
    reference = reference.double()
    return float((value.double() - reference).square().sum() / reference.square().sum())
