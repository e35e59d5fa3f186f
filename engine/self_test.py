"""Checks a backend's matmul kernels on this machine: every quant format against the float64 definition.

Uses small random weights made here, so it needs no model. Knows the Backend protocol and the table of block
formats; not how a backend computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.backend import Backend, WeightT
from quengine.kernels.block_formats import FORMATS, BlockFormat, dequantize
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import rms_norm

ROWS, COLS = 40, 768
"""Of the test matrix: several blocks of every format wide, and no multiple of a kernel's tile high."""

EPS = 1e-5
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Phase:
    """One kind of matmul: how many tokens at once, and the largest error allowed.

    The error is the NMSE against float64: mean square of the difference over mean square of the result. Rounding
    the activations to 16 bits per 32 costs about 5e-10; 16-bit matrix units about 1e-6; an error of layout 1e-2
    and more.
    """

    name: str
    tokens: int
    limit: float


PHASES = (Phase("decode", 1, 1e-8), Phase("decode batch", 5, 1e-8), Phase("prefill", 160, 2e-5))


@dataclass(frozen=True)
class KernelCheck:
    """One format in one phase. `error` is NMSE; NaN where the kernel's result was not finite."""

    format: str
    phase: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


def check_kernels(backend: Backend[WeightT]) -> Iterator[KernelCheck]:
    """Runs every format in every phase on `backend`, one check at a time."""
    random = torch.Generator().manual_seed(20240)
    for fmt in FORMATS.values():
        weight = random_tensor(fmt, ROWS, COLS, random)
        for phase in PHASES:
            x = torch.randn(phase.tokens, COLS, generator=random)
            yield KernelCheck(fmt.name, phase.name, _error(backend, x, weight), phase.limit)


def random_tensor(fmt: BlockFormat, rows: int, cols: int, random: torch.Generator) -> QuantTensor:
    """Random codes and sub-scales under scales of ordinary size."""
    if not fmt.is_quantized:
        values = torch.randn(rows, cols, generator=random).to(_FLOATS[fmt.name])
        return QuantTensor(fmt.name, fmt, (rows, cols), values.view(torch.uint8))
    blocks = torch.randint(0, 256, (rows, cols // fmt.block, fmt.nbytes), generator=random, dtype=torch.uint8)
    scale = (torch.rand(*blocks.shape[:2], 1, generator=random) + 0.5) * 0.01
    # The minimum that Q4_1 and Q5_1 add puts the weights around zero, as a model's are.
    sizes = {"d": scale, "dmin": scale, "min": scale * -((2**fmt.bits - 1) / 2)}
    for name, size in sizes.items():
        start, stop = fmt.layout.get(name, (0, 0))
        if stop - start == 2:
            blocks[..., start:stop] = size.half().view(torch.uint8)
        elif stop - start == 1:  # MXFP4: a power of two, 2^-8 to 2^-4
            blocks[..., start] = torch.randint(
                120, 125, blocks.shape[:2], generator=random, dtype=torch.uint8
            )
    return QuantTensor(fmt.name, fmt, (rows, cols), blocks.view(rows, fmt.row_bytes(cols)))


def _error(backend: Backend[WeightT], x: Tensor, weight: QuantTensor) -> float:
    """NMSE of norm and matmul, from the backend's own embedding of x to its logits."""
    hidden = backend.embed(backend.weight([_floats("x", x)]), torch.arange(len(x), device=backend.device))
    norm = torch.ones(COLS)
    found = backend.logits(
        hidden, backend.vector([_floats("norm", norm)]), EPS, backend.weight([weight]), False
    )
    wanted = rms_norm(x.double(), norm.double(), EPS) @ dequantize(weight.format, weight.data).double().T
    return float((found.cpu().double() - wanted).square().mean() / wanted.square().mean())


def _floats(name: str, values: Tensor) -> QuantTensor:
    data = values.reshape(-1, values.shape[-1]).contiguous().view(torch.uint8)
    return QuantTensor(name, FORMATS["F32"], tuple(values.shape), data)
