"""The layers of a decoder. Attributes carry the GGUF tensor names, so there is no rename table."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from quengine.kernels.backend import AttentionSpec, Backend, Hidden, KVLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.config import ModelConfig


class LayerTensors:
    """The tensors under one prefix (`blk.3.`), taken by their short names onto a backend."""

    def __init__(
        self, tensors: Mapping[str, QuantTensor], prefix: str, backend: Backend[Any], eps: float
    ) -> None:
        self.tensors = tensors
        self.prefix = prefix
        self.backend = backend
        self.eps = eps

    def take(self, *names: str, kind: str = "weight") -> list[QuantTensor]:
        return [self.tensors[f"{self.prefix}{name}.{kind}"] for name in names]

    def has(self, name: str, kind: str = "weight") -> bool:
        return f"{self.prefix}{name}.{kind}" in self.tensors

    def weight(self, *names: str) -> Any:
        """Matrices on the same input."""
        return self.backend.weight(self.take(*names))

    def vector(self, *names: str, kind: str = "weight") -> Tensor:
        return self.backend.vector(self.take(*names, kind=kind))

    def norm(self, name: str, there: bool = True) -> RMSNorm | None:
        """The norm with weights `name`, or None where the architecture has no norm `there`."""
        return RMSNorm(self.vector(name), self.eps) if there else None


class Attention:
    """Merged query/key/value projection, rotary causal attention over the cache, output projection.

    `attn_norm` is the norm in front, `post_norm` that of the result before the residual is added; None: there is none.
    """

    def __init__(self, config: ModelConfig, tensors: LayerTensors, spec: AttentionSpec) -> None:
        block = config.block
        self.backend = tensors.backend
        self.partial = config.ranks > 1 and config.splits_heads
        self.spec = replace(spec, sinks=tensors.vector("attn_sinks")) if block.sinks else spec
        self.attn_norm = tensors.norm("attn_norm", block.norms != "post")
        self.attn_qkv = tensors.weight(*_qkv(tensors, "weight"))
        self.attn_qkv_bias = tensors.vector(*_qkv(tensors, "bias"), kind="bias") if block.qkv_bias else None
        self.attn_output = tensors.weight("attn_output")
        self.attn_output_bias = tensors.vector("attn_output", kind="bias") if block.output_bias else None
        self.post_norm = tensors.norm("post_attention_norm", block.norms != "pre")

    def __call__(
        self,
        batch: ForwardBatch,
        x: Hidden,
        cache: KVLayer,
        next_norm: RMSNorm | None,
        rows: Tensor | None = None,
    ) -> Hidden:
        """`next_norm`: the norm that reads the result. `rows`: those gathered behind the attention; None: all."""
        qkv = self.backend.norm_linear(batch, x, self.attn_norm, self.attn_qkv, self.attn_qkv_bias)
        y = self.backend.attention(batch, qkv, self.spec, cache)
        if rows is not None:
            y, x = self.backend.gather_rows(y, rows), self.backend.gather_rows(x, rows)
        return self.backend.linear_add(
            *(batch, y, self.attn_output, x, next_norm, self.post_norm, self.attn_output_bias),
            partial=self.partial,
        )

    @property
    def nbytes(self) -> int:
        return int(self.attn_qkv.nbytes + self.attn_output.nbytes)


def _qkv(tensors: LayerTensors, kind: str) -> list[str]:
    """The tensor that holds query, key and value rows, where there is such a one, or the three."""
    return ["attn_qkv"] if tensors.has("attn_qkv", kind) else ["attn_q", "attn_k", "attn_v"]


class FeedForward:
    """Merged gate and up projection, gated activation, down projection; norms as in Attention."""

    def __init__(self, config: ModelConfig, tensors: LayerTensors) -> None:
        block = config.block
        self.backend = tensors.backend
        self.partial = config.ranks > 1
        self.activation = block.activation
        self.ffn_norm = tensors.norm(block.ffn_norm, block.norms != "post")
        if block.merged:
            (merged,) = tensors.take("ffn_up")
            gate, up = merged.row_slices(config.feed_forward_length)
        else:
            gate, up = tensors.take("ffn_gate", "ffn_up")
        self.ffn_gate_up = self.backend.gate_up_weight(gate, up)
        self.ffn_down = tensors.weight("ffn_down")
        self.post_norm = tensors.norm("post_ffw_norm", block.norms != "pre")

    def __call__(self, batch: ForwardBatch, x: Hidden, next_norm: RMSNorm | None) -> Hidden:
        """`next_norm`: the norm that reads the result."""
        gated = self.backend.norm_glu(batch, x, self.ffn_norm, self.ffn_gate_up, self.activation)
        return self.backend.linear_add(
            batch, gated, self.ffn_down, x, next_norm, self.post_norm, partial=self.partial
        )

    @property
    def nbytes(self) -> int:
        return int(self.ffn_gate_up.nbytes + self.ffn_down.nbytes)
