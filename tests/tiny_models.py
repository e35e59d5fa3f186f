"""Models small enough to run in a test, with random weights in any tensor type, written as GGUF files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.blocks import AttentionForm, BlockForm
from quengine.models.config import ModelConfig
from quengine.models.rotation import RopeScaling
from tests.gguf_builder import STREAMS, TAPS, GGUFBuilder, ModelSizes, bpe_vocabulary
from tests.llama_cpp_source import llama_cpp_source

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

HARMONY_MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)


def chat_vocabulary() -> dict[str, Any]:
    """Bytes, a few merges and ChatML's control tokens; the end token is <|im_end|>."""
    vocabulary = bpe_vocabulary(special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    count = len(vocabulary["tokenizer.ggml.tokens"])
    return vocabulary | {"tokenizer.ggml.eos_token_id": count - 1, "tokenizer.chat_template": CHATML}


def harmony_vocabulary() -> dict[str, Any]:
    """Bytes, a few merges, and gpt-oss's control tokens, end token and chat template."""
    words = bpe_vocabulary(special=(*HARMONY_MARKS, "<|endoftext|>"), pre="gpt-4o")
    template = llama_cpp_source() / "models" / "templates" / "openai-gpt-oss-120b.jinja"
    return words | {
        "tokenizer.ggml.eos_token_id": words["tokenizer.ggml.tokens"].index("<|return|>"),
        "tokenizer.chat_template": template.read_text(encoding="utf-8"),
    }


def random_weights(sizes: ModelSizes, vocab: int, tied: bool, seed: int) -> dict[str, np.ndarray]:
    """fp32 weights by GGUF name, scaled so that activations neither vanish nor grow."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in sizes.tensor_shapes(vocab, tied).items():
        values = rng.standard_normal(shape).astype(np.float32)
        if "norm" in name:
            values = 1.0 + 0.1 * values
        elif name == "rope_freqs.weight":
            values = 1.0 + np.abs(values)  # divisors
        elif name.endswith("ssm_a"):
            values = -np.abs(values)  # a head's memory fades
        elif len(shape) > 1:
            values *= 2.0 / np.sqrt(shape[-1])
        weights[name] = values
    return weights


def write_tiny(
    path: Path,
    architecture: str = "llama",
    kind: str = "F32",
    *,
    sizes: ModelSizes | None = None,
    tied: bool = False,
    changes: Mapping[str, Any] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model whose matrices are stored as `kind` (a type that gguf can quantize to)."""
    sizes = sizes or ModelSizes(architecture=architecture)
    vocabulary = vocabulary or chat_vocabulary()
    metadata = {**sizes.metadata(), **vocabulary, **(changes or {})}
    builder = GGUFBuilder().kvs({key: value for key, value in metadata.items() if value is not None})
    weights = random_weights(sizes, len(vocabulary["tokenizer.ggml.tokens"]), tied, seed)
    for name, values in weights.items():
        plain = values.ndim == 1 or values.shape[-1] in (1, TAPS, STREAMS) or "norm" in name
        stored = "F32" if plain else kind
        builder.tensor(name, values.shape, stored, quantize(values, GGMLQuantizationType[stored]))
    return builder.write(path)


def write_tiny_chat(path: Path, context: int) -> Path:
    """A `write_tiny` of Q8_0 with a chat template, of `context` positions."""
    sizes = ModelSizes(embedding=64, feed_forward=128, context=context)
    return write_tiny(path, kind="Q8_0", sizes=sizes, vocabulary=chat_vocabulary())


def with_sinks_and_output_biases(
    config: ModelConfig, tensors: Mapping[str, QuantTensor], seed: int = 0
) -> tuple[ModelConfig, dict[str, QuantTensor], dict[str, np.ndarray]]:
    """A model's configuration and tensors with attention sinks and biases of the output projection added, and the
    values of these, by name."""
    rng, added = np.random.default_rng(seed), dict[str, np.ndarray]()
    for i in range(config.block_count):
        added[f"blk.{i}.attn_sinks.weight"] = rng.standard_normal(config.head_count).astype(np.float32)
        added[f"blk.{i}.attn_output.bias"] = rng.standard_normal(config.embedding_length).astype(np.float32)
    own = {
        name: QuantTensor(
            name, FORMATS["F32"], values.shape, torch.from_numpy(values).view(1, -1).view(torch.uint8)
        )
        for name, values in added.items()
    }
    block = config.block.with_attention(sinks=True, output_bias=True)
    return replace(config, block=block), {name: tensors[name] for name in tensors} | own, added


def small_config() -> ModelConfig:
    """A llama's shape, for tests that need sizes and no weights."""
    return ModelConfig(
        architecture="llama",
        name="small",
        block=BlockForm(AttentionForm(rope_layout="pairs")),
        vocab_size=512,
        context_length=128,
        embedding_length=64,
        block_count=2,
        feed_forward_length=128,
        head_count=4,
        head_count_kv=2,
        head_dim=16,
        rope_dim=16,
        rope_freq_base=10000.0,
        rope_scaling=RopeScaling(),
        rms_eps=1e-5,
    )
