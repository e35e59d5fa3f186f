"""LoRA adapters in folders of PEFT: adapter_config.json and adapter_model.safetensors.

A module MODULE has `base_model.model.MODULE.lora_A.weight` [r, columns] and `lora_B.weight` [rows, r], an embedding
`lora_embedding_A` [r, vocabulary] and `lora_embedding_B` [width, r]. Their scale is lora_alpha / r, with `use_rslora`
lora_alpha / sqrt(r); `rank_pattern` and `alpha_pattern` give r and alpha of some modules by regular expressions.
`fan_in_fan_out` is of the stored base weight and changes neither half.

Rows of query and key matrices, and of matrices that folders hold within others, go to the order and the tensors that
GGUF has, as those of a checkpoint do (hf/hf_checkpoint.py).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.lora.change import LowRank
from quengine.models.architectures import DECLARED
from quengine.models.architectures.architecture import HFPart
from quengine.models.blocks.block import TensorSpec
from quengine.models.config import ModelConfig
from quengine.models.hf.hf_checkpoint import permute_heads
from quengine.models.hf.hf_names import PREFIXES, HFNames
from quengine.models.hf.hf_shards import listed
from quengine.models.hf.json_file import read_json
from quengine.models.lora.adapter import MOST_RANK
from quengine.models.lora.module_pattern import ModulePattern, PatternError
from quengine.models.tensor_table import adapted_specs, tensor_specs

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HALVES = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_A.default.weight": "A",
    ".lora_B.default.weight": "B",
    ".lora_embedding_A": "embedding A",
    ".lora_embedding_B": "embedding B",
}
_FLOATS = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
_NOT_COMPUTED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "whole matrices trained beside the adapter",
    "lora_bias": "trained biases",
    "alora_invocation_tokens": "activated LoRA",
    "invocation_string": "activated LoRA",
    "trainable_token_indices": "trained rows of the embedding",
    "target_parameters": "changes of parameters that are no module's weight",
    "layer_replication": "replicated layers",
    "use_qalora": "QALoRA",
}
"""Keys of adapter_config.json that must be absent, null, false or empty."""
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that change the base model's weights: their adapters do not fit the published model."""


def is_peft(path: Path) -> bool:
    return (path / CONFIG).is_file()


