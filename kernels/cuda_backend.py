"""The CUDA backend: packed weights through Triton, int16 activations in decode, fp16 matrix units in prefill.

A decode layer is five launches: QKV, attention (rotation, cache write, slices and their combination, rounding), output
with the residual, gate and up with SwiGLU and rounding, down with the residual. Output and down also begin the norm
behind them, and the matmul that reads it ends it. The residual stream is fp32. Implements kernels.backend.Backend.
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
from quengine.kernels.cuda.half import HalfRows
from quengine.kernels.cuda.kv_store import KVStore
from quengine.kernels.cuda.matmul import MatmulWorkspace, matmul, matmul_norm, matmul_swiglu
from quengine.kernels.cuda.matvec import matvec
from quengine.kernels.cuda.matvec_norm import can_begin_norm, matvec_norm
from quengine.kernels.cuda.matvec_program import RoundingScratch
from quengine.kernels.cuda.matvec_swiglu import matvec_swiglu
from quengine.kernels.cuda.normed import NormedRows
from quengine.kernels.cuda.packed import PackedWeight, pack
from quengine.kernels.cuda.rms_norm import rms_norm_half, rms_norm_round
from quengine.kernels.cuda.rope import rope_store
from quengine.kernels.quant_tensor import QuantTensor

HOPPER = (9, 0)

DECODE_ROWS = 1
"""Rows up to which the q-dot is used. Its kernel takes 8, but compiling the one for 4 rows of Q4_K takes over a minute,
which nobody should wait for in front of a short prompt."""

MAX_EXPANDED = 1 << 26
"""Weights expanded to fp16 at a time in prefill, at most: 128 MiB."""

Rows = Tensor | RoundedActivations | HalfRows
"""What feeds a matmul: rounded rows in decode; in prefill scaled fp16 rows after a norm, else fp32 rows."""

Residual = Tensor | NormedRows
"""The residual stream: fp32 rows, behind a layer with the norm that reads them."""


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start, and read its weights, before the one before it has ended (sm_90 and later)."""
    return torch.cuda.get_device_capability(device) >= HOPPER


def _last_row(x: Residual) -> Residual:
    if isinstance(x, NormedRows):
        return x if x.hidden.shape[0] == 1 else x.hidden[-1:]
    return x[-1:]


