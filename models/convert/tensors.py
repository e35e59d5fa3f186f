"""The tensors of a GGUF file, from those that the decoder reads from a folder, which have GGUF's names and row order.

The remaining differences are made here: a file has the experts of a layer in one tensor, the divisors of the rotary
frequencies as a tensor, and its own type for each tensor.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.architectures import DECLARED
from quengine.models.config import ModelConfig
from quengine.models.draft_layer import layer_config, name_in_file
from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from quengine.models.gguf.writer import TensorInfo
from quengine.models.hf.config_hf import text_keys
from quengine.models.hf.hf_checkpoint import HFCheckpoint, HFTensors
from quengine.models.hf.hf_headers import read_config

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""Tensor types of matrices, by the names that the command takes."""

_EXPERT = re.compile(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.weight")
_FLOAT = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "ssm_conv1d.weight",
    "shortconv.conv.weight",
    "position_embd.weight",
    "token_types.weight",
)
_PACKED = "MXFP4"
"""The tensor type of packed folders, which is kept."""
_JOINED = ("gemma4", "mistral4")
"""Architectures whose files have gate and up of a layer's experts in one tensor, where folders do."""
_ROWS_OF_ONE = {"ernie4_5-moe": "exp_probs_b.bias"}
"""Architecture -> a vector that its files have as a matrix of one row."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor to be written. parts: the tensors in `held`, the folder's, that it consists of, in order; (): it is
    `computed` from the configuration. change: turns the folder's elements into the file's, without changing their
    type."""

    info: TensorInfo
    held: Mapping[str, QuantTensor]
    parts: tuple[str, ...]
    computed: Tensor | None = None
    change: Callable[[Tensor], Tensor] | None = None

    def pieces(self) -> Iterator[QuantTensor]:
        """The parts of the tensor as the folder stores them, read when they are taken."""
        if self.computed is not None:
            data = self.computed.float().reshape(-1, self.computed.shape[-1]).view(torch.uint8)
            yield QuantTensor(self.info.name, FORMATS["F32"], tuple(self.computed.shape), data)
        for part in self.parts:
            yield self.held[part] if self.change is None else _changed(self.held[part], self.change)


def _changed(tensor: QuantTensor, change: Callable[[Tensor], Tensor]) -> QuantTensor:
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[tensor.format.name]
    values = change(tensor.data.view(stored).view(tensor.shape)).contiguous()
    data = values.reshape(-1, values.shape[-1]).view(torch.uint8)
    return QuantTensor(tensor.name, tensor.format, tuple(values.shape), data)


def file_tensors(checkpoint: HFCheckpoint, kind: str) -> list[FileTensor]:
    """Every tensor of the file, matrices in the tensor type `kind`, vectors, norms and routers in F32."""
    config, held = checkpoint.config, checkpoint.tensors
    found = _tensors(config, held, kind, config.architecture in _JOINED and bool(held.parts))
    if has_drafts(checkpoint):
        found += _draft_tensors(checkpoint, kind)
    scaling = config.rope_scaling
    computed: dict[str, Tensor] = {}
    if scaling.kind == "llama3":
        computed["rope_freqs"] = frequency_factors(config, text_keys(read_config(checkpoint.path)))
    if scaling.kind == "longrope":
        computed = {
            "rope_factors_long": _factors(scaling.long_freq_factors),
            "rope_factors_short": _factors(scaling.freq_factors),
        }
    for name, values in computed.items():
        found.append(FileTensor(TensorInfo(f"{name}.weight", tuple(values.shape), "F32"), held, (), values))
    return found


def has_drafts(checkpoint: HFCheckpoint) -> bool:
    """Whether the folder has layers that draft tokens, whose tensors are known."""
    return (
        bool(checkpoint.tensors.drafts) and DECLARED[checkpoint.config.architecture].draft_names is not None
    )


def _tensors(config: ModelConfig, held: HFTensors, kind: str, joined: bool = False) -> list[FileTensor]:
    """All tensors of a model, in layers and outside. joined: gate and up of all experts of a layer are one tensor."""
    together: dict[str, list[str]] = {}
    # If a model ranks by rows of its output matrix, its file has only these rows.
    for name in held if config.ranker is None else [name for name in held if name != "output.weight"]:
        expert = _EXPERT.fullmatch(name)
        together.setdefault(f"{expert[1]}_exps.weight" if expert else name, []).append(name)
    for name in [name for name in together if joined and name.endswith("ffn_gate_exps.weight")]:
        gates, ups = together.pop(name), together.pop(name.replace("gate", "up"))
        together[name.replace("gate", "gate_up")] = [
            part for pair in zip(gates, ups, strict=True) for part in pair
        ]
    found = []
    for name, parts in together.items():
        if name.endswith("attn_kv_b.weight") and config.latent is not None:
            found += _latent_tensors(config, held, name, kind)
        else:
            found.append(_tensor(config, held, name, parts, kind))
    return found


