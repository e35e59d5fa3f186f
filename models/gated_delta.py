"""The gated delta net of a layer on a backend (blocks/gated_delta.py)."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from quengine.kernels.backend import Hidden, SlotLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.blocks.gated_delta import GatedDelta, GatedDeltaSizes
from quengine.models.layer_tables import LayerTables
from quengine.models.layers import LayerTensors, MixerLayer


class GatedDeltaLayer(MixerLayer):
    """`norm`, the projections to qkv, z, beta and alpha, the gated delta net, the output projection, the residual."""

    def __init__(self, declared: GatedDelta, tensors: LayerTensors, tables: LayerTables) -> None:
        sizes = declared.sizes
        entry = tensors.backend.weight([*_qkvz(sizes, tensors), *_gates(sizes, tensors)])
        super().__init__(tensors, entry, "ssm_out", declared.partial)
        conv = tensors.vector("ssm_conv1d").view(sizes.channels, sizes.taps)
        self.spec = GatedDeltaSpec(
            conv=conv.T.contiguous(),
            decay=tensors.vector("ssm_a", kind=""),
            bias=tensors.vector("ssm_dt", kind="bias"),
            norm=tensors.vector("ssm_norm"),
            key_heads=sizes.key_heads,
            value_heads=sizes.value_heads,
            head_dim=sizes.head_dim,
            tiled=sizes.tiled,
            eps=tensors.eps,
            cache_group=tables.cache_group(tensors.layer),
        )
        self.backend.check_gated_delta(self.spec)

    def mix(self, batch: ForwardBatch, x: Hidden, state: SlotLayer) -> Hidden:
        return self.backend.gated_delta(batch, x, self.spec, state)


def _qkvz(sizes: GatedDeltaSizes, tensors: LayerTensors) -> list[QuantTensor]:
    """The matrices of qkv and z; copies if a file holds their rows together, key head by key head."""
    if not tensors.has("ssm_in"):
        return tensors.take("attn_qkv", "attn_gate")
    (together,) = tensors.take("ssm_in")
    q, k, v, z = sizes.rows_of_qkvz()
    return [_picked(together, chain(q, k, v)), _picked(together, z)]


def _gates(sizes: GatedDeltaSizes, tensors: LayerTensors) -> list[QuantTensor]:
    """The matrices of beta and alpha."""
    if not sizes.by_key_head:
        return tensors.take("ssm_beta", "ssm_alpha")
    (together,) = tensors.take("ssm_ba")
    return [_picked(together, rows) for rows in sizes.rows_of_ba()]


def _picked(tensor: QuantTensor, rows: Iterable[int]) -> QuantTensor:
    """A copy of the rows `rows` of a matrix."""
    data = tensor.data[list(rows)]
    return replace(tensor, shape=(len(data), tensor.cols), data=data)
