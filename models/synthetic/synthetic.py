"""Writes GGUF models of true shapes with random weights: for benchmarks without a download, and for tests.

Weights are drawn in their stored format, tensor by tensor, so a 4 GB model needs the memory of its largest tensor.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quengine.errors import CannotRunError, EngineError
from quengine.models.architectures import ARCHITECTURES
from quengine.models.config import ModelConfig, RopeScaling
from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from quengine.models.synthetic.random_blocks import random_rows
from quengine.models.synthetic.synthetic_vocabulary import Metadata, bpe_metadata, spm_metadata
from quengine.models.tensor_table import FLOAT_TYPES, QUANT_TYPES, Shape, required_tensors

Q4_K_M = "Q4_K_M"
# Spread of the logits: enough that greedy choices are clear, as a trained model's are.
LOGIT_STD = 4.0


@dataclass(frozen=True)
class SyntheticModel:
    """What to write. `quant` is one type for every matrix, or "Q4_K_M" for llama.cpp's mix of that name."""

    name: str
    architecture: str = "llama"
    vocab_size: int = 32768
    context_length: int = 32768
    embedding_length: int = 4096
    block_count: int = 32
    feed_forward_length: int = 14336
    head_count: int = 32
    head_count_kv: int = 8
    head_dim: int = 128
    rope_dim: int | None = None
    rope_freq_base: float = 1e6
    rope_freq_factors: tuple[float, ...] | None = None
    sliding_window: int | None = None
    quant: str = Q4_K_M
    tied_output: bool = False

    def config(self) -> ModelConfig:
        """The configuration that a reader of the file finds."""
        factors = self.rope_freq_factors
        declared = ARCHITECTURES[self.architecture]
        config = ModelConfig(
            architecture=self.architecture,
            name=self.name,
            block=declared.block,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            embedding_length=self.embedding_length,
            block_count=self.block_count,
            feed_forward_length=self.feed_forward_length,
            head_count=self.head_count,
            head_count_kv=self.head_count_kv,
            head_dim=self.head_dim,
            rope_dim=self.rope_dim or self.head_dim,
            rope_freq_base=self.rope_freq_base,
            rope_scaling=RopeScaling(
                kind="none" if factors is None else "llama3",
                original_context_length=self.context_length,
                freq_factors=factors,
            ),
            rms_eps=float(np.float32(1e-5)),
            sliding_window=self.sliding_window,
            tied_output=self.tied_output,
        )
        return replace(config, **declared.size_fields(config))


_TINY = SyntheticModel(
    "synthetic tiny",
    vocab_size=1024,
    context_length=4096,
    embedding_length=512,
    block_count=2,
    feed_forward_length=1024,
    head_count=8,
    head_count_kv=2,
    head_dim=64,
    rope_freq_base=1e4,
)
_MISTRAL_7B = SyntheticModel("synthetic mistral-7b")


def _declared(preset: str, architecture: str, sizes: Mapping[str, Any]) -> SyntheticModel:
    base = _TINY if preset.endswith("-tiny") else _MISTRAL_7B
    return replace(base, name=f"synthetic {preset}", architecture=architecture, **sizes)


PRESETS: Mapping[str, SyntheticModel] = {
    "mistral-7b": _MISTRAL_7B,
    "mistral-7b-2l": replace(_MISTRAL_7B, name="synthetic mistral-7b-2l", block_count=2),
    "tiny": _TINY,
} | {
    preset: _declared(preset, declared.name, sizes)
    for declared in ARCHITECTURES.values()
    for preset, sizes in declared.synthetic.items()
}


def write_synthetic(path: Path, model: str | SyntheticModel, seed: int = 0) -> Path:
    """Writes the preset or model `model` to `path`, beside it first, then renamed. Same seed, same bytes.

    Raises:
        EngineError: no such preset, architecture or type, or rows that are not whole blocks of their type.
        CannotRunError: too little free disk.
    """
    spec = _resolve(model)
    config = spec.config()
    shapes = required_tensors(config)
    types = {name: tensor_type(spec, name, shape) for name, shape in shapes.items()}
    _check_blocks(spec, shapes, types)
    _check_disk(path, sum(_nbytes(shapes[name], types[name]) for name in shapes))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        _write(partial, spec, config, shapes, types, seed)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def tensor_type(spec: SyntheticModel, name: str, shape: Shape) -> str:
    """The type of a tensor: vectors F32, matrices `spec.quant` or what the Q4_K_M mix says.

    Q4_K_M, after llama.cpp's quantizer: Q4_K, but Q6_K for the output matrix, and for attn_v and ffn_down in
    the first and last eighth of the layers and every third between; Q5_K for attn_qkv.
    """
    if len(shape) == 1:
        return "F32"
    if spec.quant != Q4_K_M:
        return spec.quant
    if name == "output.weight" or (name == "token_embd.weight" and spec.tied_output):
        return "Q6_K"
    if name.endswith("attn_qkv.weight"):
        return "Q5_K"
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, count = int(name.split(".")[1]), spec.block_count
        eighth = count // 8
        if layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def _resolve(model: str | SyntheticModel) -> SyntheticModel:
    if isinstance(model, str):
        if model not in PRESETS:
            raise EngineError(f"no synthetic model {model!r}; there are {', '.join(PRESETS)}")
        model = PRESETS[model]
    if model.architecture not in ARCHITECTURES:
        raise EngineError(f"no synthetic model of architecture {model.architecture!r}")
    if model.quant != Q4_K_M and model.quant not in FLOAT_TYPES | QUANT_TYPES:
        raise EngineError(f"no synthetic weights of type {model.quant!r}")
    return model


