"""Adapters of an encoder's tasks, in files of their own beside the model's: `lora-TASK-*.gguf`, one for each task, as
llama.cpp's converter writes those of jina-embeddings-v3.

Source: Sturua et al. 2024, "jina-embeddings-v3".
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quengine.kernels.lora.change import LowRank
from quengine.models.config import ModelConfig, Task
from quengine.models.gguf.file import GGUFFile, open_gguf
from quengine.models.lora.gguf_adapter import EMBEDDING, check_adapter, read_changes

TYPES = "token_types.weight"
ADAPTED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")


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
            _changed(file, config)
            tasks[task] = Task(task, file.get_str("adapter.lora.prompt_prefix") or "", str(each))
    return replace(config, encoder=replace(config.encoder, tasks=tuple(tasks.values())))


def read_tasks(config: ModelConfig) -> Mapping[str, Mapping[str, LowRank]]:
    """Task -> the changes by the name of the matrix, of the tasks that `with_tasks` has found. Raises GGUFError."""
    found = dict[str, Mapping[str, LowRank]]()
    for task in () if config.encoder is None else config.encoder.tasks:
        with open_gguf(Path(task.file)) as file:
            found[task.name] = read_changes(file, _changed(file, config))
    return found


def _changed(file: GGUFFile, config: ModelConfig) -> list[str]:
    """The tensors that a task's file changes, all of which the encoder computes with."""
    names = check_adapter(file, config)
    for name in names:
        if name not in (EMBEDDING, TYPES) and name.split(".")[-2] not in ADAPTED:
            raise file.tensor_error(f"{name}.lora_a", "a change of this tensor is not implemented")
    return names
