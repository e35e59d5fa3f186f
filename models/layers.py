"""The layers that decoders share. Attributes carry the GGUF tensor names, so there is no rename table.

A layer holds weights in the form its backend gave them and knows neither the device nor the number of layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from quengine.kernels.backend import AttentionSpec, Backend, Hidden, KVLayer, Position
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.config import ModelConfig

Pick = Callable[[Hidden], Hidden]
"""Some rows of what it is given."""


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
        self.eps = config.rms_eps
        self.spec = spec
        self.attn_norm = backend.vector(tensors.take("attn_norm"))
        self.attn_qkv = backend.weight(tensors.take("attn_q", "attn_k", "attn_v"))
        self.attn_qkv_bias: Tensor | None = None
        if tensors.has("attn_q", "bias"):
            self.attn_qkv_bias = backend.vector(tensors.take("attn_q", "attn_k", "attn_v", kind="bias"))
        self.attn_output = backend.weight(tensors.take("attn_output"))

    def __call__(
        self,
        x: Hidden,
        cache: KVLayer,
        start: Position,
        next_norm: Tensor,
        pick: Pick | None = None,
    ) -> Hidden:
        """`next_norm`: weights of the norm that reads the result. `pick`: takes the rows that go on."""
        qkv = self.backend.norm_linear(x, self.attn_norm, self.eps, self.attn_qkv, self.attn_qkv_bias)
        mixed = self.backend.attention(qkv, self.spec, cache, start)
        if pick is not None:
            mixed, x = pick(mixed), pick(x)
        return self.backend.linear_add(mixed, self.attn_output, x, next_norm, self.eps)

    @property
    def nbytes(self) -> int:
        return int(self.attn_qkv.nbytes + self.attn_output.nbytes)


class FeedForward:
    """Norm, merged gate and up projection, SwiGLU, down projection."""

    def __init__(self, config: ModelConfig, tensors: LayerTensors, backend: Backend[Any]) -> None:
        self.backend = backend
        self.eps = config.rms_eps
        self.ffn_norm = backend.vector(tensors.take("ffn_norm"))
        self.ffn_gate_up = backend.gate_up_weight(*tensors.take("ffn_gate", "ffn_up"))
        self.ffn_down = backend.weight(tensors.take("ffn_down"))

    def __call__(self, x: Hidden, next_norm: Tensor) -> Hidden:
        """`next_norm`: weights of the norm that reads the result."""
        gated = self.backend.norm_swiglu(x, self.ffn_norm, self.eps, self.ffn_gate_up)
        return self.backend.linear_add(gated, self.ffn_down, x, next_norm, self.eps)

    @property
    def nbytes(self) -> int:
        return int(self.ffn_gate_up.nbytes + self.ffn_down.nbytes)
