"""Adapters of an encoder's tasks within a folder, as jinaai publishes jina-embeddings-v3.

Each changed matrix NAME is stored as torch's parametrizations have it: NAME.parametrizations.weight.original, and
beside it 0.lora_A [tasks, r, columns] and 0.lora_B [tasks, rows, r], whose product, times lora_alpha / r, is added; of
embeddings the matrix is A times B, [tasks, rows, r] and [tasks, r, columns]. Source: Hu et al. 2021, "LoRA"; Sturua et
al. 2024, "jina-embeddings-v3"; the format of llama.cpp's converter, which makes files of them (lora/task_files.py).
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from quengine.kernels.lora.change import LowRank
from quengine.models.config import ModelConfig
from quengine.models.hf.hf_keys import config_error, number
from quengine.models.hf.hf_names import HFNames
from quengine.models.hf.hf_shards import HFShards
from quengine.models.lora.adapter import MOST_RANK
from quengine.models.lora.gguf_adapter import EMBEDDING
from quengine.models.lora.task_files import ADAPTED, TYPES
from quengine.models.tensor_table import joined_specs, tensor_specs


class _Change(NamedTuple):
    """Names of the two tensors that change a matrix, and their rank."""

    a: str
    b: str
    rank: int


class FolderAdapters:
    """The changes of the configuration's tasks; `names` are their tensors.

    Raises:
        EngineError: config.json names tasks and no tensor has changes for them, or one half of a change is missing or
            has a wrong shape.
    """

    def __init__(
        self, shards: HFShards, names: HFNames, keys: Mapping[str, Any], config: ModelConfig
    ) -> None:
        assert config.encoder is not None
        self._shards, self._tasks = shards, [task.name for task in config.encoder.tasks]
        self._alpha = number(keys, "lora_alpha", 1.0)
        if self._alpha <= 0.0:
            raise config_error("lora_alpha", f"{self._alpha:g} is not positive")
        self._changes = dict(self._found(names, config)) if self._tasks else {}
        if self._tasks and not self._changes:
            raise shards.error(
                "config.json has lora_adaptations, and no tensor has changes for them (.lora_A)"
            )
        self.names = {name for change in self._changes.values() for name in (change.a, change.b)}

    def read(self) -> Mapping[str, Mapping[str, LowRank]]:
        """Task -> name of the matrix in GGUF -> its change, fp32."""
        found: dict[str, dict[str, LowRank]] = {task: {} for task in self._tasks}
        for name, change in self._changes.items():
            a, b = self._shards.tensor(change.a).float(), self._shards.tensor(change.b).float()
            scale = self._alpha / change.rank
            for place, task in enumerate(self._tasks):
                halves = (b, a) if name in (EMBEDDING, TYPES) else (a, b)
                found[task][name] = LowRank(halves[0][place], halves[1][place], scale)
        return found

    def _found(self, names: HFNames, config: ModelConfig) -> Iterator[tuple[str, _Change]]:
        for name, spec in {**tensor_specs(config), **joined_specs(config)}.items():
            embeds = name in (EMBEDDING, TYPES)
            if not name.endswith(".weight") or not (embeds or name.split(".")[-2] in ADAPTED):
                continue
            place = f"{names(name).removesuffix('weight')}parametrizations.weight.0.lora_"
            rows, columns = spec.shape
            if not {f"{place}A", f"{place}B"} & self._shards.files.keys():
                continue
            shape = self._shards.shape(f"{place}A")
            if shape is None:
                raise self._shards.error(f"tensor '{place}A' is missing, and '{place}B' is there")
            rank = shape[-1 if embeds else 1] if len(shape) == 3 else 0
            count = len(self._tasks)
            tall, wide = (count, rows, rank), (count, rank, columns)
            wanted = (tall, wide) if embeds else (wide, tall)
            if not 1 <= rank <= MOST_RANK:
                raise self._shards.error(f"tensor '{place}A': shape {list(shape)} of {count} tasks' changes")
            for letter, each in zip("AB", wanted, strict=True):
                self._shards.stored(f"{place}{letter}", each)
            yield name, _Change(f"{place}A", f"{place}B", rank)
