"""The decoder layers that most models have, on a backend."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor

from quengine.kernels.backend import Backend, Hidden, KVLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import LayerNorm, Norm
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.blocks import Norms
from quengine.models.blocks.attention import Attention
from quengine.models.blocks.feed_forward import FeedForward, FeedForwardForm
from quengine.models.layer_tables import LayerTables


class LayerTensors:
    """The tensors of a layer (`blk.3.`), or of no layer (None), loaded onto a backend by their short names.

    eps: of its norms, which are of `kind` ("rms" or "layer").
    """

    def __init__(
        self,
        tensors: Mapping[str, QuantTensor],
        layer: int | None,
        backend: Backend[Any],
        eps: float,
        kind: Literal["rms", "layer"] = "rms",
    ) -> None:
        self.tensors = tensors
        self.layer = -1 if layer is None else layer
        self.prefix = "" if layer is None else f"blk.{layer}."
        self.backend = backend
        self.eps, self.kind = eps, kind

    def take(self, *names: str, kind: str = "weight") -> list[QuantTensor]:
        """The tensors `names`, in order. `kind`: the end of their names, weight or bias; "": they have none.

        A name that is given twice is fetched once: a tensor on its way to a device can be taken only once.
        """
        ends = f".{kind}" if kind else ""
        found = {name: self.tensors[f"{self.prefix}{name}{ends}"] for name in dict.fromkeys(names)}
        return [found[name] for name in names]

    def has(self, name: str, kind: str = "weight") -> bool:
        return f"{self.prefix}{name}.{kind}" in self.tensors

    def weight(self, *names: str) -> Any:
        """Loads matrices that multiply the same input."""
        return self.backend.weight(self.take(*names))

    def vector(self, *names: str, kind: str = "weight") -> Tensor:
        return self.backend.vector(self.take(*names, kind=kind))

    def norm(self, name: str, there: bool = True) -> Norm | None:
        """The norm with weights `name`; None if `there` is false, as the architecture has no such norm."""
        return self.scaled_norm(name, 1.0) if there else None

    def scaled_norm(self, name: str, scale: float) -> Norm:
        """The norm with weights `name`, whose result is multiplied by `scale`."""

        def scaled(kind: str) -> Tensor:
            vector = self.vector(name, kind=kind)
            return vector if scale == 1.0 else vector * scale

        if self.kind == "rms":
            return RMSNorm(scaled("weight"), self.eps)
        return LayerNorm(scaled("weight"), scaled("bias") if self.has(name, "bias") else None, self.eps)

    def rms_norm(self, name: str, there: bool = True) -> RMSNorm | None:
        """As `norm`, for a norm that is an RMSNorm in every architecture."""
        return RMSNorm(self.vector(name), self.eps) if there else None

    def last_norm(self, norms: Norms) -> RMSNorm | None:
        """The norm of the feed-forward's result (see `ending_norm`); None: there is none."""
        return self.ending_norm("post_ffw_norm", norms) if norms.of_results else None

    def ending_norm(self, name: str, norms: Norms) -> RMSNorm:
        """The norm `name`, whose result a layer adds last. If `norms.scaled`, its weight and the residual are
        multiplied by the layer's output scale."""
        norm = RMSNorm(self.vector(name), self.eps)
        if not norms.scaled:
            return norm
        scale = self.vector("layer_output_scale")
        number = 1.0 if scale.is_meta else float(scale)  # kernels compiled ahead get it at run time
        return replace(norm, weight=norm.weight * scale, residual_scale=number)


class MixerLayer:
    """`norm`, the projection `entry`, the mixing of positions, the projection `output`, the residual.

    output: name of the output matrix. partial: each rank has some of the heads or channels, and results are summed over
    the ranks. normed: whether there is a norm before `entry`. post_norm: the norm of the result before the residual is
    added, or None.
    """

    entry_bias: Tensor | None = None
    output_bias: Tensor | None = None
    post_norm: RMSNorm | None = None

    def __init__(
        self, tensors: LayerTensors, entry: Any, output: str, partial: bool, normed: bool = True
    ) -> None:
        self.backend = tensors.backend
        self.partial = partial
        self.norm = tensors.norm("attn_norm", normed)
        self.entry = entry
        self.output = tensors.weight(output)

    def mix(self, batch: ForwardBatch, x: Hidden, state: Any) -> Hidden:
        """The input of `output`, computed from x, the result of `entry`. `state`: the layer's part of the cache, as
        declared by `Mixer.state`; it is read and written."""
        raise NotImplementedError

    def __call__(
        self, batch: ForwardBatch, x: Hidden, state: Any, next_norm: Norm | None, rows: Tensor | None = None
    ) -> Hidden:
        """`next_norm`: the norm that reads the result. `rows`: the rows to keep once they are mixed; None: all."""
        y = self.mix(batch, self.backend.norm_linear(batch, x, self.norm, self.entry, self.entry_bias), state)
        if rows is not None:
            y, x, batch = (
                self.backend.gather_rows(y, rows),
                self.backend.gather_rows(x, rows),
                batch.selected(rows),
            )
        return self.backend.linear_add(
            *(batch, y, self.output, x, next_norm, self.post_norm, self.output_bias), partial=self.partial
        )

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        return int(self.entry.nbytes + self.output.nbytes)


