"""EXAONE 4: norms after attention and feed-forward only, and norms of each query and key head.

The largest model has a window in three of four layers; its other layers do not rotate queries and keys. Source:
LG AI Research 2025, "EXAONE 4.0"; `Exaone4Model` in the `transformers` library.
"""

from collections.abc import Sequence

from quengine.models.architectures.architecture import Architecture, Fields, Keys, LayerKind, ModelType
from quengine.models.architectures.windows import PATTERN, full_layers, gguf_fields
from quengine.models.blocks import AttentionForm, BlockForm, Norms
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import integer

_PERIOD = 4


def _layer_kinds(keys: Keys, blocks: int) -> Sequence[LayerKind]:
    period = integer(keys, "sliding_window_pattern", 1, LIMITS["block_count"][1], default=_PERIOD)
    full = range(blocks) if keys.get("sliding_window") is None else full_layers(blocks, period)
    return ["full_attention" if i in full else "sliding_attention" for i in range(blocks)]


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    if keys.get("sliding_window") is None:
        return {}
    windows = config.layer_windows
    return {"unrotated_layers": tuple(i for i, window in enumerate(windows) if window is None)}


def _size_fields(config: ModelConfig) -> Fields:
    full = () if config.sliding_window is None else full_layers(config.block_count, _PERIOD)
    return {"full_attention_layers": full, "unrotated_layers": full}


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    found = gguf_fields(file, config, _PERIOD, None)
    return {**found, "unrotated_layers": found["full_attention_layers"]} if found else {}


EXAONE4 = Architecture(
    name="exaone4",
    block=BlockForm(AttentionForm(qk_norm="head"), norms=Norms(placement="post")),
    model_types={
        "exaone4": ModelType(
            {
                "vocab_size": 102400,
                "hidden_size": 4096,
                "intermediate_size": 16384,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
            },
            layer_kinds=_layer_kinds,
            reads_layer_types=True,
            fields=_fields,
        )
    },
    size_fields=_size_fields,
    gguf_keys=(PATTERN,),
    gguf_fields=_gguf_fields,
    synthetic={
        "exaone4-32b": {
            "vocab_size": 102400,
            "context_length": 131072,
            "embedding_length": 5120,
            "block_count": 64,
            "feed_forward_length": 27392,
            "head_count": 40,
            "head_count_kv": 8,
            "sliding_window": 4096,
            "pooled": True,
        },
        "exaone4-tiny": {"block_count": 4, "sliding_window": 64},
    },
)
