"""The latent attention of a layer on a backend (blocks/latent_attention.py)."""

from dataclasses import replace

import torch
from torch import Tensor

from quengine.kernels.backend import Hidden, KVLayer
from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import Norm
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.blocks.latent_attention import LatentAttention
from quengine.models.layer_tables import LayerTables
from quengine.models.layers import LayerTensors


class LatentAttentionLayer:
    """`norm`, the projection `entry` to both latents, that of queries, latent attention, `output`, the residual."""

    def __init__(self, declared: LatentAttention, tensors: LayerTensors, tables: LayerTables) -> None:
        sizes = declared.sizes
        self.backend = tensors.backend
        self.norm = tensors.norm("attn_norm")
        self.entry = tensors.weight("attn_q_a" if sizes.query_rank else "attn_q", "attn_kv_a_mqa")
        self.query_norm = self.queries = None
        if sizes.query_rank:
            self.query_norm = RMSNorm(tensors.vector("attn_q_a_norm"), sizes.eps)
            self.queries = tensors.weight("attn_q_b")
        self.output = tensors.weight("attn_output")
        absorb, expand = _of_heads(declared, tensors)
        self.spec = replace(
            tables.latent(tensors.layer, declared),
            norm=tensors.vector("attn_kv_a_norm"),
            absorb=self.backend.down_experts(absorb),
            expand=self.backend.down_experts(expand),
        )
        self.backend.check_latent(self.spec)

    def __call__(
        self,
        batch: ForwardBatch,
        x: Hidden,
        cache: KVLayer,
        next_norm: Norm | None,
        rows: Tensor | None = None,
    ) -> Hidden:
        """`next_norm`: the norm that reads the result. `rows`: the rows to keep after the attention; None: all."""
        backend, spec = self.backend, self.spec
        both = backend.norm_linear(batch, x, self.norm, self.entry)
        first = self.entry.rows - spec.row
        q, latent = backend.columns(both, 0, first), backend.columns(both, first, self.entry.rows)
        if self.queries is not None:
            q = backend.norm_linear(batch, q, self.query_norm, self.queries)
        y = backend.latent_attention(batch, q, latent, spec, cache)
        if rows is not None:
            y, x = backend.gather_rows(y, rows), backend.gather_rows(x, rows)
        return backend.linear_add(batch, y, self.output, x, next_norm)

    @property
    def nbytes(self) -> int:
        weights = [self.entry, self.output, self.spec.absorb, self.spec.expand]
        return int(
            sum(w.nbytes for w in weights if w is not None) + (self.queries.nbytes if self.queries else 0)
        )


def _of_heads(
    declared: LatentAttention, tensors: LayerTensors
) -> tuple[list[QuantTensor], list[QuantTensor]]:
    """The matrices of the heads' queries, [rank, plain] each, and of their values, [values, rank]."""
    if tensors.has("attn_k_b"):
        absorb, expand = tensors.take("attn_k_b", "attn_v_b")
        return absorb.matrices(), expand.matrices()
    (both,) = tensors.take("attn_kv_b")
    plain, values = declared.sizes.plain, declared.sizes.values
    heads = both.row_slices(plain + values)
    return [_transposed(_rows(head, 0, plain)) for head in heads], [
        _rows(head, plain, plain + values) for head in heads
    ]


def _rows(tensor: QuantTensor, first: int, last: int) -> QuantTensor:
    return replace(tensor, shape=(last - first, tensor.cols), data=tensor.data[first:last])


def _transposed(tensor: QuantTensor) -> QuantTensor:
    """A copy, the other way round; of a quantized one in F32, since its blocks lie along the other side."""
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(tensor.format.name)
    if stored is None:
        values, name = dequantize(tensor.format, tensor.data), "F32"
    else:
        values, name = tensor.data.view(stored), tensor.format.name
    data = values.view(tensor.shape).T.contiguous().view(torch.uint8)
    return QuantTensor(tensor.name, FORMATS[name], (tensor.cols, tensor.rows), data)
