"""A GGUF model as the decoder wants it: configuration, checked tensors, tokenizer, template.

torch is imported with the first tensor, so that `engine show` and the server's own process do without it.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from quengine.kernels.lora.change import LowRank
from quengine.models.architectures import DECLARED
from quengine.models.draft_layer import DraftTensors, no_draft_layer, tensors_of_gguf
from quengine.models.gguf import GGUFTensor, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.lora.task_files import read_tasks, with_tasks
from quengine.models.tensor_table import (
    check_tensors,
    draft_note,
    draft_tensors,
    keys_of_sharing_layers,
    tensor_scales,
)
from quengine.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quengine.kernels.quant_tensor import QuantTensor
    from quengine.models.template.chat_template import ChatTemplate


class GGUFCheckpoint:
    """See the module docstring; implements models.checkpoint.Checkpoint.

    Raises:
        GGUFError: the file is malformed, or lacks a tensor the architecture needs.
        EngineError: the architecture is not one of those supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = open_gguf(path)
        self.config = read_gguf_config(self.file)
        check_tensors(self.file, self.config)
        if DECLARED[self.config.architecture].adapts:
            self.config = with_tasks(self.config, path)
        self._drafts = draft_tensors(self.config, self.file.tensors)
        unused = {*self._drafts, *keys_of_sharing_layers(self.config)}
        self._stored = {name: t for name, t in self.file.tensors.items() if name not in unused}

    @cached_property
    def tensors(self) -> "dict[str, QuantTensor]":
        from quengine.models.gguf.gguf_tensors import quant_tensor

        scales = {name: self._stored[scale] for name, scale in tensor_scales(self._stored).items()}
        return {name: quant_tensor(tensor, scales.get(name)) for name, tensor in self._stored.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._stored.values())

    @property
    def weights(self) -> int:
        return sum(prod(tensor.shape) for tensor in self._stored.values())

    @property
    def types(self) -> dict[str, int]:
        return dict(Counter(tensor.type_name for tensor in self._stored.values()).most_common())

    @property
    def notes(self) -> list[str]:
        notes, scaled = draft_note(self.config, self._drafts), tensor_scales(self._stored)
        if scaled:
            gib = sum(self._stored[name].nbytes for name in scaled) * 37 / 36 / 2**30
            notes.append(f"{len(scaled)} tensors of NVFP4 are copied with their scales: {gib:.2f} GiB")
        ternary = [tensor.nbytes for tensor in self._stored.values() if tensor.type_name == "TQ1_0"]
        if ternary:
            gib = sum(ternary) * 66 / 54 / 2**30
            notes.append(
                f"{len(ternary)} tensors of TQ1_0 take 2.06 bits a weight on CUDA, as TQ2_0: {gib:.2f} GiB"
            )
        return notes

    def draft_tensors(self) -> DraftTensors:
        if (problem := no_draft_layer(self.config, self.path.name, self.config.draft_layers > 0)) is not None:
            raise problem
        from quengine.models.gguf.gguf_tensors import quant_tensor

        stored = tensors_of_gguf(self.file, self.config)
        scales = {name: stored[scale] for name, scale in tensor_scales(stored).items()}
        tensors = {name: quant_tensor(tensor, scales.get(name)) for name, tensor in stored.items()}
        nbytes, weights = (sum(counts) for counts in zip(*map(_size, stored.values()), strict=True))
        return DraftTensors(tensors, nbytes, weights)

    def adapters(self) -> Mapping[str, Mapping[str, LowRank]]:
        return read_tasks(self.config)

    def release_pages(self) -> None:
        self.file.release_pages()

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self.file)

    def chat_template(self, given: str | None = None) -> "ChatTemplate | None":
        from quengine.models.template.chat_template import ChatTemplate

        return ChatTemplate.from_gguf(self.file, given)

    def close(self) -> None:
        self.file.close()


def _size(tensor: GGUFTensor) -> tuple[int, int]:
    """(bytes, elements) of a tensor."""
    return tensor.nbytes, prod(tensor.shape)
