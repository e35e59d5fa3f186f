"""Adapters of an encoder's tasks: matrices of low rank beside its own, in files of their own beside the model's.

Format: as llama.cpp's converter writes those of jina-embeddings-v3, a file `lora-TASK-*.gguf` a task, whose
`general.type` is adapter; matrices NAME.lora_a [r, columns] and NAME.lora_b [rows, r] of a matrix NAME, of the
embedding [vocabulary, r] and [width, r]. Source: Hu et al. 2021, "LoRA"; Sturua et al. 2024, "jina-embeddings-v3".
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quengine.models.config import ModelConfig, Task
from quengine.models.gguf.file import GGUFFile, open_gguf

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING, TYPES = "token_embd.weight", "token_types.weight"
ADAPTED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
MOST_RANK = 1 << 10


class LowRank(NamedTuple):
    """What a matrix is changed by: `b` times `a`, of which b has the adapter's scale; of the embedding a [vocab, r]."""

    a: "Tensor"
    b: "Tensor"


def with_tasks(config: ModelConfig, path: Path) -> ModelConfig:
    """The configuration with the tasks of the adapters beside a model's file, which are checked.

    Raises GGUFError for an adapter of another model, or of a form that is not computed.
    """
    assert config.encoder is not None
    tasks = dict[str, Task]()
    for each in sorted(path.parent.glob("lora-*.gguf")):
        with open_gguf(each) as file:
            if file.metadata.get("general.architecture") != config.architecture:
                continue
            task = file.require_str("adapter.lora.task_name")
            if task in tasks:
                raise file.error("adapter.lora.task_name", f"{task}: {tasks[task].file} is of the same task")
            _check(file, config)
            tasks[task] = Task(task, file.get_str("adapter.lora.prompt_prefix") or "", str(each))
    return replace(config, encoder=replace(config.encoder, tasks=tuple(tasks.values())))


def read_adapter(task: Task) -> Mapping[str, LowRank]:
    """The changes of a task by the name of the matrix, fp32, on the host. Raises GGUFError."""
    with open_gguf(Path(task.file)) as file:
        alpha = file.get_float("adapter.lora.alpha") or 0.0
        found = dict[str, LowRank]()
        for name in file.tensors:
            base = name.removesuffix(".lora_a")
            if base != name:
                a, b = (_values(file, f"{base}.lora_{letter}") for letter in "ab")
                found[base] = LowRank(a, b * (alpha / b.shape[1] if alpha else 1.0))
        return found


def _values(file: GGUFFile, name: str) -> "Tensor":
    import numpy as np
    import torch

    tensor = file.tensors[name]
    return torch.from_numpy(np.array(tensor.data)).view(torch.float32).view(*tensor.shape)


def _check(file: GGUFFile, config: ModelConfig) -> None:
    from quengine.models.tensor_table import joined_specs, tensor_specs

    if (kind := file.get_str("adapter.type")) != "lora":
        raise file.error("adapter.type", f"{kind} is not implemented, only lora is")
    specs, ranks = {**tensor_specs(config), **joined_specs(config)}, dict[str, int]()
    for name, tensor in file.tensors.items():
        base, _, letter = name.rpartition(".lora_")
        other = f"{base}.lora_{'b' if letter == 'a' else 'a'}"
        if (
            letter not in ("a", "b")
            or other not in file.tensors
            or base not in specs
            or base.endswith(".bias")
        ):
            raise file.tensor_error(name, "no half of a change of one of the model's matrices")
        if tensor.type_name != "F32":
            raise file.tensor_error(name, f"{tensor.type_name} is not implemented, only F32 is")
        if base not in (EMBEDDING, TYPES) and base.split(".")[-2] not in ADAPTED:
            raise file.tensor_error(name, "a change of this tensor is not implemented")
        rows, columns = specs[base].shape
        rank = tensor.shape[-1] if letter == "b" or base == EMBEDDING else tensor.shape[0]
        wanted = (rank, columns) if letter == "a" else (rows, rank)
        if base == EMBEDDING:
            wanted = (rows, rank) if letter == "a" else (columns, rank)
        if tensor.shape != wanted or not 1 <= rank <= MOST_RANK:
            raise file.tensor_error(name, f"shape {list(tensor.shape)}, of a matrix {[rows, columns]}")
        if ranks.setdefault(base, rank) != rank:
            raise file.tensor_error(name, f"rank {rank}, and the other half's is {ranks[base]}")
