"""Gemma 3, the text model: norms on both sides of a block, GeGLU, and five layers with a window to one without.

Layers with a window have a rotary base of their own, which no scaling applies to. The embedding is multiplied by the
root of its width, rounded to fp32 (as llama.cpp does, and `transformers` with fp32 weights; with bf16 weights it rounds
to bf16). Norm weights are stored less one in Hugging Face folders. The output matrix is the embedding.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np

from quengine.models.architectures.architecture import Architecture, Fields, Keys, LayerKind, ModelType
from quengine.models.config import LIMITS, BlockKind, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, integer, number

_PERIOD = 6
_LOCAL_BASE = 1e4
_PATTERN = "attention.sliding_window_pattern"
_LOCAL_BASE_KEY = "rope.freq_base_swa"
_LAYERS_OF_27B = 62


def _full_layers(blocks: int, period: int) -> tuple[int, ...]:
    """Every `period`th layer sees every position."""
    return tuple(range(period - 1, blocks, period))


def _layer_kinds(keys: Keys, blocks: int) -> Sequence[LayerKind]:
    period = integer(keys, "sliding_window_pattern", *LIMITS["block_count"], default=_PERIOD)
    full = _full_layers(blocks, period)
    return ["full_attention" if i in full else "sliding_attention" for i in range(blocks)]


def _common_keys(keys: Keys) -> Keys:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if keys.get(key):
            raise config_error(key, f"{keys[key]!r} is not implemented")
    if keys.get("sliding_window") is None:
        raise config_error("sliding_window", "missing: layers of this model have one")
    full, local = _rope_parameters(keys)
    if (kind := local.get("rope_type", local.get("type", "default"))) != "default":
        raise config_error("rope_parameters", f"{kind!r} for layers with a window is not implemented")
    return {
        **keys,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": keys.get("rope_theta", 1e6), **full},
        "rope_local_base_freq": local.get("rope_theta", keys.get("rope_local_base_freq")),
        "hidden_act": keys.get("hidden_activation", "gelu_pytorch_tanh"),
    }


def _rope_parameters(keys: Keys) -> tuple[Keys, Keys]:
    """Those of layers without a window, to which `rope_scaling` belongs, and of layers with one."""
    given, scaling = keys.get("rope_parameters") or {}, keys.get("rope_scaling") or {}
    if isinstance(given, dict) and isinstance(scaling, dict):
        kinds = [given.get("full_attention"), given.get("sliding_attention")]
        full, local = ({"rope_type": "default"} if kind is None else kind for kind in kinds)
        if isinstance(full, dict) and isinstance(local, dict):
            return {**full, **scaling}, local
    raise config_error("rope_parameters", "is not an object for each kind of layer")


def _fields(keys: Keys, _config: ModelConfig) -> Fields:
    scalar = number(keys, "query_pre_attn_scalar", 256.0)
    if not scalar > 0.0:
        raise config_error("query_pre_attn_scalar", f"{scalar} is not positive")
    base = number(keys, "rope_local_base_freq", _LOCAL_BASE)
    return {"attention_scale": scalar**-0.5, "rope_freq_base_swa": base}


def _size_fields(config: ModelConfig) -> Fields:
    """The attention's scale, which GGUF files lack, follows from the head, in the largest model from the width."""
    largest = config.block_count == _LAYERS_OF_27B
    scalar = config.embedding_length // config.head_count if largest else config.head_dim
    windowed = config.sliding_window is not None
    return {
        "attention_scale": max(scalar, 1) ** -0.5,
        "embedding_scale": float(np.float32(sqrt(config.embedding_length))),
        "full_attention_layers": _full_layers(config.block_count, _PERIOD) if windowed else (),
        "rope_freq_base_swa": _LOCAL_BASE if windowed else None,
    }


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    """The pattern is the period of layers without a window, or for each layer whether it has one."""
    if "gemma3.rope.freq_base" not in file.metadata:  # some files have keys of another name, and another base
        raise file.error("gemma3.rope.freq_base", "missing from the metadata")
    if config.sliding_window is None:
        return {}
    key, base = f"gemma3.{_PATTERN}", file.get_float(f"gemma3.{_LOCAL_BASE_KEY}")
    fields = {"rope_freq_base_swa": config.rope_freq_base_swa if base is None else base}
    pattern = file.metadata.get(key)
    if isinstance(pattern, np.ndarray):
        if pattern.dtype.kind not in "biu" or len(pattern) != config.block_count:
            raise file.error(key, f"is not a flag for each of {config.block_count} layers")
        return {**fields, "full_attention_layers": tuple(np.flatnonzero(pattern == 0).tolist())}
    period = file.get_int(key, *LIMITS["block_count"]) or _PERIOD
    return {**fields, "full_attention_layers": _full_layers(config.block_count, period)}


_TEXT = ModelType(
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
    block=BlockKind(norms="both", qk_norm="head", activation="gelu_tanh"),
    model_types={"gemma3": replace(_TEXT, text_models=("gemma3_text",)), "gemma3_text": _TEXT},
    hf_modules={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    hf_norm_offset=1.0,
    vocabulary="spm",
    size_fields=_size_fields,
    gguf_keys=(_PATTERN, _LOCAL_BASE_KEY),
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