def _draft_tensors(checkpoint: HFCheckpoint, kind: str) -> list[FileTensor]:
    """The tensors of the first layer that drafts tokens, numbered after the model's layers."""
    config = checkpoint.config
    tensors = checkpoint.draft_tensors().tensors
    assert isinstance(tensors, HFTensors)
    found = []
    for tensor in _tensors(layer_config(config), tensors, kind):
        name = name_in_file(tensor.info.name, config.block_count)
        if name is not None:
            found.append(replace(tensor, info=replace(tensor.info, name=name)))
    return found


def _latent_tensors(config: ModelConfig, held: HFTensors, name: str, kind: str) -> list[FileTensor]:
    """attn_k_b, transposed, and attn_v_b, of the tensor that holds both in a folder."""
    sizes, heads = config.latent, config.head_count
    assert sizes is not None
    plain, rank = sizes.plain, sizes.rank

    def of_heads(values: Tensor) -> Tensor:
        return values.view(heads, plain + sizes.values, rank)

    shapes = {"attn_k_b": (heads, rank, plain), "attn_v_b": (heads, sizes.values, rank)}
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "attn_k_b": lambda values: of_heads(values)[:, :plain].transpose(1, 2),
        "attn_v_b": lambda values: of_heads(values)[:, plain:],
    }
    found = []
    for own, shape in shapes.items():
        info = TensorInfo(name.replace("attn_kv_b", own), shape, type_of(f"{own}.weight", shape, kind))
        found.append(FileTensor(info, held, (name,), change=changes[own]))
    return found


def _factors(values: tuple[float, ...] | None) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def frequency_factors(config: ModelConfig, keys: Mapping[str, Any]) -> Tensor:
    """The divisors of Llama 3.1's rotary frequencies, fp32 [head_dim / 2], computed in fp32 as other files' are.

    keys: config.json of the text model.
    """
    rope = {**(keys.get("rope_scaling") or {}), **(keys.get("rope_parameters") or {})}
    if "low_freq_factor" not in rope:
        return _factors(config.rope_scaling.freq_factors)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original = rope["original_max_position_embeddings"]
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    lengths = 2 * math.pi / (1.0 / (config.rope_freq_base**exponents))
    smooth = (original / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    slow = torch.where(lengths > original / low, factor, between)
    return torch.where(lengths < original / high, 1.0, slow)


def _tensor(config: ModelConfig, held: HFTensors, name: str, parts: list[str], kind: str) -> FileTensor:
    shape = held.stored[parts[0]].shape
    if name.endswith("ffn_gate_up_exps.weight"):
        shape = (len(parts) // 2, 2 * shape[0], shape[1])
    elif name.endswith("_exps.weight") and len(shape) == 2:
        shape = (len(parts), *shape)
    if name == "position_embd.weight" and config.encoder is not None:
        shape = (config.context_length, shape[1])
    if name.endswith("ffn_gate_inp_shexp.weight") or (
        name.split(".", 2)[-1] == _ROWS_OF_ONE.get(config.architecture)
    ):
        shape = (1, *shape)
    stored = _PACKED if held.stored[parts[0]].dtype == _PACKED else type_of(name, shape, kind)
    return FileTensor(
        TensorInfo(name, shape, stored), held, tuple(parts), change=_in_file_order(config, name)
    )


def _in_file_order(config: ModelConfig, name: str) -> Callable[[Tensor], Tensor] | None:
    """The function that reorders value heads, which a folder has side by side and a file tiled over the key heads, or
    that drops the position table's rows of no position; None: the tensor needs neither."""
    if name == "position_embd.weight" and config.encoder is not None and config.encoder.first_position:
        first = config.encoder.first_position
        return lambda values: values[first:]
    sizes = config.gated_delta
    order = sizes.tiled_order(name.split(".", 2)[-1]) if sizes is not None else None
    if order is None:
        return None
    index, along = torch.tensor(order[0]), order[1]
    return lambda values: values.index_select(-1 if along == "columns" else 0, index)


def type_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """The type of a tensor, where matrices are of type `kind`."""
    if len(shape) == 1 or name.endswith(_FLOAT) or not name.endswith(".weight"):
        return "F32"
    return "F16" if shape[-1] % TYPE_BY_NAME[kind].block else kind
