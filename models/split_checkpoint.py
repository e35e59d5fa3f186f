"""One rank's part of a checkpoint, itself a `Checkpoint`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quengine.models.checkpoint import Checkpoint
from quengine.models.config import Stage
from quengine.models.draft_layer import DraftTensors
from quengine.models.layer_split import StageTensors
from quengine.models.tensor_split import ModelSplit, Rank, SplitTensors
from quengine.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quengine.models.template.chat_template import ChatTemplate


class SplitCheckpoint:
    """One rank's part: a part of every layer (Rank), or the layers of a pipeline stage (Stage).

    Raises EngineError if that many ranks cannot share the model.
    """

    def __init__(self, whole: Checkpoint, part: Rank | Stage) -> None:
        self.whole, self.path = whole, whole.path
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

    @property
    def types(self) -> Mapping[str, int]:
        return self.whole.types

    @property
    def notes(self) -> list[str]:
        return self.whole.notes

    def draft_tensors(self) -> DraftTensors:
        return self.whole.draft_tensors()

    def release_pages(self) -> None:
        self.whole.release_pages()

    def tokenizer(self) -> Tokenizer:
        return self.whole.tokenizer()

    def chat_template(self, given: str | None = None) -> "ChatTemplate | None":
        return self.whole.chat_template(given)

    def close(self) -> None:
        self.whole.close()
