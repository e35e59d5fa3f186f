"""The interface of an opened model in any file format: configuration, tensors by GGUF name, tokenizer, template."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quengine.models.config import ModelConfig
from quengine.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quengine.kernels.lora.change import LowRank
    from quengine.kernels.quant_tensor import QuantTensor
    from quengine.models.draft_layer import DraftTensors
    from quengine.models.template.chat_template import ChatTemplate


class Checkpoint(Protocol):
    """A model on disk, mapped but not read: its tensors are views, read when they are computed with."""

    path: Path
    config: ModelConfig

    @property
    def tensors(self) -> "Mapping[str, QuantTensor]":
        """Every tensor of the decoder by its GGUF name."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        ...

    @property
    def weights(self) -> int:
        """Number of elements of all tensors."""
        ...

    @property
    def types(self) -> Mapping[str, int]:
        """Number of tensors of each storage type, the most frequent type first."""
        ...

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how this model is stored, one line each."""
        ...

    def draft_tensors(self) -> "DraftTensors":
        """The tensors of the layer that drafts tokens. Raises EngineError if there is none, or it is not supported."""
        ...

    def adapters(self) -> "Mapping[str, Mapping[str, LowRank]]":
        """An encoder's adapters: task -> GGUF name of a matrix -> its change for that task. Raises EngineError."""
        ...

    def release_pages(self) -> None:
        """Lets the system drop the pages of the mapped files; they are read again when needed."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def chat_template(self, given: str | None = None) -> "ChatTemplate | None":
        """The model's chat template, or the one that `given` names or contains."""
        ...

    def close(self) -> None: ...


class PartOfCheckpoint:
    """The part of the interface that a checkpoint within or beside another, `whole`, takes from `whole`."""

    def __init__(self, whole: Checkpoint) -> None:
        self.whole = whole

    @property
    def types(self) -> Mapping[str, int]:
        return self.whole.types

    @property
    def notes(self) -> list[str]:
        return self.whole.notes

    def draft_tensors(self) -> "DraftTensors":
        return self.whole.draft_tensors()

    def adapters(self) -> "Mapping[str, Mapping[str, LowRank]]":
        return self.whole.adapters()

    def release_pages(self) -> None:
        self.whole.release_pages()

    def tokenizer(self) -> Tokenizer:
        return self.whole.tokenizer()

    def chat_template(self, given: str | None = None) -> "ChatTemplate | None":
        return self.whole.chat_template(given)

    def close(self) -> None:
        self.whole.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a GGUF file (or any shard of a split one) or a Hugging Face checkpoint folder.

    Raises:
        EngineError: the file or folder is not a model that this engine runs; the message says why.
    """
    if path.is_dir():
        from quengine.models.hf.hf_checkpoint import HFCheckpoint

        return HFCheckpoint(path)
    from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)
