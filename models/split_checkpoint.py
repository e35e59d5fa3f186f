"""One rank's part of a checkpoint, itself a `Checkpoint`."""

from collections.abc import Mapping
from dataclasses import replace

from quengine.kernels.lora.change import LowRank
from quengine.models.checkpoint import Checkpoint, PartOfCheckpoint
from quengine.models.config import Stage
from quengine.models.layer_split import StageTensors
from quengine.models.tensor_split import ModelSplit, Rank, SplitTensors
from quengine.models.tensor_table import holder_of


class SplitCheckpoint(PartOfCheckpoint):
    """One rank's part: a part of every layer (Rank), or the layers of a pipeline stage (Stage).

    Raises EngineError if that many ranks cannot share the model.
    """

    def __init__(self, whole: Checkpoint, part: Rank | Stage) -> None:
        super().__init__(whole)
        self.path = whole.path
        self._split: ModelSplit | None = None
        self.tensors: SplitTensors | StageTensors
        if isinstance(part, Stage):
            self.config = replace(whole.config, stage=part)
            self.tensors = StageTensors(whole.tensors, part)
        else:
            self._split = ModelSplit(whole.config, whole.tensors, part)
            self.config = self._split.config
            self.tensors = SplitTensors(whole.tensors, self._split)
        sizes = list(self.tensors.sizes())
        self.nbytes = sum(nbytes for _, nbytes, _ in sizes)
        self.weights = sum(weights for _, _, weights in sizes)

    def changes(self, changes: Mapping[str, LowRank]) -> dict[str, LowRank]:
        """The part of a LoRA adapter's changes that applies to the tensors of this rank or stage."""
        if self._split is not None:
            return {name: self._split.change(name, change) for name, change in changes.items()}
        held = {name for name in changes if name in self.tensors or holder_of(name) in self.tensors}
        if self.config.tied_output and "token_embd.weight" in self.tensors:
            held.add("output.weight")
        return {name: change for name, change in changes.items() if name in held}
