"""One way to open a model, whatever it is stored as: configuration, tensors by GGUF name, tokenizer, template."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quengine.models.config import ModelConfig
from quengine.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quengine.kernels.quant_tensor import QuantTensor
    from quengine.models.template.chat_template import ChatTemplate


class Checkpoint(Protocol):
    """A model on disk, mapped and not read: tensors are views until something computes with them."""

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
        """How many numbers the tensors hold."""
        ...

    @property
    def types(self) -> Mapping[str, int]:
        """How many tensors are stored as each type, the most frequent first."""
        ...

    @property
    def notes(self) -> list[str]:
        """What the user should know of how this model is held, one line each."""
        ...

    def release_pages(self) -> None:
        """Let the system drop pages of the mapped files; they are read again when they are needed."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def chat_template(self, given: str | None = None) -> "ChatTemplate | None":
        """The model's template, or the one that `given` names or is."""
        ...

    def close(self) -> None: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file (or any shard of a split one) or a Hugging Face checkpoint folder.

    Raises:
        EngineError: the file or folder is not a model this engine runs; the message says why.
    """
    if path.is_dir():
        from quengine.models.hf.hf_checkpoint import HFCheckpoint

        return HFCheckpoint(path)
    from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)
