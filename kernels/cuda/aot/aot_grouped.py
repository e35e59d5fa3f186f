"""The cases of ahead-of-time compilation for mixture of experts with more than one row, at released models' shapes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.aot.meta_backend import META, empty, packed_part
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.grouped import grouped_add, grouped_glu, norms_in_groups
from quengine.kernels.glu import Activation
from quengine.kernels.moe.router import Routing
from quengine.kernels.rms_norm import RMSNorm

GroupedCase: TypeAlias = tuple[str, bool, tuple[int, ...], Callable[[CudaBackend], object]]
"""The fields of a Case (aot_cases.py)."""

_TYPES_WIDTH = 1024


@dataclass(frozen=True)
class ExpertSizes:
    """One layer's experts: hidden size, feed-forward length, number of experts, experts per row; the types of
    gate, up and down.
    """

    hidden: int
    ffn: int
    count: int
    used: int
    types: tuple[str, str, str] = ("Q4_K", "Q4_K", "Q6_K")
    activation: Activation = "silu"
    bias: bool = False


MODELS = {
    "qwen3-30b-a3b": ExpertSizes(2048, 768, 128, 8),
    "mixtral-8x7b": ExpertSizes(4096, 14336, 8, 2),
    "gpt-oss-20b": ExpertSizes(2880, 2880, 32, 4, ("MXFP4", "MXFP4", "MXFP4"), "clamped_swish", True),
    "qwen3.6-35b-a3b": ExpertSizes(2048, 512, 257, 9),  # the shared expert is one of them
}
ROWS = {
    "qwen3-30b-a3b": (8, 128, 512),
    "mixtral-8x7b": (64, 2048),
    "gpt-oss-20b": (8, 64, 512, 4096),
    "qwen3.6-35b-a3b": (8, 512),
}
"""Rows that cover all block sizes. More than 512 rows are a prompt's."""

_WITHOUT_WGMMA = (("gpt-oss-20b", 8), ("mixtral-8x7b", 2048))
"""Compiled also without Hopper's instruction: the smallest and the largest blocks."""

_MMA_TYPES = ("F16", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")
"""Compiled without it: one type for each layout of scales and codes. The dense matmul is compiled for all types."""


def grouped_cases() -> Iterator[GroupedCase]:
    for name, experts in MODELS.items():
        for rows in ROWS[name]:
            words = f"{rows} rows" if rows <= 512 else f"prompt of {rows}"
            archs = (80, 90) if (name, rows) in _WITHOUT_WGMMA else (90,)
            call = partial(_layer, experts, rows, rows > 512)
            yield (f"experts of {name}, {words}", rows <= 512, archs, call)
    for name in FORMATS:
        of_type = ExpertSizes(_TYPES_WIDTH, _TYPES_WIDTH, 8, 2, (name, name, name))
        archs = (80, 90) if name in _MMA_TYPES else (90,)
        yield (f"experts of {name}, 16 rows", False, archs, partial(_layer, of_type, 16, False))
        for rows in (64, 512):
            yield (f"experts of {name}, {rows} rows", False, (90,), partial(_layer, of_type, rows, False))
    of_type = ExpertSizes(_TYPES_WIDTH, _TYPES_WIDTH, 8, 2)
    yield ("experts, a prompt of 16", False, (80, 90), partial(_layer, of_type, 16, True))
    unpaired = ExpertSizes(1024, 1024, 8, 2, ("Q4_K", "Q6_K", "F16"), "gelu_tanh", True)
    for rows, arch in ((16, 80), (512, 90)):
        call = partial(_layer, unpaired, rows, False)
        yield (f"experts of gate Q4_K and up Q6_K, {rows} rows", False, (arch,), call)


def _layer(experts: ExpertSizes, rows: int, exact: bool, backend: CudaBackend) -> None:
    gate, up, down = experts.types
    hidden, ffn, count = experts.hidden, experts.ffn, experts.count
    paired = gate == up and FORMATS[gate].is_quantized
    parts = (
        [packed_part(gate, count * 2 * ffn, hidden)]
        if paired
        else [packed_part(t, count * ffn, hidden) for t in (gate, up)]
    )
    biases = [empty(count, 2 * ffn), empty(count, hidden)] if experts.bias else [None, None]
    gate_up = ExpertWeights(tuple(parts), count, 2 * ffn, paired, biases[0])
    down_weights = ExpertWeights((packed_part(down, count * hidden, ffn),), count, hidden, False, biases[1])
    routing = Routing(empty(rows, experts.used, dtype=torch.int32), empty(rows, experts.used))
    room = MatmulWorkspace(1 << 16, META)
    x: Fp16Operand = room.fp16_operand(rows, hidden)
    gated = grouped_glu(x, routing, gate_up, room, experts.activation, backend.pdl, exact)
    norm = RMSNorm(empty(hidden), 1e-5, experts.used)
    if norms_in_groups(rows, experts.used, backend.device):
        rows_of_x, activation = empty(rows, hidden), experts.activation
        grouped_glu(rows_of_x, routing, gate_up, room, activation, backend.pdl, exact, norm)
    for next_norm in (norm, None):
        grouped_add(gated, routing, down_weights, room, empty(rows, hidden), next_norm, backend.pdl, exact)
