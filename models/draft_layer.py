"""The layer that drafts tokens, which a model's files may have after the others: multi-token prediction (MTP).

It is a model of one layer over the target's embedding and output matrix. From a token and the hidden row of the
position before it, after the final norm, it makes `eh_proj [rms(embedding, enorm) | rms(hidden row, hnorm)]`. A layer
of the architecture follows, which attends to these rows of all positions so far. Then come its own norm and the output
matrix, whose logits are of the token after the next. Drafts after the first read this layer's own rows instead of
hidden rows. Sources: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2; llama.cpp's graphs of qwen35; vLLM's Qwen3NextMTP.

Of several such layers in a file, the first is computed. Some files repeat the embedding and the output matrix for it;
these copies are not read, as they equal the target's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from quengine.errors import EngineError
from quengine.models.architectures import ARCHITECTURES
from quengine.models.blocks.block import TensorSpec
from quengine.models.config import ModelConfig
from quengine.models.tensor_table import check_tensors, tensor_specs

if TYPE_CHECKING:
    from quengine.kernels.quant_tensor import QuantTensor
    from quengine.models.gguf import GGUFError, GGUFFile, GGUFTensor

EH_PROJ, ENORM, HNORM = (f"blk.0.nextn.{name}" for name in ("eh_proj", "enorm", "hnorm"))
"""The tensors beside those of a layer, without .weight."""

_HEAD_NORM = "nextn.shared_head_norm.weight"
_NORM = "output_norm.weight"
_COPIES = frozenset({"blk.0.nextn.embed_tokens.weight", "blk.0.nextn.shared_head_head.weight"})


VOCABULARY_UNIT = 128
"""Rows of the output matrix that a layer drafts from are a multiple of this, or all."""


def layer_config(config: ModelConfig, vocabulary: int = 0) -> ModelConfig:
    """The first layer that drafts, as a model of one layer. vocabulary: the number of first tokens, rounded up,
    that it drafts from; in a vocabulary made by merges they are the most frequent. 0: from all."""
    first = -(-vocabulary // VOCABULARY_UNIT) * VOCABULARY_UNIT or config.vocab_size
    return replace(
        config,
        vocab_size=min(config.vocab_size, first),
        block_count=1,
        draft_layers=0,
        recurrent_layers=(),
        unrotated_layers=(),
        experts=config.experts and replace(config.experts, dense_layers=()),
        output_norm="output_norm",
        is_draft_layer=True,
    )


def name_in_file(name: str, layer: int) -> str | None:
    """The GGUF name of a tensor of the layer that drafts, which is layer number `layer` of the file; None: the tensor
    is the target's."""
    if name == _NORM:
        return f"blk.{layer}.{_HEAD_NORM}"
    own = name.removeprefix("blk.0.")
    return None if own == name else f"blk.{layer}.{own}"


def stored_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """The tensors of the layers that draft, by the names that GGUF files have for them."""
    own = tensor_specs(layer_config(config)) if config.draft_layers else {}
    layers = range(config.block_count, config.block_count + config.draft_layers)
    return {
        found: spec
        for layer in layers
        for name, spec in own.items()
        if (found := name_in_file(name, layer)) is not None
    }


def no_draft_layer(config: ModelConfig, name: str, held: bool) -> EngineError | None:
    """Why no layer of the model `name` drafts tokens; None: one does. held: its files have such layers."""
    if not held:
        return EngineError(f"{name} has no layer that drafts tokens (MTP); leave out --draft-mtp")
    if ARCHITECTURES[config.architecture].draft_names is None:
        return EngineError(
            f"{name} has a layer that drafts tokens (MTP), which is not implemented for {config.architecture}; leave "
            "out --draft-mtp"
        )
    return None


class DraftTensors(NamedTuple):
    """The tensors of the layer that drafts, by their names in a model of one layer; their bytes and elements."""

    tensors: "Mapping[str, QuantTensor]"
    nbytes: int
    weights: int


class _LayerOfFile:
    """A GGUF file's layer `number`, with names as in a model of one layer; errors have the file's names.

    norm: the norm before the output matrix, for a layer without its own.
    """

    def __init__(self, file: "GGUFFile", number: int, norm: str) -> None:
        self._file, self._begin, self.path = file, f"blk.{number}.", file.path
        self.tensors: dict[str, GGUFTensor] = {}
        for name, tensor in file.tensors.items():
            if name.startswith(self._begin):
                own = name.removeprefix(self._begin)
                self.tensors[_NORM if own == _HEAD_NORM else f"blk.0.{own}"] = tensor
        self.tensors.setdefault(_NORM, file.tensors[norm])

    def tensor_error(self, name: str, problem: str) -> "GGUFError":
        own = _HEAD_NORM if name == _NORM else name.removeprefix("blk.0.")
        return self._file.tensor_error(f"{self._begin}{own}", problem)


def tensors_of_gguf(file: "GGUFFile", config: ModelConfig) -> "dict[str, GGUFTensor]":
    """The tensors of a file's first layer that drafts, by their names in a model of one layer.

    Raises GGUFError where one is missing, or has another shape or an unsupported type.
    """
    held = _LayerOfFile(file, config.block_count, f"{config.output_norm}.weight")
    check_tensors(held, layer_config(config), _COPIES)
    return {name: tensor for name, tensor in held.tensors.items() if name not in _COPIES}
