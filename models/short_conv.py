"""The gated short convolution of a layer on a backend (blocks/short_conv.py)."""

from quengine.kernels.backend import Hidden, SlotLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.short_conv import ShortConvSpec
from quengine.models.blocks.short_conv import ShortConv
from quengine.models.layer_tables import LayerTables
from quengine.models.layers import LayerTensors, MixerLayer


class ShortConvLayer(MixerLayer):
    """`norm`, the projection to b, c and x, the convolution, the output projection, the residual."""

    def __init__(self, declared: ShortConv, tensors: LayerTensors, tables: LayerTables) -> None:
        super().__init__(tensors, tensors.weight("shortconv.in_proj"), "shortconv.out_proj", declared.partial)
        weight = tensors.vector("shortconv.conv").view(declared.channels, declared.taps)
        self.spec = ShortConvSpec(weight.T.contiguous(), tables.cache_group(tensors.layer))

    def mix(self, batch: ForwardBatch, x: Hidden, state: SlotLayer) -> Hidden:
        return self.backend.short_conv(batch, x, self.spec, state)
