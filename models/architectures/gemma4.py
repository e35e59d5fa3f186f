"""Gemma 4, the text model: local layers with a window, global ones with wider heads whose values may be their keys.

Scores are not scaled. Norms of query and key heads have weights, norms of value heads have none. In global layers only
the first elements of a head's halves rotate (p-RoPE): the file divides the other frequencies by 1e30. Norms stand on
both sides of attention and feed-forward, and each layer ends by multiplying the residual stream by its own number.
In the mixture of experts each layer has a dense feed-forward, too (blocks/dense_and_experts.py). In E2B and E4B the
last layers use the keys and values of earlier ones, and each layer gets per-layer embeddings of the tokens
(blocks/layer_input.py). Logits are soft-capped; the output matrix is the embedding. Source: `Gemma4TextModel` in the
`transformers` library; llama.cpp's converter for the names and orders of GGUF files.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Fields, Keys, LayerKind, ModelType
from quengine.models.architectures.windows import LOCAL_BASE, PATTERN, full_layers, gguf_fields, rope_of_kinds
from quengine.models.blocks import AttentionForm, BlockForm, ExpertsForm, FeedForwardForm, Norms
from quengine.models.config import LIMITS, LayerInputSizes, LayerSizes, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, flag, integer, number
from quengine.models.rotation import RopeScaling

_PERIOD = 6
_BASE, _LOCAL_BASE = 1e6, 1e4
_STILL = float(np.float32(1e30))
"""Divisor of the frequency of elements that do not turn."""

_CAP = "final_logit_softcapping"
SHARED, PER_LAYER = "attention.shared_kv_layers", "embedding_length_per_layer_input"
_LOCAL_SIZES = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
_SIZES = {"head_dim": "head_dim", "num_key_value_heads": "head_count_kv"}
"""Keys that `per_layer_config` may have of a layer -> what they are limited as."""


def _layer_kinds(_keys: Keys, blocks: int) -> Sequence[LayerKind]:
    """Every sixth layer and the last one are global."""
    full = {*full_layers(blocks, _PERIOD), blocks - 1}
    return ["full_attention" if i in full else "sliding_attention" for i in range(blocks)]


def _common_keys(keys: Keys) -> Keys:
    if keys.get("use_bidirectional_attention") not in (
        None,
        "vision",
    ):  # "vision" changes nothing for text tokens
        problem = f"{keys['use_bidirectional_attention']!r} is not implemented"
        raise config_error("use_bidirectional_attention", problem)
    if keys.get("sliding_window") is None:
        raise config_error("sliding_window", "missing: layers of this model have one")
    kinds = keys.get("layer_types")
    if isinstance(kinds, list) and kinds:  # transformers makes the last layer global whatever the list says
        keys = {**keys, "layer_types": [*kinds[:-1], "full_attention"]}
    if keys.get("rope_parameters") is None:
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": _BASE}
        keys = {**keys, "rope_parameters": {"full_attention": full}}
    keys = rope_of_kinds(keys, _BASE, _LOCAL_BASE)
    parameters = dict(keys["rope_parameters"])
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    share = number(parameters, "partial_rotary_factor", 1.0) if kind == "proportional" else 1.0
    if kind == "proportional":
        if number(parameters, "factor", 1.0) != 1.0:
            raise config_error(
                "rope_parameters", f"factor {parameters['factor']} is not implemented, only 1 is"
            )
        parameters = {"rope_theta": parameters["rope_theta"]}
    return {
        **keys,
        "rope_parameters": parameters,
        "turned_share": share,
        "hidden_act": keys.get("hidden_activation", "gelu_pytorch_tanh"),
    }


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    blocks, full = config.block_count, frozenset(config.full_attention_layers)
    windowed = [config.sliding_window is not None and i not in full for i in range(blocks)]
    same = keys.get("attention_k_eq_v")
    if not isinstance(same, bool):
        raise config_error("attention_k_eq_v", f"{same!r} is not true or false")
    own, shared = _own_sizes(keys, windowed), integer(keys, "num_kv_shared_layers", 0, 1 << 24, default=0)
    sizes = [
        LayerSizes(
            config.head_count,
            one.get("num_key_value_heads", config.head_count_kv),
            config.feed_forward_length * (2 if _is_wide(keys) and i >= blocks - shared else 1),
            one.get("head_dim", config.head_dim),
        )
        for i, one in enumerate(own)
    ]
    for kind in (True, False):
        dims = {size.head_dim for size, is_local in zip(sizes, windowed, strict=True) if is_local == kind}
        if len(dims) > 1:
            raise config_error("per_layer_config", f"heads of {sorted(dims)} in layers of one kind")
    cap = keys.get(_CAP)
    if cap is not None and not number(keys, _CAP, 0.0) > 0.0:
        raise config_error(_CAP, f"{cap} is not positive")
    found = _of_sizes(config, sizes, windowed)
    return {
        **found,
        "rope_scaling": _scaling(number(keys, "turned_share", 1.0), found["rope_dim"], config.context_length),
        "keys_as_values": tuple(i for i in range(blocks - shared) if same and not windowed[i]),
        "shared_kv_layers": shared,
        "layer_input": _layer_input(keys, config),
        "rope_freq_base_swa": number(keys, "rope_local_base_freq", _LOCAL_BASE),
        "logit_softcap": 0.0 if cap is None else float(cap),
    }


def _is_wide(keys: Keys) -> bool:
    """Whether layers that share keys and values have feed-forwards of twice the length."""
    return flag(keys, "use_double_wide_mlp")


def _layer_input(keys: Keys, config: ModelConfig) -> LayerInputSizes | None:
    length = integer(keys, "hidden_size_per_layer_input", 0, LIMITS["embedding_length"][1])
    if not length:
        return None
    rows = integer(keys, "vocab_size_per_layer_input", *LIMITS["vocab_size"], default=262144)
    if rows != config.vocab_size:
        problem = f"{rows} is not the vocabulary of {config.vocab_size} tokens, which is not implemented"
        raise config_error("vocab_size_per_layer_input", problem)
    return LayerInputSizes(length)


def _own_sizes(keys: Keys, windowed: Sequence[bool]) -> Sequence[Mapping[str, int]]:
    """The sizes that replace the model's in each layer, by `per_layer_config` or else the keys of global layers."""
    given = keys.get("per_layer_config")
    if given is None:
        of_global: dict[str, Any] = {"head_dim": keys.get("global_head_dim", 512)}
        if keys["attention_k_eq_v"] and keys.get("num_global_key_value_heads") is not None:
            of_global["num_key_value_heads"] = keys["num_global_key_value_heads"]
        given = {str(i): of_global for i, is_local in enumerate(windowed) if not is_local}
    if not isinstance(given, Mapping):
        raise config_error("per_layer_config", "is not an object")
    if unknown := sorted(map(str, set(given) - {str(i) for i in range(len(windowed))})):
        raise config_error("per_layer_config", f"{unknown[0]!r} is not a layer of {len(windowed)}")
    return [_own_sizes_of_layer(given.get(str(i), {})) for i in range(len(windowed))]


