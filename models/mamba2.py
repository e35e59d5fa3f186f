"""Mamba2's state space layer on a backend (blocks/mamba2.py)."""

from quengine.kernels.backend import Hidden, SlotLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.mamba2 import Mamba2Spec
from quengine.models.blocks.mamba2 import Mamba2
from quengine.models.layer_tables import LayerTables
from quengine.models.layers import LayerTensors, MixerLayer


class Mamba2Layer(MixerLayer):
    """`norm`, the projection to z, x, B, C and dt, the state space layer, the output projection, the residual."""

    def __init__(self, declared: Mamba2, tensors: LayerTensors, tables: LayerTables) -> None:
        super().__init__(tensors, tensors.weight("ssm_in"), "ssm_out", declared.partial)
        sizes = declared.sizes
        conv = tensors.vector("ssm_conv1d").view(sizes.channels, sizes.taps).T.contiguous()
        bias = (
            tensors.vector("ssm_conv1d", kind="bias") if sizes.conv_bias else conv.new_zeros(sizes.channels)
        )
        self.spec = Mamba2Spec(
            conv=conv,
            conv_bias=bias,
            decay=tensors.vector("ssm_a", kind=""),
            bias=tensors.vector("ssm_dt", kind="bias"),
            skip=tensors.vector("ssm_d", kind=""),
            norm=tensors.vector("ssm_norm"),
            heads=sizes.heads,
            head_dim=sizes.head_dim,
            groups=sizes.groups,
            state_dim=sizes.state_dim,
            step_limits=sizes.step_limits,
            eps=sizes.eps,
            cache_group=tables.cache_group(tensors.layer),
        )
        self.backend.check_mamba2(self.spec)

    def mix(self, batch: ForwardBatch, x: Hidden, state: SlotLayer) -> Hidden:
        return self.backend.mamba2(batch, x, self.spec, state)
