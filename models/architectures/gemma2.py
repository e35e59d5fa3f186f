"""Gemma 2: norms on both sides of a block, GeGLU, a window in every other layer, soft-capped scores and logits.

A soft cap c turns x into `c tanh(x / c)`. As in Gemma 3, the embedding is multiplied by the square root of its width,
and Hugging Face folders store norm weights minus one. The output matrix is the embedding.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np

from quengine.models.architectures.architecture import Architecture, Fields, Keys, LayerKind, ModelType
from quengine.models.architectures.windows import PATTERN, full_layers, gguf_fields
from quengine.models.blocks import BlockForm, FeedForwardForm, Norms
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, number

_PERIOD = 2
_WINDOW = 4096
"""The window of all released models, and llama.cpp's where a file has none."""

_LAYERS_OF_27B = 46
_CAPS = {
    "attention_softcap": ("attn_logit_softcapping", 50.0),
    "logit_softcap": ("final_logit_softcapping", 30.0),
}
"""Field of ModelConfig -> the key in both kinds of files, and the value where it is missing."""


def _layer_kinds(_keys: Keys, blocks: int) -> Sequence[LayerKind]:
    full = full_layers(blocks, _PERIOD)
    return ["full_attention" if i in full else "sliding_attention" for i in range(blocks)]


def _common_keys(keys: Keys) -> Keys:
    if keys.get("use_bidirectional_attention"):
        problem = f"{keys['use_bidirectional_attention']!r} is not implemented"
        raise config_error("use_bidirectional_attention", problem)
    if keys.get("sliding_window") is None:
        raise config_error("sliding_window", "missing: layers of this model have one")
    return {**keys, "hidden_act": keys.get("hidden_activation", "gelu_pytorch_tanh")}


def _fields(keys: Keys, _config: ModelConfig) -> Fields:
    """The scale and the caps of scores and logits; a cap that is null caps nothing."""
    scalar = number(keys, "query_pre_attn_scalar", 256.0)
    if not scalar > 0.0:
        raise config_error("query_pre_attn_scalar", f"{scalar} is not positive")
    caps = {
        field: 0.0 if keys.get(key, default) is None else number(keys, key, default)
        for field, (key, default) in _CAPS.items()
    }
    for field, cap in caps.items():
        if keys.get(_CAPS[field][0], 1.0) is not None and not cap > 0.0:
            raise config_error(_CAPS[field][0], f"{cap} is not positive")
    return {"attention_scale": scalar**-0.5, **caps}


def _size_fields(config: ModelConfig) -> Fields:
    """The attention's scale, which GGUF files lack: by the head's size, in the largest model by width and heads."""
    largest = config.block_count == _LAYERS_OF_27B
    scalar = config.embedding_length // config.head_count if largest else config.head_dim
    return {
        "attention_scale": max(scalar, 1) ** -0.5,
        "embedding_scale": float(np.float32(sqrt(config.embedding_length))),
        "sliding_window": config.sliding_window or _WINDOW,
        "full_attention_layers": full_layers(config.block_count, _PERIOD),
        **{field: default for field, (_, default) in _CAPS.items()},
    }


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    if file.get_int("gemma2.attention.sliding_window") == 0:
        raise file.error("gemma2.attention.sliding_window", "0: layers of this model have a window")
    found = {**gguf_fields(file, config, _PERIOD, None)}
    for field, (key, default) in _CAPS.items():
        cap = file.get_float(f"gemma2.{key}")
        found[field] = default if cap is None else cap
        if not found[field] > 0.0:
            raise file.error(f"gemma2.{key}", f"{found[field]} is not positive")
    return found


GEMMA2 = Architecture(
    name="gemma2",
    block=BlockForm(feed_forward=FeedForwardForm(activation="gelu_tanh"), norms=Norms(placement="both")),
    model_types={
        "gemma2": ModelType(
            {
                "vocab_size": 256000,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 8192,
                "sliding_window": 4096,
                "tie_word_embeddings": True,
            },
            layer_kinds=_layer_kinds,
            reads_layer_types=True,
            common_keys=_common_keys,
            fields=_fields,
        )
    },
    hf_modules={"ffn_norm": "pre_feedforward_layernorm"},
    hf_norm_offset=1.0,
    vocabulary="spm",
    size_fields=_size_fields,
    gguf_keys=(PATTERN, *(key for key, _ in _CAPS.values())),
    gguf_fields=_gguf_fields,
    synthetic={
        "gemma2-9b": {
            "vocab_size": 256000,
            "context_length": 8192,
            "embedding_length": 3584,
            "block_count": 42,
            "feed_forward_length": 14336,
            "head_count": 16,
            "head_count_kv": 8,
            "head_dim": 256,
            "rope_freq_base": 1e4,
            "sliding_window": 4096,
            "tied_output": True,
        },
        "gemma2-tiny": {"block_count": 4, "sliding_window": 64, "tied_output": True},
    },
)
