"""Writes EAGLE-3 draft models with random weights, of the shape that published ones for a model have."""

from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quengine.models.architectures import ARCHITECTURES
from quengine.models.blocks.block import TensorSpec, Uniform
from quengine.models.config import EagleSizes, ModelConfig
from quengine.models.eagle import ARCHITECTURE
from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from quengine.models.gguf.whole_file import beside
from quengine.models.rotation import RopeScaling
from quengine.models.synthetic.random_blocks import random_rows
from quengine.models.synthetic.synthetic import add_metadata
from quengine.models.synthetic.synthetic_vocabulary import Metadata
from quengine.models.tensor_table import tensor_specs

DRAFTED = 32000
"""Tokens of the vocabularies that published draft models have."""


def write_synthetic_eagle(
    path: Path, target: ModelConfig, quant: str = "Q8_0", drafted: int = DRAFTED, seed: int = 0
) -> Path:
    """Writes a draft model for the target to `path`: its heads and feed-forward, of `quant`, and the inputs of the
    layers that draft models read by default. Same seed, same bytes.

    `drafted`: tokens that it drafts, the first ones of equal parts of the vocabulary, all where that has no more.
    """
    from gguf import GGUFWriter

    config = _config(target, drafted)
    assert config.eagle is not None
    with beside(path) as file:
        writer = GGUFWriter(file.name, ARCHITECTURE)
        add_metadata(writer, _metadata(config, config.eagle))
        for index, (name, spec) in enumerate(tensor_specs(config).items()):
            rng, kind = np.random.default_rng([seed, index]), quant if len(spec.shape) == 2 else "F32"
            rows = _weights(spec, kind, rng).reshape(*spec.shape[:-1], -1)
            number = TYPE_BY_NAME[kind].number
            writer.add_tensor(name, rows, raw_dtype=number)  # type: ignore[arg-type]
        count = config.eagle.drafted
        if count < config.vocab_size:
            tokens = np.arange(count, dtype=np.int64) * config.vocab_size // count
            writer.add_tensor("d2t", tokens)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def _config(target: ModelConfig, drafted: int) -> ModelConfig:
    layers = target.block_count
    return ModelConfig(
        architecture="llama",
        name="synthetic EAGLE-3",
        block=ARCHITECTURES["llama"].block,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        embedding_length=target.embedding_length,
        block_count=1,
        feed_forward_length=target.feed_forward_length,
        head_count=target.head_count,
        head_count_kv=target.head_count_kv,
        head_dim=target.head_dim,
        rope_dim=target.head_dim,
        rope_freq_base=target.rope_freq_base,
        rope_scaling=RopeScaling(original_context_length=target.context_length),
        rms_eps=target.rms_eps,
        is_draft_layer=True,
        eagle=EagleSizes(
            layers=tuple(sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)})),
            width=target.embedding_length,
            drafted=min(drafted, target.vocab_size),
        ),
    )


def _metadata(config: ModelConfig, sizes: EagleSizes) -> Metadata:
    a = ARCHITECTURE
    return {
        "general.name": config.name,
        f"{a}.vocab_size": config.vocab_size,
        f"{a}.context_length": config.context_length,
        f"{a}.embedding_length": config.embedding_length,
        f"{a}.block_count": 1,
        f"{a}.feed_forward_length": config.feed_forward_length,
        f"{a}.attention.head_count": config.head_count,
        f"{a}.attention.head_count_kv": config.head_count_kv,
        f"{a}.attention.key_length": config.head_dim,
        f"{a}.attention.value_length": config.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": config.rms_eps,
        f"{a}.rope.dimension_count": config.rope_dim,
        f"{a}.rope.freq_base": config.rope_freq_base,
        f"{a}.target_layers": list(sizes.layers),
        f"{a}.target_hidden_size": sizes.width,
        f"{a}.norm_before_residual": sizes.normed_residual,
    }


def _weights(spec: TensorSpec, kind: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    rows, columns, draw = prod(spec.shape[:-1]), spec.shape[-1], spec.draw
    assert not isinstance(draw, Uniform)
    std = draw.std * columns**-0.5 if draw.by_columns else draw.std
    return random_rows(kind, rows, columns, std, rng, draw.mean)