def _own_sizes_of_layer(given: Any) -> Mapping[str, int]:
    if not isinstance(given, Mapping):
        raise config_error("per_layer_config", "is not an object for each layer")
    if other := sorted(map(str, set(given) - set(_SIZES))):
        raise config_error("per_layer_config", f"{other[0]} is not implemented")
    return {key: integer(given, key, *LIMITS[_SIZES[key]]) for key in given}


def _of_sizes(config: ModelConfig, sizes: Sequence[LayerSizes], windowed: Sequence[bool]) -> dict[str, Any]:
    """The fields that follow from the layers' sizes: the largest of each, and the `rope_dim` of the global layers."""
    full = [size.head_dim for size, is_local in zip(sizes, windowed, strict=True) if not is_local]
    local = [size.head_dim for size, is_local in zip(sizes, windowed, strict=True) if is_local]
    return {
        "layer_sizes": tuple(sizes),
        "head_count_kv": max(size.head_count_kv for size in sizes),
        "feed_forward_length": max(size.feed_forward_length for size in sizes),
        "head_dim": max((*full, *local)),
        "rope_dim": full[0] if full else config.head_dim,
        "rope_dim_swa": local[0] if local else None,
    }


def _scaling(share: float, dim: int, context: int) -> RopeScaling:
    """p-RoPE: of the dim / 2 frequencies only the first `share` rotate."""
    if not 0.0 <= share <= 1.0:
        raise config_error("rope_parameters", f"partial_rotary_factor {share} is not from 0 to 1")
    turned = int(share * dim // 2)
    if share == 1.0:
        return RopeScaling(original_context_length=context)
    factors = (1.0,) * turned + (_STILL,) * (dim // 2 - turned)
    return RopeScaling("llama3", original_context_length=context, freq_factors=factors)


def _size_fields(config: ModelConfig) -> Fields:
    windowed, sizes = config.sliding_window is not None, config.layer_sizes
    full = tuple(i for i, size in enumerate(sizes) if size.head_dim == config.head_dim) if windowed else ()
    local = next((size.head_dim for i, size in enumerate(sizes) if i not in full), 0)
    return {
        "attention_scale": 1.0,
        "embedding_scale": float(np.float32(sqrt(config.embedding_length))),
        "full_attention_layers": full,
        "rope_freq_base_swa": _LOCAL_BASE if windowed else None,
        "rope_dim_swa": local or None,
        "keys_as_values": full if config.layer_input is None else (),
        "logit_softcap": 30.0,
    }


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    cap, length = (
        file.get_float(f"{config.architecture}.{_CAP}"),
        file.get_int(f"{config.architecture}.{PER_LAYER}") or 0,
    )
    shared = file.get_int(f"{config.architecture}.{SHARED}") or 0
    found: dict[str, Any] = {
        "logit_softcap": 0.0 if cap is None else cap,
        "shared_kv_layers": shared,
        "layer_input": LayerInputSizes(length) if length else None,
    }
    if config.sliding_window is None:
        if (key := f"{config.architecture}.attention.sliding_window") in file.metadata:
            raise file.error(key, "0: leave it out where no layer has a window")
        layers = range(config.block_count - shared)
        return {**found, "keys_as_values": tuple(i for i in layers if _lacks_values(file, i))}
    return {**found, **windows_of_gguf(file, config, shared)}


def windows_of_gguf(file: GGUFFile, config: ModelConfig, shared: int) -> Fields:
    """The fields of a file with windows: their layers, all layers' sizes, `keys_as_values`. shared: the number of last
    layers without keys of their own."""
    prefix = config.architecture
    for suffix in (PATTERN, *_LOCAL_SIZES, LOCAL_BASE, "rope.freq_base"):
        if f"{prefix}.{suffix}" not in file.metadata:
            raise file.error(f"{prefix}.{suffix}", "missing from the metadata")
    if not isinstance(file.metadata[f"{prefix}.{PATTERN}"], np.ndarray):
        raise file.error(f"{prefix}.{PATTERN}", f"is not a flag for each of {config.block_count} layers")
    windows = gguf_fields(file, config, _PERIOD, None)
    full = frozenset(windows["full_attention_layers"])
    windowed = [i not in full for i in range(config.block_count)]
    if full and config.rope_scaling.freq_factors is None:
        problem = "missing: it says which elements of heads in layers without a window are rotated"
        raise file.tensor_error("rope_freqs.weight", problem)
    local = file.require_int(f"{prefix}.{_LOCAL_SIZES[0]}", *LIMITS["head_dim"])
    sizes = [
        config.sizes(i)._replace(head_dim=local if windowed[i] else config.head_dim)
        for i in range(config.block_count)
    ]
    return {
        **windows,
        **_of_sizes(config, sizes, windowed),
        "head_dim": max(config.head_dim, local),
        "rope_dim": config.rope_dim,
        "rope_dim_swa": file.require_int(f"{prefix}.{_LOCAL_SIZES[2]}", *LIMITS["rope_dim"]),
        "keys_as_values": tuple(
            sorted(i for i in full if i < config.block_count - shared and _lacks_values(file, i))
        ),
    }


def _lacks_values(file: GGUFFile, layer: int) -> bool:
    names = (f"blk.{layer}.attn_v.weight", f"blk.{layer}.attn_qkv.weight")
    return not any(name in file.tensors for name in names)


_SIZE_KEYS = {
    "shared_kv_layers": "num_kv_shared_layers",
    "layer_input.length": "hidden_size_per_layer_input",
}

TEXT = ModelType(
    {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "tie_word_embeddings": True,
    },
    layer_kinds=_layer_kinds,
    reads_layer_types=True,
    size_keys=_SIZE_KEYS,
    expert_keys={
        "count": "num_experts",
        "used": "top_k_experts",
        "feed_forward_length": "moe_intermediate_size",
    },
    experts_flag="enable_moe_block",
    common_keys=_common_keys,
    fields=_fields,
)
_UNIFIED = ModelType(
    {
        **TEXT.defaults,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    layer_kinds=_layer_kinds,
    reads_layer_types=True,
    size_keys=_SIZE_KEYS,
    common_keys=_common_keys,
    fields=_fields,
)


def _with_vision(text: ModelType, name: str) -> ModelType:
    return ModelType(
        **{**{field: getattr(text, field) for field in text.__dataclass_fields__}, "text_models": (name,)}
    )


def _synthetic(layers: int, heads: int, local: int, full: int, length: int) -> tuple[LayerSizes, ...]:
    """Local layers have `local` key/value heads of 256, global ones `full` of 512."""
    return tuple(
        LayerSizes(heads, full, length, 512)
        if (i + 1) % _PERIOD == 0
        else LayerSizes(heads, local, length, 256)
        for i in range(layers)
    )


def _small(layers: int, period: int, heads: int, lengths: tuple[int, int], shared: int) -> dict[str, Any]:
    """E2B and E4B: `heads` key/value heads, and feed-forwards of the second length in layers that share keys."""
    sizes = [
        LayerSizes(8, heads, lengths[i >= layers - shared], 512 if (i + 1) % period == 0 else 256)
        for i in range(layers)
    ]
    return {
        **_RELEASED,
        "context_length": 131072,
        "sliding_window": 512,
        "block_count": layers,
        "layer_sizes": tuple(sizes),
        "shared_kv_layers": shared,
        "layer_input_length": 256,
    }


_RELEASED = {
    "vocab_size": 262144,
    "context_length": 262144,
    "rope_freq_factors": (1.0,) * 64 + (_STILL,) * 192,
    "sliding_window": 1024,
    "tied_output": True,
    "quant": "Q4_0",
}

GEMMA4 = Architecture(
    name="gemma4",
    block=BlockForm(
        AttentionForm(qk_norm="head", v_norm=True, images_both_ways="windowed"),
        feed_forward=FeedForwardForm(activation="gelu_tanh"),
        experts=ExpertsForm(beside_dense=True),
        norms=Norms(placement="both", scaled=True),
    ),
    model_types={
        "gemma4": _with_vision(TEXT, "gemma4_text"),
        "gemma4_text": TEXT,
        "gemma4_unified": _with_vision(_UNIFIED, "gemma4_unified_text"),
        "gemma4_unified_text": _UNIFIED,
    },
    router=RouterKind(used=8),
    rope_scalings=frozenset(),
    hf_modules={
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_gate_inp.weight": "router.proj.weight",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
    },
    vocabulary="spm",
    size_fields=_size_fields,
    sizes_by_layer=True,
    gguf_keys=(PATTERN, LOCAL_BASE, _CAP, SHARED, PER_LAYER, *_LOCAL_SIZES),
    gguf_fields=_gguf_fields,
    synthetic={
        "gemma-4-26b-a4b": {
            **_RELEASED,
            "embedding_length": 2816,
            "block_count": 30,
            "experts": 128,
            "experts_used": 8,
            "expert_feed_forward_length": 704,
            "layer_sizes": _synthetic(30, 16, 8, 2, 2112),
        },
        "gemma-4-31b": {
            **_RELEASED,
            "embedding_length": 5376,
            "block_count": 60,
            "layer_sizes": _synthetic(60, 32, 16, 4, 21504),
        },
        "gemma-4-12b": {
            **_RELEASED,
            "embedding_length": 3840,
            "block_count": 48,
            "layer_sizes": _synthetic(48, 16, 8, 1, 15360),
        },
        "gemma-4-e2b": {"embedding_length": 1536, **_small(35, 5, 1, (6144, 12288), 20)},
        "gemma-4-e4b": {"embedding_length": 2560, **_small(42, 6, 2, (10240, 10240), 18)},
        "gemma-4-e-tiny": {
            "block_count": 6,
            "sliding_window": 64,
            "rope_freq_factors": (1.0,) * 16 + (_STILL,) * 48,
            "layer_sizes": (
                (LayerSizes(4, 1, 512, 64),) * 2
                + (LayerSizes(4, 1, 512, 128),)
                + (LayerSizes(4, 1, 768, 64),) * 2
                + (LayerSizes(4, 1, 768, 128),)
            ),
            "shared_kv_layers": 3,
            "layer_input_length": 64,
            "tied_output": True,
        },
        "gemma-4-tiny": {
            "block_count": 6,
            "sliding_window": 64,
            "rope_freq_factors": (1.0,) * 16 + (_STILL,) * 48,
            "layer_sizes": (LayerSizes(4, 2, 512, 64),) * 5 + (LayerSizes(4, 1, 512, 128),),
            "tied_output": True,
        },
        "gemma-4-moe-tiny": {
            "block_count": 6,
            "sliding_window": 64,
            "experts": 8,
            "experts_used": 2,
            "expert_feed_forward_length": 256,
            "rope_freq_factors": (1.0,) * 16 + (_STILL,) * 48,
            "layer_sizes": (LayerSizes(4, 2, 512, 64),) * 5 + (LayerSizes(4, 1, 512, 128),),
            "tied_output": True,
        },
    },
)
