"""The CPU backend: weights as stored in the mapped file, int16 activations in decode, fp32 in prefill.

Norms, rotation and SwiGLU are the torch definitions in float32; matmuls and attention are the kernels of
kernels/cpu/. Implements kernels.backend.Backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.attention import mask_slice
from quengine.kernels.backend import AttentionSpec, KVLayer, Position
from quengine.kernels.block_formats import dequantize
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope_store import first_visible, rope_store
from quengine.kernels.swiglu import swiglu


@dataclass(frozen=True)
class CpuWeight:
    """Matrices on one input, each where it lies in the file."""

    parts: tuple[QuantTensor, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class CpuBackend:
    """See the module docstring.

    Raises:
        EngineError: more threads than this machine allows.
    """

    def __init__(self, threads: int) -> None:
        self.name = "cpu"
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        cpu.set_threads(threads)

    def weight(self, parts: Sequence[QuantTensor]) -> CpuWeight:
        return CpuWeight(tuple(parts))

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> CpuWeight:
        return self.weight([gate, up])

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return torch.cat([dequantize(part.format, part.data).flatten() for part in parts])

    def embed(self, weight: CpuWeight, ids: Tensor) -> Tensor:
        (part,) = weight.parts
        return cpu.embed(part, ids)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: CpuWeight, bias: Tensor | None = None
    ) -> Tensor:
        y = cpu.linear(rms_norm(x, norm, eps), weight.parts)
        return y if bias is None else y.add_(bias)

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, gate_up: CpuWeight) -> Tensor:
        return swiglu(cpu.linear(rms_norm(x, norm, eps), gate_up.parts))

    def linear_add(self, x: Tensor, weight: CpuWeight, residual: Tensor) -> Tensor:
        return cpu.linear(x, weight.parts).add_(residual)

    def attention(self, qkv: Tensor, spec: AttentionSpec, layer: KVLayer, start: Position) -> Tensor:
        assert isinstance(start, int)
        tokens = qkv.shape[0]
        q = rope_store(qkv, spec, layer, start)
        if tokens == 1:
            first, end = first_visible(spec, start + 1), start + 1
            return cpu.decode_attention(q[0], layer.k, layer.v, end, spec.scale, first).reshape(1, -1)
        mask = mask_slice(spec.mask_band, start, tokens)
        return cpu.prefill_attention(q, layer.k, layer.v, mask, spec.scale).reshape(tokens, -1)

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: CpuWeight, last_only: bool) -> Tensor:
        return cpu.linear(rms_norm(x[-1:] if last_only else x, norm, eps), weight.parts)
