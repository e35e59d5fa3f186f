"""The tensors of a GGUF file, from those that the decoder reads of a folder, which have GGUF's names and row order.

What is left is what a file has otherwise: the experts of a layer in one tensor, the divisors of the rotary frequencies
as a tensor, and the type of each.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from quengine.models.gguf.writer import TensorInfo
from quengine.models.hf.hf_checkpoint import HFCheckpoint
from quengine.models.hf.hf_headers import read_config

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""Types of matrices, by the names that the command has for them."""

_EXPERT = re.compile(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.weight")
_FLOAT = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


@dataclass(frozen=True)
class FileTensor:
    """A tensor to be written: `parts` are the tensors of the folder that lie in it, one after the other; () where it
    is `computed` from the configuration."""

    info: TensorInfo
    parts: tuple[str, ...]
    computed: Tensor | None = None

    def pieces(self, checkpoint: HFCheckpoint) -> Iterator[QuantTensor]:
        """Its parts as the folder stores them, read when they are taken."""
        if self.computed is not None:
            data = self.computed.float().reshape(1, -1).view(torch.uint8)
            yield QuantTensor(self.info.name, FORMATS["F32"], tuple(self.computed.shape), data)
        for part in self.parts:
            yield checkpoint.tensors[part]


def file_tensors(checkpoint: HFCheckpoint, kind: str) -> list[FileTensor]:
    """Every tensor of the file, matrices in the tensor type `kind`, vectors, norms and routers in F32."""
    together: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        expert = _EXPERT.fullmatch(name)
        together.setdefault(f"{expert[1]}_exps.weight" if expert else name, []).append(name)
    found = [_tensor(checkpoint, name, parts, kind) for name, parts in together.items()]
    if checkpoint.config.rope_scaling.kind == "llama3":
        factors = _frequency_factors(checkpoint)
        found.append(FileTensor(TensorInfo("rope_freqs.weight", tuple(factors.shape), "F32"), (), factors))
    return found


def _frequency_factors(checkpoint: HFCheckpoint) -> Tensor:
    """The divisors of Llama 3.1's rotary frequencies, fp32 [head_dim / 2], computed in fp32 as other files' are."""
    keys, config = read_config(checkpoint.path), checkpoint.config
    rope = {**(keys.get("rope_scaling") or {}), **(keys.get("rope_parameters") or {})}
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original = rope["original_max_position_embeddings"]
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    lengths = 2 * math.pi / (1.0 / (config.rope_freq_base**exponents))
    smooth = (original / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    slow = torch.where(lengths > original / low, factor, between)
    return torch.where(lengths < original / high, 1.0, slow)


def _tensor(checkpoint: HFCheckpoint, name: str, parts: list[str], kind: str) -> FileTensor:
    shape = checkpoint.tensors.stored[parts[0]].shape
    if name.endswith("_exps.weight") and len(shape) == 2:
        shape = (len(parts), *shape)
    if name.endswith("ffn_gate_inp_shexp.weight"):
        shape = (1, *shape)
    return FileTensor(TensorInfo(name, shape, _type(name, shape, kind)), tuple(parts))


def _type(name: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1 or name.endswith(_FLOAT) or not name.endswith(".weight"):
        return "F32"
    return "F16" if shape[-1] % TYPE_BY_NAME[kind].block else kind
