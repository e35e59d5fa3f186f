"""The gated short convolution of a layer on a backend (blocks/short_conv.py)."""

from torch import Tensor

from quengine.kernels.backend import Hidden, SlotLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.short_conv import ShortConvSpec
from quengine.models.blocks.short_conv import ShortConv
from quengine.models.layer_tables import LayerTables
from quengine.models.layers import LayerTensors


class ShortConvLayer:
    """`norm`, the projection to b, c and x, the convolution, the output projection, the residual."""

    def __init__(self, declared: ShortConv, tensors: LayerTensors, tables: LayerTables) -> None:
        self.backend = tensors.backend
        self.partial = declared.partial
        self.norm = tensors.norm("attn_norm")
        self.entry = tensors.weight("shortconv.in_proj")
        self.output = tensors.weight("shortconv.out_proj")
        weight = tensors.vector("shortconv.conv").view(declared.channels, declared.taps)
        self.spec = ShortConvSpec(weight.T.contiguous(), tables.cache_group(tensors.layer))

    def __call__(
        self,
        batch: ForwardBatch,
        x: Hidden,
        state: SlotLayer,
        next_norm: RMSNorm | None,
        rows: Tensor | None = None,
    ) -> Hidden:
        """`next_norm`: the norm that reads the result. `rows`: the rows to keep after the convolution; None: all."""
        bcx = self.backend.norm_linear(batch, x, self.norm, self.entry)
        y = self.backend.short_conv(batch, bcx, self.spec, state)
        if rows is not None:
            y, x = self.backend.gather_rows(y, rows), self.backend.gather_rows(x, rows)
        return self.backend.linear_add(batch, y, self.output, x, next_norm, partial=self.partial)

    @property
    def nbytes(self) -> int:
        return int(self.entry.nbytes + self.output.nbytes)