class PeftAdapter:
    """A folder's configuration and the halves of its changes.

    Raises:
        EngineError: the folder is no LoRA adapter of PEFT, or has something that is not computed, by its name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys = folder, read_json(folder / CONFIG)
        self._check_keys()
        if not (folder / TENSORS).is_file() and (folder / "adapter_model.bin").is_file():
            raise self.error("has adapter_model.bin alone: save it as safetensors (save_pretrained of PEFT)")
        try:
            with safe_open(folder / TENSORS, framework="pt") as file:
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{folder / TENSORS}: {error}") from None
        self.modules: dict[str, dict[str, Tensor]] = {}
        for name, tensor in held.items():
            module, half = self._half(name)
            if half in (halves := self.modules.setdefault(module, {})):
                raise self.error(f"{module}: has {half} twice, {name!r} and under another name")
            halves[half] = tensor
        for module, halves in self.modules.items():
            self._check_halves(module, halves)

    def changes(self, config: ModelConfig, file_order: bool = False) -> dict[str, LowRank]:
        """The changes of the tensors of a model of this configuration by GGUF name, those that hold several
        (attn_qkv) among them.

        file_order: value heads of a gated delta net are in the order of GGUF files instead of folders.

        Raises:
            EngineError: the model has no such tensors, or they are of another shape.
        """
        places = _places(config, {f"{module}.weight" for module in self.modules})
        unknown = [module for module in self.modules if f"{module}.weight" not in places]
        if unknown:
            raise self.error(f"the {config.architecture} model has no such matrices: {listed(unknown)}")
        of_tensor: dict[str, dict[int | None, LowRank]] = {}
        for module in self.modules:
            for place in places[f"{module}.weight"]:
                change = self._placed(module, place)
                of_tensor.setdefault(place.name, {})[place.expert] = change
        specs = adapted_specs(config)
        found = {name: self._whole(name, parts, specs[name]) for name, parts in of_tensor.items()}
        return {name: _ordered(config, name, change, file_order) for name, change in found.items()}

    def scale(self, module: str, rank: int) -> float:
        """The factor of the product of a module's two halves."""
        wanted = self._of_module(module, "rank_pattern", "r", 8)
        if wanted != rank:
            raise self.error(f"{module}: rank {rank}, and {CONFIG} gives {wanted:g}")
        alpha = self._of_module(module, "alpha_pattern", "lora_alpha", 8)
        return alpha / (sqrt(rank) if self.keys.get("use_rslora") else rank)

    def error(self, problem: str) -> EngineError:
        return EngineError(f"{self.folder}: {problem}")

    def _check_keys(self) -> None:
        path, keys = self.folder / CONFIG, self.keys
        if (kind := keys.get("peft_type")) != "LORA":
            raise EngineError(f"{path}: peft_type: {kind!r} is not implemented, only 'LORA' is")
        for key, what in _NOT_COMPUTED.items():
            if value := keys.get(key):
                raise EngineError(f"{path}: {key}: {what}, not implemented ({str(value)[:60]})")
        if (bias := keys.get("bias", "none")) != "none":
            raise EngineError(f"{path}: bias: {bias!r}: trained biases are not implemented")
        start = keys.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGES_THE_BASE):
            problem = (
                f"{start!r} changes the base model too: save the adapter as plain LoRA (PEFT converts it)"
            )
            raise EngineError(f"{path}: init_lora_weights: {problem}")

    def _half(self, name: str) -> tuple[str, str]:
        for ending, half in _HALVES.items():
            if name.endswith(ending):
                return name.removeprefix(_PREFIX).removesuffix(ending), half
        raise self.error(
            f"tensor {name!r} is no half of a change: what else an adapter may have is not implemented"
        )

    def _check_halves(self, module: str, halves: dict[str, Tensor]) -> None:
        if len(halves) != 2 or len({half[:-1] for half in halves}) != 1:
            raise self.error(f"{module}: has {', '.join(sorted(halves))} alone, not both halves of a change")
        a, b = (halves[half] for half in sorted(halves))
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        if not {a.dtype, b.dtype} <= _FLOATS:
            raise self.error(
                f"{module}: {a.dtype} and {b.dtype} are not implemented, only F64, F32, F16 and BF16 are"
            )
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not 1 <= len(a) <= MOST_RANK:
            raise self.error(f"{module}: A and B are {shapes}, not [r, columns] and [rows, r]")

    def _of_module(self, module: str, pattern_key: str, key: str, default: float) -> float:
        """The value of `key` for a module: that of the first pattern that matches the end of its name, else the
        adapter's."""
        path, given = self.folder / CONFIG, self.keys.get(key, default)
        if not isinstance(patterns := self.keys.get(pattern_key) or {}, dict):
            raise EngineError(f"{path}: {pattern_key}: must be an object, not {str(patterns)[:60]}")
        for pattern, value in patterns.items():
            try:
                if _pattern(pattern).matches(module):
                    given = value
                    break
            except PatternError as error:
                problem = f"{pattern[:60]!r} is not a regular expression: {error}"
                raise EngineError(f"{path}: {pattern_key}: {problem}") from None
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise EngineError(f"{path}: {key}: {given!r} is not a number")
        return float(given)

    def _placed(self, module: str, place: "_Place") -> LowRank:
        """The part of a module's change that belongs to the place."""
        halves = self.modules[module]
        a, b = (halves[half].float() for half in sorted(halves))
        scale = self.scale(module, len(a))
        if (problem := LowRank(a, b, scale).problem()) is not None:
            raise self.error(f"{module}: {problem}")
        if "embedding A" in halves:
            a, b = b.T, a.T
        if place.rows is not None:
            every, rows = place.rows
            if len(b) != every:
                raise self.error(f"{module}: B has {len(b)} rows, the model's matrix {every}")
            b = b[list(rows)]
        return LowRank(a.contiguous(), b.contiguous(), scale)

    def _whole(self, name: str, parts: dict[int | None, LowRank], spec: TensorSpec) -> LowRank:
        """The change of a tensor, made of the parts of its experts."""
        if None in parts:
            change = parts[None]
        else:
            first = next(iter(parts.values()))
            if {(part.rank, part.scale, part.a.shape, part.b.shape) for part in parts.values()} != {
                (first.rank, first.scale, first.a.shape, first.b.shape)
            }:
                raise self.error(f"{name}: changes of its experts differ in rank, scale or shape")
            none = LowRank(torch.zeros_like(first.a), torch.zeros_like(first.b), first.scale)
            each = [parts.get(expert, none) for expert in range(spec.shape[0])]
            a, b = torch.stack([part.a for part in each]), torch.stack([part.b for part in each])
            change = LowRank(a, b, first.scale)
        shape = (*spec.shape[:-2], change.b.shape[-2], change.a.shape[-1])
        if shape != spec.shape or change.a.dim() != len(spec.shape):
            raise self.error(
                f"{name}: the change is of a matrix {list(shape)}, the model's is {list(spec.shape)}"
            )
        return change


