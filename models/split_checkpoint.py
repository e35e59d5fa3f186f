"""One rank's part of a checkpoint, itself a `Checkpoint`."""

from dataclasses import replace

from quengine.models.checkpoint import Checkpoint, PartOfCheckpoint
from quengine.models.config import Stage
from quengine.models.layer_split import StageTensors
from quengine.models.tensor_split import ModelSplit, Rank, SplitTensors


class SplitCheckpoint(PartOfCheckpoint):
    """One rank's part: a part of every layer (Rank), or the layers of a pipeline stage (Stage).

    Raises EngineError if that many ranks cannot share the model.
    """

    def __init__(self, whole: Checkpoint, part: Rank | Stage) -> None:
        super().__init__(whole)
        self.path = whole.path
        self.tensors: SplitTensors | StageTensors
        if isinstance(part, Stage):
            self.config = replace(whole.config, stage=part)
            self.tensors = StageTensors(whole.tensors, part)
        else:
            split = ModelSplit(whole.config, whole.tensors, part)
            self.config = split.config
            self.tensors = SplitTensors(whole.tensors, split)
        sizes = list(self.tensors.sizes())
        self.nbytes = sum(nbytes for _, nbytes, _ in sizes)
        self.weights = sum(weights for _, _, weights in sizes)
