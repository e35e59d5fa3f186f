"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

`general.type` is adapter and `adapter.type` lora; `adapter.lora.alpha` is the scale times the rank, 0 for a scale of 1.
A matrix NAME has NAME.lora_a [r, columns] and NAME.lora_b [rows, r]; experts have one more dimension in front. For the
token embedding these are [vocabulary, r] and [width, r].
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quengine.kernels.lora.change import LowRank
from quengine.models.blocks.block import TensorSpec
from quengine.models.config import ModelConfig
from quengine.models.gguf.file import GGUFFile
from quengine.models.lora.adapter import MOST_RANK
from quengine.models.tensor_table import MATRIX_TYPES, adapted_specs

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = "token_embd.weight"
INVOCATION = "adapter.alora.invocation_tokens"


def check_adapter(file: GGUFFile, config: ModelConfig) -> list[str]:
    """The names of the tensors that the file changes, those that hold several (attn_qkv) among them.

    Raises:
        GGUFError: it is no LoRA adapter of such a model, an activated one, or has a tensor that is not half of a change
            of a matrix of this model.
    """
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (found := file.get_str(key)) != wanted:
            raise file.error(key, f"{found or 'nothing'}, not {wanted}: this is no LoRA adapter")
    if (name := file.require_str("general.architecture")) != config.architecture:
        raise file.error("general.architecture", f"{name}, of a model that is {config.architecture}")
    if INVOCATION in file.metadata:
        raise file.error(
            INVOCATION, "activated LoRA is not implemented: an adapter that is always applied is"
        )
    specs = adapted_specs(config)
    names = [_checked(file, name, specs) for name in file.tensors]
    return list(dict.fromkeys(names))


def _checked(file: GGUFFile, name: str, specs: Mapping[str, TensorSpec]) -> str:
    """The matrix that is changed by a product with the tensor `name`."""
    base, _, letter = name.rpartition(".lora_")
    other = f"{base}.lora_{'b' if letter == 'a' else 'a'}"
    if letter not in ("a", "b") or other not in file.tensors or base not in specs or base.endswith(".bias"):
        raise file.tensor_error(name, "no half of a change of one of the model's matrices")
    if len(shape := specs[base].shape) < 2:
        raise file.tensor_error(name, "a change of this tensor is not implemented: it is no matrix")
    tensor, flipped = file.tensors[name], base == EMBEDDING
    if tensor.type_name not in MATRIX_TYPES:
        raise file.tensor_error(name, f"{tensor.type_name} is not implemented")
    along = -1 if letter == "b" or flipped else -2
    rank = _rank(tensor.shape, along)
    rows, columns = shape[-2:]
    wanted = (*shape[:-2], rank, columns) if letter == "a" else (*shape[:-2], rows, rank)
    if flipped:
        wanted = (rows, rank) if letter == "a" else (columns, rank)
    if tensor.shape != wanted or not 1 <= rank <= MOST_RANK:
        raise file.tensor_error(name, f"shape {list(tensor.shape)}, of a matrix {list(shape)}")
    others = _rank(file.tensors[other].shape, -1 if letter == "a" or flipped else -2)
    if letter == "b" and others != rank:
        raise file.tensor_error(name, f"rank {rank}, and the other half's is {others}")
    return base


def _rank(shape: tuple[int, ...], along: int) -> int:
    return shape[along] if len(shape) > 1 else 0


def read_changes(file: GGUFFile, names: list[str]) -> dict[str, LowRank]:
    """The changes of the tensors `names`, which `check_adapter` has found. Raises GGUFError."""
    alpha = file.get_float("adapter.lora.alpha") or 0.0
    found = dict[str, LowRank]()
    for name in names:
        a, b = _values(file, f"{name}.lora_a"), _values(file, f"{name}.lora_b")
        if name == EMBEDDING:
            a, b = b.T, a
        found[name] = LowRank(a, b, alpha / b.shape[-1] if alpha else 1.0)
        if (problem := found[name].problem()) is not None:
            raise file.tensor_error(f"{name}.lora_a", problem)
    return found


def _values(file: GGUFFile, name: str) -> "Tensor":
    from quengine.kernels.block_formats import dequantize
    from quengine.models.gguf.gguf_tensors import quant_tensor

    stored = quant_tensor(file.tensors[name])
    return dequantize(stored.format, stored.data.clone()).view(stored.shape)