def _nbytes(shape: Shape, kind: str) -> int:
    return TYPE_BY_NAME[kind].row_bytes(shape[-1]) * prod(shape[:-1])


def _check_blocks(spec: SyntheticModel, shapes: Mapping[str, Shape], types: Mapping[str, str]) -> None:
    for name, shape in shapes.items():
        block = TYPE_BY_NAME[types[name]].block
        if shape[-1] % block:
            raise EngineError(
                f"{spec.name}: {name} has rows of {shape[-1]}, {types[name]} needs a multiple of {block}"
            )


def _check_disk(path: Path, nbytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < nbytes + (1 << 26):
        raise CannotRunError(f"{path}: needs {nbytes / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free")


def _write(
    path: Path,
    spec: SyntheticModel,
    config: ModelConfig,
    shapes: Mapping[str, Shape],
    types: Mapping[str, str],
    seed: int,
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, spec.architecture)
    for key, value in _metadata(spec, config).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, shape in shapes.items():
        kind = TYPE_BY_NAME[types[name]]
        # The writer takes byte shapes for a given type, rows first, and derives the weights' shape.
        stored = (*shape[:-1], kind.row_bytes(shape[-1]))
        writer.add_tensor_info(
            name, stored, np.dtype(np.uint8), _nbytes(shape, kind.name), GGMLQuantizationType(kind.number)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for index, (name, shape) in enumerate(shapes.items()):
        rng = np.random.default_rng([seed, index])
        writer.write_tensor_data(_weights(spec, name, shape, types[name], rng))
    writer.close()


def _weights(
    spec: SyntheticModel, name: str, shape: Shape, kind: str, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Norms about 1, frequency factors as given, small biases, matrices that keep activations' size."""
    rows, cols = prod(shape[:-1]), shape[-1]
    if name == "rope_freqs.weight":
        return np.array(spec.rope_freq_factors, "<f4").view(np.uint8)
    if name.endswith("norm.weight"):
        return random_rows("F32", rows, cols, 0.1, rng, mean=1.0).reshape(-1)
    if name.endswith(".bias"):
        return random_rows("F32", rows, cols, 0.1, rng).reshape(-1)
    if name == "output.weight" or (name == "token_embd.weight" and spec.tied_output):
        return random_rows(kind, rows, cols, LOGIT_STD * cols**-0.5, rng)
    if name == "token_embd.weight":
        return random_rows(kind, rows, cols, 1.0, rng)
    return random_rows(kind, rows, cols, cols**-0.5, rng)


def _metadata(spec: SyntheticModel, config: ModelConfig) -> Metadata:
    a = spec.architecture
    sizes: Metadata = {
        "general.name": spec.name,
        "general.type": "model",
        "general.quantization_version": 2,
        f"{a}.vocab_size": config.vocab_size,
        f"{a}.context_length": config.context_length,
        f"{a}.embedding_length": config.embedding_length,
        f"{a}.block_count": config.block_count,
        f"{a}.feed_forward_length": config.feed_forward_length,
        f"{a}.attention.head_count": config.head_count,
        f"{a}.attention.head_count_kv": config.head_count_kv,
        f"{a}.attention.key_length": config.head_dim,
        f"{a}.attention.value_length": config.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": config.rms_eps,
        f"{a}.rope.dimension_count": config.rope_dim,
        f"{a}.rope.freq_base": config.rope_freq_base,
    }
    if config.sliding_window is not None:
        sizes[f"{a}.attention.sliding_window"] = config.sliding_window
    if ARCHITECTURES[a].vocabulary == "bpe":
        vocabulary = bpe_metadata(config.vocab_size, "qwen2")
    else:
        vocabulary = spm_metadata(config.vocab_size)
    return {**sizes, **vocabulary}
