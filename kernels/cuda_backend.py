"""The CUDA backend: packed weights through Triton, int16 activations in decode, fp16 matrix units in prefill.

A decode layer is seven launches: norm and rounding, QKV, attention (rotation, cache write, slices and their
combination, rounding), output with the residual, norm and rounding, gate and up with SwiGLU and rounding, down with
the residual. The residual stream is fp32. Implements kernels.backend.Backend.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.kernels.backend import AttentionSpec, KVLayer, Position
from quengine.kernels.block_formats import dequantize
from quengine.kernels.cuda.activations import RoundedActivations, round_activations
from quengine.kernels.cuda.attention_decode import DecodeWorkspace, attention_decode_round
from quengine.kernels.cuda.attention_prefill import attention_prefill
from quengine.kernels.cuda.embedding import embedding
from quengine.kernels.cuda.kv_store import KVStore
from quengine.kernels.cuda.matmul import matmul
from quengine.kernels.cuda.matvec import matvec, matvec_swiglu
from quengine.kernels.cuda.packed import PackedWeight, pack
from quengine.kernels.cuda.rms_norm import rms_norm, rms_norm_round
from quengine.kernels.cuda.rope import rope_store
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.swiglu import swiglu

HOPPER = (9, 0)

DECODE_ROWS = 1
"""Rows up to which the q-dot is used. Its kernel takes 8, but compiling the one for 4 rows of Q4_K takes over a minute,
which nobody should wait for in front of a short prompt."""

Rows = Tensor | RoundedActivations
"""What feeds a matmul: rounded rows where there are few, fp16 rows where there are many."""


class CudaBackend:
    """See the module docstring. `device` must be a CUDA device of compute capability 8.0 or later."""

    def __init__(self, device: torch.device) -> None:
        self.name = "cuda"
        self.device = device
        self.dtype = torch.float32
        # Programmatic dependent launch: a kernel starts, and reads its weights, before the one before it has ended.
        self.pdl = torch.cuda.get_device_capability(device) >= HOPPER
        self._workspace: DecodeWorkspace | None = None

    def weight(self, parts: Sequence[QuantTensor]) -> PackedWeight:
        return pack(parts, self.device)

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> PackedWeight:
        return pack([gate, up], self.device, paired=True)

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return torch.cat([dequantize(part.format, part.data).flatten() for part in parts]).to(self.device)

    def embed(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        return embedding(weight, ids, pdl=self.pdl)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None = None
    ) -> Tensor:
        y = self._matmul(self._normed(x, norm, eps), weight, None)
        return y if bias is None else y.add_(bias)

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, gate_up: PackedWeight) -> Rows:
        rows = self._normed(x, norm, eps)
        if isinstance(rows, RoundedActivations):
            return matvec_swiglu(rows, gate_up, pdl=self.pdl)
        return swiglu(self._matmul(rows, gate_up, None)).to(torch.float16)

    def linear_add(self, x: Rows, weight: PackedWeight, residual: Tensor) -> Tensor:
        return self._matmul(x, weight, residual)

    def attention(self, qkv: Tensor, spec: AttentionSpec, layer: KVLayer, start: Position) -> Rows:
        cache = KVStore(layer.k[None], layer.v[None])
        tokens = qkv.shape[0]
        if tokens == 1:
            captured = isinstance(start, Tensor)
            position = start if isinstance(start, Tensor) else self._positions(start, 1)
            out = RoundedActivations.empty(1, spec.heads * spec.head_dim, self.device)
            # A position made just now must be complete before the launch that reads it begins.
            pdl = self.pdl and captured
            return attention_decode_round(qkv, spec, cache, position, self._slices(spec), out, pdl)
        assert isinstance(start, int)
        q = rope_store(qkv, spec, cache, 0, self._positions(start, tokens), self.pdl)
        return attention_prefill(q, spec, cache, 0, start, pdl=self.pdl)

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: PackedWeight, last_only: bool) -> Tensor:
        return self._matmul(self._normed(x[-1:] if last_only else x, norm, eps), weight, None)

    def _normed(self, x: Tensor, norm: Tensor, eps: float) -> Rows:
        if x.shape[0] <= DECODE_ROWS:
            return rms_norm_round(x, norm, eps, pdl=self.pdl)
        return rms_norm(x, norm, eps, out=torch.empty_like(x, dtype=torch.float16), pdl=self.pdl)

    def _matmul(self, x: Rows, weight: PackedWeight, residual: Tensor | None) -> Tensor:
        if isinstance(x, Tensor) and x.shape[0] <= DECODE_ROWS:
            x = round_activations(x)
        if isinstance(x, RoundedActivations):
            return matvec(x, weight, residual, pdl=self.pdl)
        return matmul(x, weight, residual)

    def _positions(self, start: int, tokens: int) -> Tensor:
        return torch.arange(start, start + tokens, dtype=torch.int32, device=self.device)

    def _slices(self, spec: AttentionSpec) -> DecodeWorkspace:
        if self._workspace is None:
            self._workspace = DecodeWorkspace.allocate(1, spec.heads, spec.kv_heads, spec.head_dim, self.device)
        return self._workspace
