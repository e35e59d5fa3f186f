"""A folder with an EAGLE-3 draft model converted into a GGUF file, which has the tokenizer of its target."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quengine.errors import EngineError
from quengine.models.config import ModelConfig
from quengine.models.convert.tensors import FileTensor, frequency_factors, type_of
from quengine.models.eagle import ARCHITECTURE
from quengine.models.eagle_checkpoint import open_eagle
from quengine.models.gguf.writer import TensorInfo
from quengine.models.hf.hf_checkpoint import HFCheckpoint, permute_heads
from quengine.models.hf.hf_headers import read_config


class DraftFile:
    """The contents of the file of the draft model in `folder`: `config`, the `keys` of its layer, and `tensors`.

    Query and key rows go from halves of a head, as in folders, to pairs, as in files of llama. Raises EngineError: the
    folder has no draft model, or it does not fit the model in `target`.
    """

    def __init__(self, folder: Path, target: Path, kind: str) -> None:
        if not (target / "config.json").is_file():
            raise EngineError(f"--target {target}: no folder of a model: it has no config.json")
        self._target = HFCheckpoint(target)
        found = open_eagle(folder, self._target)
        if found is None:
            self._target.close()
            raise EngineError(f"--target {target}: {folder} is no EAGLE-3 draft model")
        self._opened, self.target = found, target
        self.config = replace(found.config, architecture=ARCHITECTURE)
        keys = read_config(folder)
        self.keys: Mapping[str, Any] = {
            "model_type": "llama",
            **keys,
            **(keys.get("transformer_layer_config") or {}),
        }
        held = {**found.tensors, "fc.weight": found.fusion.whole}
        self.tensors = [self._tensor(held, name, kind) for name in held]
        if self.config.rope_scaling.kind == "llama3":
            factors = frequency_factors(self.config, self.keys)
            info = TensorInfo("rope_freqs.weight", tuple(factors.shape), "F32")
            self.tensors.append(FileTensor(info, {}, (), factors))
        if found.drafted is not None:
            info = TensorInfo("d2t", tuple(found.drafted.shape), "I64")
            self.tensors.append(FileTensor(info, {}, (), found.drafted))

    def close(self) -> None:
        self._opened.close()
        self._target.close()

    def _tensor(self, held: Mapping[str, Any], name: str, kind: str) -> FileTensor:
        shape, heads = held[name].shape, _heads(self.config, name)
        change = None if heads is None else partial(permute_heads, heads=heads, rope_dim=self.config.head_dim)
        return FileTensor(TensorInfo(name, shape, type_of(name, shape, kind)), held, (name,), change=change)


def _heads(config: ModelConfig, name: str) -> int | None:
    """The number of heads of a tensor whose rows are rotated; None: its rows are not rotated."""
    return {"blk.0.attn_q.weight": config.head_count, "blk.0.attn_k.weight": config.head_count_kv}.get(name)