class AttentionLayer(MixerLayer):
    """Merged query, key and value projection, rotary causal attention over the cache, output projection."""

    def __init__(self, declared: Attention, tensors: LayerTensors, tables: LayerTables) -> None:
        form, norms = declared.form, declared.norms
        names = ["attn_q"] if declared.shared else qkv_names(tensors, "weight", declared.keys_as_values)
        super().__init__(tensors, tensors.weight(*names), "attn_output", declared.partial, norms.before_mixer)
        spec = tables.attention(tensors.layer, declared, tensors.eps)
        if form.qk_norm:
            q_norm = tensors.vector("attn_q_norm")
            k_norm = None if declared.shared else tensors.vector("attn_k_norm")
            rotated = form.qk_norm == "rotated head"
            spec = replace(spec, q_norm=q_norm, k_norm=k_norm, norms_rotated=rotated)
        if form.unit_norms:
            ones = torch.ones(declared.head_dim, dtype=self.backend.dtype, device=self.backend.device)
            spec = replace(spec, q_norm=ones, k_norm=ones, norms_rotated=True)
        spec = replace(spec, gated=form.gated)
        self.spec = replace(spec, sinks=tensors.vector("attn_sinks")) if form.sinks else spec
        self.entry_bias = tensors.vector(*qkv_names(tensors, "bias"), kind="bias") if form.qkv_bias else None
        self.output_bias = tensors.vector("attn_output", kind="bias") if form.output_bias else None
        self.post_norm = tensors.rms_norm("post_attention_norm", norms.of_results)

    def mix(self, batch: ForwardBatch, x: Hidden, state: KVLayer) -> Hidden:
        seen = batch.chunked if self.spec.chunk and batch.chunked is not None else batch
        return self.backend.attention(seen, x, self.spec, state)


def qkv_names(tensors: LayerTensors, kind: str, keys_as_values: bool = False) -> list[str]:
    """The names of the query, key and value tensors: one merged tensor if it exists, or three."""
    if tensors.has("attn_qkv", kind):
        return ["attn_qkv"]
    # The keys' matrix is loaded twice: it is small beside the rest, and no kernel needs another form.
    return ["attn_q", "attn_k", "attn_k" if keys_as_values else "attn_v"]


class SparseEntry:
    """As `FeedForwardEntry`, with sparse gates: only their excess over the row's cutoff counts (kernels/altup.py)."""

    def __init__(self, declared: FeedForward, tensors: LayerTensors) -> None:
        self.weight = tensors.weight("ffn_gate", "ffn_up")
        self._deviations = declared.cutoff

    def __call__(self, backend: Backend[Any], batch: ForwardBatch, x: Hidden, norm: Norm | None) -> Tensor:
        return backend.altup.gated(batch, x, norm, self.weight, self._deviations)

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes)


class FeedForwardEntry:
    """Merged gate and up projection, or up alone, and their activation. kind: the end of the matrices' names."""

    def __init__(self, form: FeedForwardForm, tensors: LayerTensors, kind: str = "") -> None:
        self.activation, self.pointwise = form.activation, form.pointwise
        if form.pointwise is not None:
            self.weight = tensors.weight(f"ffn_up{kind}")
        elif form.merged_gate:
            (merged,) = tensors.take(f"ffn_up{kind}")
            self.weight = tensors.backend.gate_up_weight(*merged.row_slices(merged.rows // 2))
        else:
            self.weight = tensors.backend.gate_up_weight(*tensors.take(f"ffn_gate{kind}", f"ffn_up{kind}"))

    def __call__(self, backend: Backend[Any], batch: ForwardBatch, x: Hidden, norm: Norm | None) -> Hidden:
        """The input of the down projection, computed from `norm` of x."""
        if self.pointwise is not None:
            return backend.norm_pointwise(batch, x, norm, self.weight, self.pointwise)
        return backend.norm_glu(batch, x, norm, self.weight, self.activation)

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes)


class FeedForwardLayer:
    """`FeedForwardEntry`, then the down projection; norms as in AttentionLayer."""

    def __init__(self, declared: FeedForward, tensors: LayerTensors) -> None:
        norms = declared.norms
        self.backend = tensors.backend
        self.partial = declared.partial
        self.norm = tensors.norm(norms.ffn, norms.before_ffn)
        sparse = declared.cutoff > -inf
        self.entry = SparseEntry(declared, tensors) if sparse else FeedForwardEntry(declared.form, tensors)
        self.ffn_down = tensors.weight("ffn_down")
        self.post_norm = tensors.last_norm(norms)

    def __call__(self, batch: ForwardBatch, x: Hidden, next_norm: Norm | None) -> Hidden:
        """`next_norm`: the norm that reads the result."""
        return self.down(batch, self.inner(batch, x), x, next_norm)

    def down(self, batch: ForwardBatch, inner: Hidden, x: Hidden, next_norm: Norm | None) -> Hidden:
        """The down projection of `inner`, the result of the method `inner`, added to `x`."""
        return self.backend.linear_add(
            *(batch, inner, self.ffn_down, x, next_norm, self.post_norm), partial=self.partial
        )

    def inner(self, batch: ForwardBatch, x: Hidden) -> Hidden:
        """The input of the down projection."""
        return self.entry(self.backend, batch, x, self.norm)

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes + int(self.ffn_down.nbytes)
