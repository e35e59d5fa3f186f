"""The latent attention of a layer on a backend (blocks/latent_attention.py)."""

from dataclasses import replace

import torch

from quengine.kernels.backend import Hidden, KVLayer
from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.blocks.latent_attention import LatentAttention
from quengine.models.layer_tables import LayerTables
from quengine.models.layers import LayerTensors, MixerLayer


class LatentAttentionLayer(MixerLayer):
    """`norm`, the projection `entry` to both latents, that to queries, latent attention, `output`, the residual."""

    def __init__(self, declared: LatentAttention, tensors: LayerTensors, tables: LayerTables) -> None:
        sizes = declared.sizes
        entry = tensors.weight("attn_q_a" if sizes.query_rank else "attn_q", "attn_kv_a_mqa")
        super().__init__(tensors, entry, "attn_output", partial=False)
        self.query_norm = self.queries = None
        if sizes.query_rank:
            self.query_norm = RMSNorm(tensors.vector("attn_q_a_norm"), sizes.eps)
            self.queries = tensors.weight("attn_q_b")
        absorb, expand = _of_heads(declared, tensors)
        self.spec = replace(
            tables.latent(tensors.layer, declared),
            norm=tensors.vector("attn_kv_a_norm"),
            absorb=self.backend.down_experts(absorb),
            expand=self.backend.down_experts(expand),
        )
        self.backend.check_latent(self.spec)

    def mix(self, batch: ForwardBatch, x: Hidden, state: KVLayer) -> Hidden:
        backend, first = self.backend, self.entry.rows - self.spec.row
        q, latent = backend.columns(x, 0, first), backend.columns(x, first, self.entry.rows)
        if self.queries is not None:
            q = backend.norm_linear(batch, q, self.query_norm, self.queries)
        return backend.latent_attention(batch, q, latent, self.spec, state)

    @property
    def nbytes(self) -> int:
        weights = [self.queries, self.spec.absorb, self.spec.expand]
        return super().nbytes + int(sum(w.nbytes for w in weights if w is not None))


def _of_heads(
    declared: LatentAttention, tensors: LayerTensors
) -> tuple[list[QuantTensor], list[QuantTensor]]:
    """Each head's attn_k_b, [rank, plain], and attn_v_b, [values, rank]."""
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
    """A transposed copy; F32 if the tensor is quantized, since its blocks lie along rows."""
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(tensor.format.name)
    if stored is None:
        values, name = dequantize(tensor.format, tensor.data), "F32"
    else:
        values, name = tensor.data.view(stored), tensor.format.name
    data = values.view(tensor.shape).T.contiguous().view(torch.uint8)
    return QuantTensor(tensor.name, FORMATS[name], (tensor.cols, tensor.rows), data)
