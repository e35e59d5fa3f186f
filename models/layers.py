"""The decoder layers that most models have, on a backend."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from quengine.kernels.backend import Backend, Hidden, KVLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.blocks.attention import Attention
from quengine.models.blocks.feed_forward import FeedForward
from quengine.models.layer_tables import LayerTables


class LayerTensors:
    """The tensors of a layer (`blk.3.`), or of no layer (None), loaded onto a backend by their short names."""

    def __init__(
        self, tensors: Mapping[str, QuantTensor], layer: int | None, backend: Backend[Any], eps: float
    ) -> None:
        self.tensors = tensors
        self.layer = -1 if layer is None else layer
        self.prefix = "" if layer is None else f"blk.{layer}."
        self.backend = backend
        self.eps = eps

    def take(self, *names: str, kind: str = "weight") -> list[QuantTensor]:
        """`kind`: weight, bias, or "" for tensors whose names have none."""
        ends = f".{kind}" if kind else ""
        return [self.tensors[f"{self.prefix}{name}{ends}"] for name in names]

    def has(self, name: str, kind: str = "weight") -> bool:
        return f"{self.prefix}{name}.{kind}" in self.tensors

    def weight(self, *names: str) -> Any:
        """Loads matrices that multiply the same input."""
        return self.backend.weight(self.take(*names))

    def vector(self, *names: str, kind: str = "weight") -> Tensor:
        return self.backend.vector(self.take(*names, kind=kind))

    def norm(self, name: str, there: bool = True) -> RMSNorm | None:
        """The norm with weights `name`; None if `there` is false, as the architecture has no such norm."""
        return RMSNorm(self.vector(name), self.eps) if there else None


class AttentionLayer:
    """Merged query/key/value projection, rotary causal attention over the cache, output projection.

    `norm` is the norm before, `post_norm` that of the result before the residual is added; None: there is none.
    `entry` and `output` are the matrices of the projections, as in every mixer.
    """

    def __init__(self, declared: Attention, tensors: LayerTensors, tables: LayerTables) -> None:
        form = declared.form
        self.backend = tensors.backend
        self.partial = declared.partial
        spec = tables.attention(tensors.layer, declared, tensors.eps)
        if form.qk_norm:
            q_norm, k_norm = tensors.vector("attn_q_norm"), tensors.vector("attn_k_norm")
            rotated = form.qk_norm == "rotated head"
            spec = replace(spec, q_norm=q_norm, k_norm=k_norm, norms_rotated=rotated)
        spec = replace(spec, gated=form.gated)
        self.spec = replace(spec, sinks=tensors.vector("attn_sinks")) if form.sinks else spec
        self.norm = tensors.norm("attn_norm", form.norms != "post")
        self.entry = tensors.weight(*_qkv(tensors, "weight"))
        self.entry_bias = tensors.vector(*_qkv(tensors, "bias"), kind="bias") if form.qkv_bias else None
        self.output = tensors.weight("attn_output")
        self.output_bias = tensors.vector("attn_output", kind="bias") if form.output_bias else None
        self.post_norm = tensors.norm("post_attention_norm", form.norms != "pre")

    def __call__(
        self,
        batch: ForwardBatch,
        x: Hidden,
        cache: KVLayer,
        next_norm: RMSNorm | None,
        rows: Tensor | None = None,
    ) -> Hidden:
        """`next_norm`: the norm that reads the result. `rows`: the rows to keep after the attention; None: all."""
        qkv = self.backend.norm_linear(batch, x, self.norm, self.entry, self.entry_bias)
        y = self.backend.attention(batch, qkv, self.spec, cache)
        if rows is not None:
            y, x = self.backend.gather_rows(y, rows), self.backend.gather_rows(x, rows)
        return self.backend.linear_add(
            *(batch, y, self.output, x, next_norm, self.post_norm, self.output_bias),
            partial=self.partial,
        )

    @property
    def nbytes(self) -> int:
        return int(self.entry.nbytes + self.output.nbytes)


def _qkv(tensors: LayerTensors, kind: str) -> list[str]:
    """The names of the query, key and value tensors: one merged tensor if it exists, or three."""
    return ["attn_qkv"] if tensors.has("attn_qkv", kind) else ["attn_q", "attn_k", "attn_v"]


class FeedForwardLayer:
    """Merged gate and up projection, or up alone, activation, down projection; norms as in AttentionLayer."""

    def __init__(self, declared: FeedForward, tensors: LayerTensors) -> None:
        form = declared.form
        self.backend = tensors.backend
        self.partial = declared.partial
        self.activation = form.activation
        self.norm = tensors.norm(form.ffn_norm, form.norms != "post")
        gate: QuantTensor | None
        if form.merged_gate:
            (merged,) = tensors.take("ffn_up")
            gate, up = merged.row_slices(declared.length)
        else:
            (up,) = tensors.take("ffn_up")
            gate = tensors.take("ffn_gate")[0] if form.has_gate else None
        self.ffn_gate_up = self.backend.gate_up_weight(gate, up)
        self.ffn_down = tensors.weight("ffn_down")
        self.post_norm = tensors.norm("post_ffw_norm", form.norms != "pre")

    def __call__(self, batch: ForwardBatch, x: Hidden, next_norm: RMSNorm | None) -> Hidden:
        """`next_norm`: the norm that reads the result."""
        gated = self.backend.norm_glu(batch, x, self.norm, self.ffn_gate_up, self.activation)
        return self.backend.linear_add(
            batch, gated, self.ffn_down, x, next_norm, self.post_norm, partial=self.partial
        )

    @property
    def nbytes(self) -> int:
        return int(self.ffn_gate_up.nbytes + self.ffn_down.nbytes)
