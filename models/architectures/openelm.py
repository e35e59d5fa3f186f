"""OpenELM: layers of unlike sizes, whose heads and feed-forwards grow from the first to the last; norms of each query
and key head; the output matrix is the embedding.

Folders have query, key and value rows in one tensor, gate and up rows in another; GGUF files have gate and up apart.
Source: Mehta et al. 2024, "OpenELM: An Efficient Language Model Family with Open Training and Inference Framework",
section 2.1; `modeling_openelm.py` beside the released models.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from quengine.models.architectures.architecture import Architecture, Fields, HFPart, Keys, ModelType
from quengine.models.blocks import AttentionForm, BlockForm
from quengine.models.config import LIMITS, LayerSizes, ModelConfig
from quengine.models.hf.hf_keys import config_error, flag, integer, number

_COMPUTED = {
    "activation_fn_name": "swish",
    "normalization_layer_name": "rms_norm",
    "ffn_with_glu": True,
    "normalize_qk_projections": True,
}
"""Keys of config.json that could ask for something else."""


def _divisible(value: float, divisor: int) -> int:
    """The multiple of `divisor` nearest to `value`, or the next one if the nearest is below nine tenths of `value`."""
    nearest = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * value else nearest


def _feed_forward_length(multiplier: float, width: int, divisor: int) -> int:
    return _divisible(multiplier * width, divisor)


def _of_layers(keys: Keys, key: str, layers: int) -> Sequence[Any]:
    values = keys.get(key)
    if not isinstance(values, list) or len(values) != layers:
        raise config_error(key, f"is not a list of numbers, one for each of {layers} layers")
    return values


def _layer_sizes(keys: Keys) -> list[LayerSizes]:
    layers = integer(keys, "num_transformer_layers", *LIMITS["block_count"])
    width = integer(keys, "model_dim", *LIMITS["embedding_length"])
    divisor = integer(keys, "ffn_dim_divisor", 1, LIMITS["feed_forward_length"][1])
    names = ("num_query_heads", "num_kv_heads", "ffn_multipliers")
    lists = (_of_layers(keys, name, layers) for name in names)
    return [
        _sizes(dict(zip(names, values, strict=True)), width, divisor) for values in zip(*lists, strict=True)
    ]


def _sizes(keys: Keys, width: int, divisor: int) -> LayerSizes:
    """The sizes of one layer by its values in `keys`."""
    heads = integer(keys, "num_query_heads", *LIMITS["head_count"])
    kv_heads = integer(keys, "num_kv_heads", *LIMITS["head_count_kv"])
    if heads % kv_heads:
        raise config_error("num_query_heads", f"{heads} is not a multiple of the {kv_heads} key/value heads")
    multiplier = number(keys, "ffn_multipliers", 0.0)
    length = _feed_forward_length(multiplier, width, divisor)
    if multiplier <= 0.0 or length > LIMITS["feed_forward_length"][1]:
        raise config_error("ffn_multipliers", f"{multiplier} makes no feed-forward of a width of {width}")
    return LayerSizes(heads, kv_heads, length)


def _common_keys(keys: Keys) -> Keys:
    for key, computed in _COMPUTED.items():
        if keys.get(key) != computed:
            raise config_error(key, f"{keys.get(key)!r} is not implemented, only {computed!r} is")
    sizes = _layer_sizes(keys)
    return {
        **keys,
        "hidden_size": keys["model_dim"],
        "num_hidden_layers": keys["num_transformer_layers"],
        "num_attention_heads": max(layer.head_count for layer in sizes),
        "num_key_value_heads": max(layer.head_count_kv for layer in sizes),
        "intermediate_size": max(layer.feed_forward_length for layer in sizes),
        "max_position_embeddings": integer(keys, "max_context_length", *LIMITS["context_length"]),
        "rope_theta": number(keys, "rope_freq_constant", 10000.0),
    }


def _fields(keys: Keys, _config: ModelConfig) -> Fields:
    sizes = tuple(_layer_sizes(keys))
    return {
        "layer_sizes": sizes if len(set(sizes)) > 1 else (),
        "tied_output": flag(keys, "share_input_output_layers"),
    }


def _scaled(layers: int, width: int, head_dim: int, groups: int) -> Iterator[LayerSizes]:
    """The sizes of a released model's layers: attention grows from half to all of the width, feed-forwards from half to
    four times the width. `groups`: query heads per key/value head."""
    for layer in range(layers):
        share = layer / (layers - 1)
        queries = _divisible(round(0.5 + 0.5 * share, 2) * width, head_dim * groups)
        heads = queries // head_dim
        yield LayerSizes(
            heads, heads // groups, _feed_forward_length(round(0.5 + 3.5 * share, 2), width, 256)
        )


OPENELM = Architecture(
    name="openelm",
    block=BlockForm(AttentionForm(qk_norm="head", merged=True)),
    vocabulary="spm",
    sizes_by_layer=True,
    model_types={
        "openelm": ModelType(
            {
                "vocab_size": 32000,
                "max_context_length": 2048,
                "num_transformer_layers": 12,
                "model_dim": 2048,
                "head_dim": 128,
                "ffn_dim_divisor": 256,
                "ffn_with_glu": True,
                "activation_fn_name": "swish",
                "normalization_layer_name": "rms_norm",
                "normalize_qk_projections": False,
                "share_input_output_layers": False,
            },
            common_keys=_common_keys,
            fields=_fields,
        )
    },
    hf_modules={
        "token_embd": "token_embeddings",
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.qkv_proj",
        "attn_q_norm": "attn.q_norm",
        "attn_k_norm": "attn.k_norm",
        "attn_output": "attn.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_down": "ffn.proj_2",
    },
    hf_parts={
        "ffn_gate.weight": HFPart("ffn.proj_1.weight", "first half"),
        "ffn_up.weight": HFPart("ffn.proj_1.weight", "second half"),
    },
    synthetic={
        "openelm-270m": {
            "vocab_size": 32000,
            "context_length": 2048,
            "embedding_length": 1280,
            "block_count": 16,
            "head_dim": 64,
            "rope_freq_base": 1e4,
            "layer_sizes": tuple(_scaled(16, 1280, 64, 4)),
            "tied_output": True,
        },
        "openelm-tiny": {
            "layer_sizes": (LayerSizes(4, 1, 512), LayerSizes(8, 2, 1024)),
            "tied_output": True,
        },
    },
)
