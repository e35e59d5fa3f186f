"""The layer that drafts tokens as a checkpoint of its own: see models/draft_layer.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quengine.models.checkpoint import Checkpoint, PartOfCheckpoint
from quengine.models.config import ModelConfig
from quengine.models.draft_layer import DraftTensors, layer_config

if TYPE_CHECKING:
    from quengine.kernels.quant_tensor import QuantTensor


class DraftLayer(PartOfCheckpoint):
    """The layer that drafts tokens for the model `target`, as a `Checkpoint` of one layer. vocabulary: the number of
    tokens that it drafts from, as for `layer_config`.

    Raises EngineError where the model has no such layer, or none that is implemented.
    """

    def __init__(self, target: Checkpoint, vocabulary: int = 0) -> None:
        super().__init__(target)
        self.path: Path = target.path
        self.config: ModelConfig = layer_config(target.config, vocabulary)
        self._held: DraftTensors = target.draft_tensors()

    @property
    def tensors(self) -> "Mapping[str, QuantTensor]":
        return self._held.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of its own tensors: the embedding and the output matrix are the target's."""
        return self._held.nbytes

    @property
    def weights(self) -> int:
        return self._held.weights

    @property
    def types(self) -> Mapping[str, int]:
        return {}

    @property
    def notes(self) -> list[str]:
        return []

    def draft_tensors(self) -> DraftTensors:
        return self._held

    def close(self) -> None:
        """The target closes its files."""
