"""Gemma 3, the text model: norms on both sides of a block, GeGLU, and five layers with a window to one without.

Layers with a window have their own rotary base and no rotary scaling. The embedding is multiplied by the square root
of its width, rounded to fp32 as in llama.cpp and in `transformers` with fp32 weights (with bf16 weights `transformers`
rounds to bf16). Hugging Face folders store norm weights minus one. The output matrix is the embedding.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np

from quengine.models.architectures.architecture import Architecture, Fields, Keys, LayerKind, ModelType
from quengine.models.architectures.windows import (
    LOCAL_BASE,
    PATTERN,
    full_layers,
    gguf_fields,
    rope_of_kinds,
)
from quengine.models.blocks import AttentionForm, BlockForm, FeedForwardForm, Norms
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, integer, number

PERIOD = 6
LOCAL = 1e4
_LAYERS_OF_27B = 62


def _layer_kinds(keys: Keys, blocks: int) -> Sequence[LayerKind]:
    period = integer(keys, "sliding_window_pattern", *LIMITS["block_count"], default=PERIOD)
    full = full_layers(blocks, period)
    return ["full_attention" if i in full else "sliding_attention" for i in range(blocks)]


def full_attention_layers(blocks: int) -> tuple[int, ...]:
    """The layers without a window."""
    return full_layers(blocks, PERIOD)


def _common_keys(keys: Keys) -> Keys:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if keys.get(key):
            raise config_error(key, f"{keys[key]!r} is not implemented")
    if keys.get("sliding_window") is None:
        raise config_error("sliding_window", "missing: layers of this model have one")
    keys = rope_of_kinds(keys, keys.get("rope_theta", 1e6), keys.get("rope_local_base_freq"))
    return {**keys, "hidden_act": keys.get("hidden_activation", "gelu_pytorch_tanh")}


def _fields(keys: Keys, _config: ModelConfig) -> Fields:
    scalar = number(keys, "query_pre_attn_scalar", 256.0)
    if not scalar > 0.0:
        raise config_error("query_pre_attn_scalar", f"{scalar} is not positive")
    base = number(keys, "rope_local_base_freq", LOCAL)
    return {"attention_scale": scalar**-0.5, "rope_freq_base_swa": base}


def _size_fields(config: ModelConfig) -> Fields:
    """The attention's scale, which GGUF files lack: by the head's size, in the largest model by width and heads."""
    largest = config.block_count == _LAYERS_OF_27B
    scalar = config.embedding_length // config.head_count if largest else config.head_dim
    windowed = config.sliding_window is not None
    return {
        "attention_scale": max(scalar, 1) ** -0.5,
        "embedding_scale": float(np.float32(sqrt(config.embedding_length))),
        "full_attention_layers": full_attention_layers(config.block_count) if windowed else (),
        "rope_freq_base_swa": LOCAL if windowed else None,
    }


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    if "gemma3.rope.freq_base" not in file.metadata:  # some files have keys of another name, and another base
        raise file.error("gemma3.rope.freq_base", "missing from the metadata")
    return gguf_fields(file, config, PERIOD, config.rope_freq_base_swa)


TEXT = ModelType(
    {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    layer_kinds=_layer_kinds,
    reads_layer_types=True,
    common_keys=_common_keys,
    fields=_fields,
)

GEMMA3 = Architecture(
    name="gemma3",
    block=BlockForm(
        AttentionForm(qk_norm="head"),
        feed_forward=FeedForwardForm(activation="gelu_tanh"),
        norms=Norms(placement="both"),
    ),
    model_types={"gemma3": replace(TEXT, text_models=("gemma3_text",)), "gemma3_text": TEXT},
    hf_modules={"ffn_norm": "pre_feedforward_layernorm"},
    hf_norm_offset=1.0,
    vocabulary="spm",
    size_fields=_size_fields,
    gguf_keys=(PATTERN, LOCAL_BASE),
    gguf_fields=_gguf_fields,
    synthetic={
        "gemma3-4b": {
            "vocab_size": 262144,
            "context_length": 131072,
            "embedding_length": 2560,
            "block_count": 34,
            "feed_forward_length": 10240,
            "head_count": 8,
            "head_count_kv": 4,
            "head_dim": 256,
            "sliding_window": 1024,
            "tied_output": True,
        },
        "gemma3-tiny": {"block_count": 7, "head_dim": 256, "sliding_window": 64, "tied_output": True},
    },
)
