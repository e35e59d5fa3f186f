"""The CUDA backend on the meta device: it launches what a model launches, on weights without data.

On the meta device, some of torch's operations exist only in Python, and import torch's compiler: half a second to a
second (`empty_like`, `x[rows]`, products; not `new_empty` and `index_select`). The steps of usual models use none of
these, so that their kernels are known sooner.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.backend import CudaBackend, Residual, Rows
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.launch.gpu import Gpu, assuming
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights, pairs_experts
from quengine.kernels.cuda.weights.bounds import WeightBounds
from quengine.kernels.cuda.weights.layout import TILE_ROWS, packed_layout
from quengine.kernels.cuda.weights.packed import FloatPart, PackedPart, PackedWeight, can_pair
from quengine.kernels.cuda.weights.repack import repack
from quengine.kernels.cuda.weights.repack_table import repack_table
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.quant_tensor import QuantTensor

META = torch.device("meta")

ARCHS = (80, 89, 90)
"""The architectures that kernels are compiled for ahead of time."""

TABLE_GPU = {90: "NVIDIA H200"}
"""The GPU whose measured launch geometry is compiled for an architecture; other architectures use the defaults."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without data, on the meta device."""
    return torch.empty(shape, dtype=dtype, device=META)


def stored(name: str, rows: int, cols: int) -> QuantTensor:
    """A matrix as a file holds it, in the format `name`, without data."""
    fmt = FORMATS[name]
    return QuantTensor(name, fmt, (rows, cols), empty(rows, fmt.row_bytes(cols), dtype=torch.uint8))


def packed_part(name: str, rows: int, cols: int) -> PackedPart | FloatPart:
    """A matrix in the format `name`, in the layout of a device, without data."""
    fmt = FORMATS[name]
    if not fmt.is_quantized:
        return FloatPart(empty(rows, cols, dtype=_FLOATS[name]))
    plane = empty(16, dtype=torch.uint8)
    return PackedPart(packed_layout(fmt, cols), rows, cols, plane, plane, plane, plane, 1.0, 1.0)


def repack_tile(name: str, cols: int) -> None:
    """Repacks 16 rows of a format and computes their bounds, as loading a model does for all its weights. Does nothing
    where torch packs the format."""
    layout, table = packed_layout(FORMATS[name], cols), repack_table(FORMATS[name], cols, META)
    if table is not None:
        chunks = -(-cols // layout.chunk)
        planes = [empty(1, chunks, size, dtype=torch.uint8) for size in layout.plane_bytes]
        rows = empty(1, TILE_ROWS, FORMATS[name].row_bytes(cols), dtype=torch.uint8)
        repack(planes, rows, None, empty(1, dtype=torch.int32), table)
        if table.plain is not None:
            plain = empty(1, chunks, table.plain.shape[1], dtype=torch.uint8)
            WeightBounds.none(META).include(plain, FORMATS[name])


class MetaBackend(CudaBackend):
    """The CUDA backend on weights without data."""

    def weight(self, parts: Sequence[QuantTensor]) -> PackedWeight:
        merged: list[tuple[str, int]] = []
        for part in parts:
            if merged and merged[-1][0] == part.format.name:
                merged[-1] = (part.format.name, merged[-1][1] + part.rows)
            else:
                merged.append((part.format.name, part.rows))
        return self._noted(
            PackedWeight(tuple(packed_part(name, rows, parts[0].cols) for name, rows in merged))
        )

    def gather_rows(self, x: Rows | Residual, rows: Tensor) -> Tensor:
        """Launches nothing. On the meta device, a product of tensors would take a second to import torch's compiler."""
        if isinstance(x, Fp16Operand):
            return empty(len(rows), x.width)
        return super().gather_rows(x, rows)

    def row_table(self, table: QuantTensor) -> PackedWeight:
        return PackedWeight((packed_part(table.format.name, table.rows, table.cols),))

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> PackedWeight:
        if not can_pair([gate, up]):
            return self.weight([gate, up])
        return self._noted(
            PackedWeight((packed_part(gate.format.name, 2 * gate.rows, gate.cols),), paired=True)
        )

    def gate_up_experts(
        self,
        gate: Sequence[QuantTensor] | None,
        up: Sequence[QuantTensor],
        bias: Tensor | None = None,
        share: ExpertShare | None = None,
    ) -> ExpertWeights:
        if gate is None:
            return self.down_experts(up, bias, share)
        count, rows = len(gate), 2 * gate[0].rows
        if pairs_experts(gate[0], up[0]):
            return self._noted_experts(ExpertWeights((_experts(gate, rows),), count, rows, True, bias, share))
        parts = (_experts(gate, rows // 2), _experts(up, rows // 2))
        return self._noted_experts(ExpertWeights(parts, count, rows, bias=bias, share=share))

    def down_experts(
        self, down: Sequence[QuantTensor], bias: Tensor | None = None, share: ExpertShare | None = None
    ) -> ExpertWeights:
        rows = down[0].rows
        parts = (_experts(down, rows),)
        return self._noted_experts(ExpertWeights(parts, len(down), rows, bias=bias, share=share))

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return empty(sum(prod(part.shape) for part in parts))


@contextmanager
def backend_for(arch: int) -> Iterator[MetaBackend]:
    """The backend with the kernels of a GPU of architecture `arch`."""
    with assuming(gpu_for(arch)):
        yield MetaBackend(META)


def gpu_for(arch: int) -> Gpu:
    """The GPU that an architecture's kernels are selected for."""
    return Gpu(TABLE_GPU.get(arch, ""), (arch // 10, arch % 10))


def _experts(experts: Sequence[QuantTensor], rows: int) -> PackedPart | FloatPart:
    """A part with `rows` rows per expert, plus padding to a whole tile."""
    first = experts[0]
    padded = -(-rows // TILE_ROWS) * TILE_ROWS if first.format.is_quantized else rows
    return packed_part(first.format.name, len(experts) * padded, first.cols)