@lru_cache(1024)
def _pattern(text: str) -> ModulePattern:
    return ModulePattern(text)


class _Place(NamedTuple):
    """Where the change of a module goes: a tensor, or the matrix of one expert. rows: (number of the module's rows, the
    rows that go there); None: all."""

    name: str
    expert: int | None = None
    rows: tuple[int, Sequence[int]] | None = None


def _places(config: ModelConfig, held: Collection[str]) -> dict[str, list[_Place]]:
    """Weight in a folder -> where it goes, of those that are `held`, under the prefix that names the most of them."""
    every = [dict[str, list[_Place]]()]
    for prefix in PREFIXES:
        found = dict[str, list[_Place]]()
        for weight, place in _under(config, HFNames(config, held, prefix)):
            if weight in held:
                found.setdefault(weight, []).append(place)
        every.append(found)
    return max(every, key=len)


def _under(config: ModelConfig, names: HFNames) -> Iterator[tuple[str, _Place]]:
    declared = DECLARED[config.architecture]
    for name, spec in adapted_specs(config).items():
        tensor = name.split(".", 2)[-1]
        if not name.endswith(".weight") or tensor == "ssm_in.weight":  # whose parts have places
            continue
        if name.endswith("_exps.weight"):
            for expert in range(spec.shape[0]) if spec.hf_each else ():
                yield names.of_expert(name, expert), _Place(name, expert)
        elif (part := declared.hf_parts.get(tensor)) is not None and not part.transposed:
            layer = f"{names.body}layers.{name.split('.')[1]}."
            yield layer + part.name, _Place(name, rows=_rows(config, part, spec))
        tied = name == "output.weight" and config.tied_output
        if own := names.output if tied else names(name):
            yield own, _Place(name)


def _rows(config: ModelConfig, part: HFPart, spec: TensorSpec) -> tuple[int, Sequence[int]]:
    """(number of the holder's rows, the part's rows in order)."""
    if part.picks is not None:
        return part.picks(config)
    rows = spec.shape[0]
    first = rows if part.rows == "second half" else 0
    return (rows if part.rows == "all" else 2 * rows), range(first, first + rows)


def _ordered(config: ModelConfig, name: str, change: LowRank, file_order: bool) -> LowRank:
    """The change with its rows in GGUF's order: rotated elements of a head are neighbours, if the model's are."""
    declared, spec = DECLARED[config.architecture], tensor_specs(config).get(name)
    pairs = config.block.attention.rope_layout == "pairs" and not declared.hf_rope_pairs
    if pairs and spec is not None and spec.rotated is not None:
        change = change._replace(b=permute_heads(change.b, *spec.rotated))
    return in_tiled_order(config, name, change) if file_order else change


def in_tiled_order(config: ModelConfig, name: str, change: LowRank, back: bool = False) -> LowRank:
    """A change of a gated delta net with its value heads reordered from a folder's to GGUF's order; with `back`, the
    other way."""
    sizes = config.gated_delta
    order = sizes.tiled_order(name.split(".", 2)[-1]) if sizes is not None else None
    if order is None:
        return change
    index = torch.tensor(order[0])
    index = index.argsort() if back else index
    if order[1] == "columns":
        return change._replace(a=change.a.index_select(-1, index))
    return change._replace(b=change.b.index_select(-2, index))
