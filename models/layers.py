"""The layers that decoders share. Attributes carry the GGUF tensor names, so there is no rename table.

A layer holds weights in the form its backend gave them and knows neither the device nor the number of layers.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quengine.kernels.backend import AttentionSpec, Backend, Hidden, KVLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.config import ModelConfig


class LayerTensors:
    """The tensors under one prefix (`blk.3.`), taken by their short names."""

    def __init__(self, tensors: Mapping[str, QuantTensor], prefix: str) -> None:
        self.tensors = tensors
        self.prefix = prefix

    def take(self, *names: str, kind: str = "weight") -> list[QuantTensor]:
        return [self.tensors[f"{self.prefix}{name}.{kind}"] for name in names]

    def has(self, name: str, kind: str = "weight") -> bool:
        return f"{self.prefix}{name}.{kind}" in self.tensors


class Attention:
    """Norm, merged query/key/value projection, rotary causal attention over the cache, output projection."""

    def __init__(
        self, config: ModelConfig, tensors: LayerTensors, backend: Backend[Any], spec: AttentionSpec
    ) -> None:
        self.backend = backend
        self.spec = spec
        self.attn_norm = RMSNorm(backend.vector(tensors.take("attn_norm")), config.rms_eps)
        self.attn_qkv = backend.weight(tensors.take("attn_q", "attn_k", "attn_v"))
        self.attn_qkv_bias: Tensor | None = None
        if tensors.has("attn_q", "bias"):
            self.attn_qkv_bias = backend.vector(tensors.take("attn_q", "attn_k", "attn_v", kind="bias"))
        self.attn_output = backend.weight(tensors.take("attn_output"))

    def __call__(
        self, batch: ForwardBatch, x: Hidden, cache: KVLayer, next_norm: RMSNorm, rows: Tensor | None = None
    ) -> Hidden:
        """`next_norm`: the norm that reads the result. `rows`: those that go on behind the attention."""
        qkv = self.backend.norm_linear(batch, x, self.attn_norm, self.attn_qkv, self.attn_qkv_bias)
        mixed = self.backend.attention(batch, qkv, self.spec, cache)
        if rows is not None:
            mixed, x = self.backend.gather_rows(mixed, rows), self.backend.gather_rows(x, rows)
        return self.backend.linear_add(batch, mixed, self.attn_output, x, next_norm)

    @property
    def nbytes(self) -> int:
        return int(self.attn_qkv.nbytes + self.attn_output.nbytes)


class FeedForward:
    """Norm, merged gate and up projection, SwiGLU, down projection."""

    def __init__(self, config: ModelConfig, tensors: LayerTensors, backend: Backend[Any]) -> None:
        self.backend = backend
        self.ffn_norm = RMSNorm(backend.vector(tensors.take("ffn_norm")), config.rms_eps)
        self.ffn_gate_up = backend.gate_up_weight(*tensors.take("ffn_gate", "ffn_up"))
        self.ffn_down = backend.weight(tensors.take("ffn_down"))

    def __call__(self, batch: ForwardBatch, x: Hidden, next_norm: RMSNorm) -> Hidden:
        """`next_norm`: the norm that reads the result."""
        gated = self.backend.norm_glu(batch, x, self.ffn_norm, self.ffn_gate_up)
        return self.backend.linear_add(batch, gated, self.ffn_down, x, next_norm)

    @property
    def nbytes(self) -> int:
        return int(self.ffn_gate_up.nbytes + self.ffn_down.nbytes)
