"""The part of an EAGLE-3 draft model that its target's steps compute: see models/eagle.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from quengine.kernels.backend import Backend, Hidden
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.quant_tensor import QuantTensor


class FusedRows:
    """The rows g that a target's steps keep for a draft model: `fc` applied to the inputs of some target layers.

    Args:
        layers: numbers of these layers, in order; the number of all layers stands for the output of the last.
        weights: for each of them, the columns of `fc` that multiply its input.
        kept: fp32 [rows, width], where the rows are kept (kernels/hidden_rows.py).
        backend: holds the weights.

    `last`: the largest number in `layers`.
    """

    def __init__(
        self, layers: Sequence[int], weights: Sequence[Any], kept: Tensor, backend: Backend[Any]
    ) -> None:
        self._weights = dict(zip(layers, weights, strict=True))
        self.last, self._backend, self.kept = max(layers), backend, kept

    @classmethod
    def load(
        cls, layers: Sequence[int], tensors: Mapping[str, QuantTensor], kept: Tensor, backend: Backend[Any]
    ) -> "FusedRows":
        """Loads the tensors of an `eagle_checkpoint.Fusion`."""
        weights = [backend.weight([tensors[f"fc.{number}.weight"]]) for number in range(len(layers))]
        return cls(layers, weights, kept, backend)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        return sum(int(weight.nbytes) for weight in self._weights.values())

    def add(self, batch: ForwardBatch, layer: int, x: Hidden, fused: Hidden | None) -> Hidden | None:
        """Adds the product of this layer's input x to `fused`, the sum over earlier layers; keeps the last sum."""
        if layer not in self._weights:
            return fused
        fused = self._backend.fused(batch, x, self._weights[layer], fused)
        if layer == self.last:
            self._backend.keep_hidden(batch, fused, None, self.kept)
        return fused
