"""A PEFT folder with a LoRA adapter converted into a GGUF file, as llama.cpp's convert_lora_to_gguf.py writes it.

The file has one alpha, and each change its own rank r: the scale is alpha / r. A folder may have other scales
(`use_rslora`, `alpha_pattern`), which llama.cpp's converter ignores. Then the file's alpha is the one that fits the
most changes, and the second half of every other change is multiplied by the missing factor.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.lora.change import LowRank
from quengine.models.config import ModelConfig
from quengine.models.convert.tensors import FileTensor
from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from quengine.models.gguf.writer import TensorInfo
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.hf.hf_headers import read_config
from quengine.models.lora.gguf_adapter import EMBEDDING
from quengine.models.lora.open_adapter import of_latent
from quengine.models.lora.peft import CONFIG, PeftAdapter


class AdapterFile:
    """The contents of the file of the adapter in `folder`: `config` of the base model, `alpha`, and `tensors`.

    base: the folder of the base model, of which only config.json is read; None: the folder that the adapter names.
    Raises EngineError: the base model's folder is missing, or the adapter is not supported (`PeftAdapter`).
    """

    def __init__(self, folder: Path, base: Path | None, kind: str) -> None:
        adapter = PeftAdapter(folder)
        self.config = _base_config(adapter, base)
        changes = adapter.changes(self.config, file_order=True)
        for name in [name for name in changes if name.endswith("attn_kv_b.weight")]:
            changes |= of_latent(self.config, name, changes.pop(name))
        if not changes:
            raise adapter.error("has no changes to convert")
        if not any(change.scale for change in changes.values()):
            raise adapter.error("its scale is 0, so that it changes nothing")
        self.alpha = alpha_of(changes.values())
        self.tensors = halves(changes, self.alpha, kind)


def _base_config(adapter: PeftAdapter, base: Path | None) -> ModelConfig:
    named = adapter.keys.get("base_model_name_or_path")
    folder = base if base is not None else Path(str(named or ""))
    if not (folder / "config.json").is_file():
        where = "no such folder with config.json" if base is not None else f"{CONFIG} names {named!r}"
        raise EngineError(f"{adapter.folder}: the base model's folder is needed, --base FOLDER: {where}")
    return read_hf_config(read_config(folder))


def alpha_of(changes: Iterable[LowRank]) -> float:
    """The most common product of scale and rank among the changes with a scale other than 0, of which there must be
    one: in files an alpha of 0 stands for a scale of 1."""
    found = Counter(change.scale * change.rank for change in changes if change.scale)
    return found.most_common(1)[0][0]


def halves(changes: Mapping[str, LowRank], alpha: float, kind: str) -> list[FileTensor]:
    """The tensors of an adapter's file with these changes and this alpha, in the tensor type `kind`."""
    return [
        _tensor(f"{name}.lora_{letter}", half, kind)
        for name, change in changes.items()
        for letter, half in zip("ab", _halves(name, change, alpha), strict=True)
    ]


def _halves(name: str, change: LowRank, alpha: float) -> tuple[Tensor, Tensor]:
    factor = change.scale * change.rank / alpha
    a, b = change.a, change.b if factor == 1.0 else change.b * factor
    return (b, a.T) if name == EMBEDDING else (a, b)


def _tensor(name: str, values: Tensor, kind: str) -> FileTensor:
    stored = "F16" if values.shape[-1] % TYPE_BY_NAME[kind].block else kind
    return FileTensor(TensorInfo(name, tuple(values.shape), stored), {}, (), values.contiguous())