class CudaBackend:
    """See the module docstring. `device` must be a CUDA device of compute capability 8.0 or later."""

    def __init__(self, device: torch.device) -> None:
        self.name = "cuda"
        self.device = device
        self.dtype = torch.float32
        self.pdl = has_dependent_launch(device)
        self._slices: DecodeWorkspace | None = None
        self._scratch: RoundingScratch | None = None
        self._matmul_workspace: MatmulWorkspace | None = None
        self._made_positions: tuple[int, int, Tensor] | None = None
        self._widest = 0
        self._largest = 0

    def weight(self, parts: Sequence[QuantTensor]) -> PackedWeight:
        return self._noted(pack(parts, self.device))

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> PackedWeight:
        return self._noted(pack([gate, up], self.device, paired=True))

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return torch.cat([dequantize(part.format, part.data).flatten() for part in parts]).to(self.device)

    def embed(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        return embedding(weight, ids, pdl=self.pdl)

    def norm_linear(
        self, x: Residual, norm: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None = None
    ) -> Tensor:
        rows = self._normed(x, norm, eps)
        if bias is not None and isinstance(rows, RoundedActivations) and rows.rows == 1:
            return self._matmul(rows, weight, bias.view(1, -1))
        y = self._matmul(rows, weight, None)
        return y if bias is None else y.add_(bias)

    def norm_swiglu(self, x: Residual, norm: Tensor, eps: float, gate_up: PackedWeight) -> Rows:
        rows = self._normed(x, norm, eps)
        if isinstance(rows, RoundedActivations):
            return matvec_swiglu(rows, gate_up, scratch=self._rounding_scratch(), pdl=self.pdl)
        return matmul_swiglu(rows, gate_up, self._workspace())

    def linear_add(
        self, x: Rows, weight: PackedWeight, residual: Residual, norm: Tensor | None = None, eps: float = 0.0
    ) -> Residual:
        stream = residual.hidden if isinstance(residual, NormedRows) else residual
        rows = self._rounded(x)
        if norm is None or (isinstance(rows, RoundedActivations) and not can_begin_norm(weight)):
            return self._matmul(rows, weight, stream)
        if isinstance(rows, RoundedActivations):
            return matvec_norm(rows, weight, stream, norm, eps, self._rounding_scratch(), self.pdl)
        return NormedRows(*matmul_norm(rows, weight, self._workspace(), stream, norm, eps, pdl=self.pdl))

    def attention(self, qkv: Tensor, spec: AttentionSpec, layer: KVLayer, start: Position) -> Rows:
        cache = KVStore.of_layer(layer)
        tokens = qkv.shape[0]
        if tokens == 1:
            captured = isinstance(start, Tensor)
            position = start if isinstance(start, Tensor) else self._positions(start, 1)
            out = RoundedActivations.empty(1, spec.heads * spec.head_dim, self.device)
            # A position made just now must be complete before the launch that reads it begins.
            pdl = self.pdl and captured
            return attention_decode_round(qkv, spec, cache, position, self._decode_workspace(spec), out, pdl)
        assert isinstance(start, int)
        q = rope_store(qkv, spec, cache, 0, self._positions(start, tokens), self.pdl)
        return attention_prefill(q, spec, cache, 0, start, out_dtype=torch.float32, pdl=self.pdl)

    def logits(self, x: Residual, norm: Tensor, eps: float, weight: PackedWeight, last_only: bool) -> Tensor:
        if last_only:
            x = _last_row(x)
        return self._matmul(self._normed(x, norm, eps), weight, None)

    def _normed(self, x: Residual, norm: Tensor, eps: float) -> Rows:
        if isinstance(x, NormedRows):
            return x.normed
        if x.shape[0] <= DECODE_ROWS:
            return rms_norm_round(x, norm, eps, pdl=self.pdl)
        return rms_norm_half(x, norm, eps, self._workspace().half_rows(*x.shape), pdl=self.pdl)

    def _rounded(self, x: Rows) -> Rows:
        return round_activations(x) if isinstance(x, Tensor) and x.shape[0] <= DECODE_ROWS else x

    def _matmul(self, x: Rows, weight: PackedWeight, residual: Tensor | None) -> Tensor:
        x = self._rounded(x)
        if isinstance(x, RoundedActivations):
            return matvec(x, weight, residual, pdl=self.pdl)
        return matmul(x, weight, self._workspace(), residual)

    def _positions(self, start: int, tokens: int) -> Tensor:
        """start .. start + tokens - 1, made once for the layers of a chunk."""
        if self._made_positions is None or self._made_positions[:2] != (start, tokens):
            made = torch.arange(start, start + tokens, dtype=torch.int32, device=self.device)
            self._made_positions = (start, tokens, made)
        return self._made_positions[2]

    def _noted(self, weight: PackedWeight) -> PackedWeight:
        """Remember how much room the prefill needs for this weight."""
        self._widest = max(self._widest, weight.cols)
        self._largest = max(self._largest, min(weight.rows * weight.cols, MAX_EXPANDED))
        return weight

    def _workspace(self) -> MatmulWorkspace:
        """Room for prefill, kept from layer to layer."""
        if self._matmul_workspace is None:
            self._matmul_workspace = MatmulWorkspace(self._largest, self.device)
        return self._matmul_workspace

    def _rounding_scratch(self) -> RoundingScratch:
        """One for all launches: each uses it only after the one in front has ended."""
        if self._scratch is None:
            self._scratch = RoundingScratch.empty(DECODE_ROWS, 2 * self._widest, self.device)
        return self._scratch

    def _decode_workspace(self, spec: AttentionSpec) -> DecodeWorkspace:
        if self._slices is None:
            self._slices = DecodeWorkspace.allocate(1, spec.heads, spec.kv_heads, spec.head_dim, self.device)
        return self._slices
