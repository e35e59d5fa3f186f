"""A mixer that keeps a state of a fixed size, on a backend: the projections around what it does with positions."""

from typing import Any

from torch import Tensor

from quengine.kernels.backend import Hidden, SlotLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import Norm
from quengine.models.layers import LayerTensors


class SlotMixerLayer:
    """`norm`, the projection `entry`, the mixing of positions, the projection `output`, the residual.

    partial: a rank has some of the channels or heads, and `output` is summed over the ranks.
    """

    def __init__(self, tensors: LayerTensors, entry: Any, output: str, partial: bool) -> None:
        self.backend = tensors.backend
        self.partial = partial
        self.norm = tensors.norm("attn_norm")
        self.entry = entry
        self.output = tensors.weight(output)

    def mix(self, batch: ForwardBatch, x: Hidden, state: SlotLayer) -> Hidden:
        """What `output` is given, from the rows x of `entry`; `state` is read and written."""
        raise NotImplementedError

    def __call__(
        self,
        batch: ForwardBatch,
        x: Hidden,
        state: SlotLayer,
        next_norm: Norm | None,
        rows: Tensor | None = None,
    ) -> Hidden:
        """`next_norm`: the norm that reads the result. `rows`: the rows to keep once they are mixed; None: all."""
        y = self.mix(batch, self.backend.norm_linear(batch, x, self.norm, self.entry), state)
        if rows is not None:
            y, x = self.backend.gather_rows(y, rows), self.backend.gather_rows(x, rows)
        return self.backend.linear_add(batch, y, self.output, x, next_norm, partial=self.partial)

    @property
    def nbytes(self) -> int:
        return int(self.entry.nbytes + self.output.nbytes)
