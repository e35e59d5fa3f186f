"""Cohere's Command R7B and Command A: attention and feed-forward side by side on one LayerNorm without bias.

Three layers of four have a window and rotate queries and keys; the others see everything, and do not rotate. Logits
are scaled. Rotated elements are neighbours, in folders too. Source: `Cohere2Model` in the `transformers` library.
"""

from collections.abc import Sequence

from quengine.models.architectures.architecture import Architecture, Fields, Keys, LayerKind, ModelType
from quengine.models.architectures.windows import PATTERN, full_layers, gguf_fields
from quengine.models.blocks import AttentionForm, BlockForm, Norms
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, integer, number

_PERIOD, _WINDOW = 4, 4096
_LOGIT_SCALE = "logit_scale"


def _layer_kinds(keys: Keys, blocks: int) -> Sequence[LayerKind]:
    period = integer(keys, "sliding_window_pattern", 1, LIMITS["block_count"][1], default=_PERIOD)
    full = full_layers(blocks, period)
    return ["full_attention" if i in full else "sliding_attention" for i in range(blocks)]


def _common_keys(keys: Keys) -> Keys:
    """config.json without head size and rotated share: `transformers` computes the former and rotates whole heads."""
    if keys.get("sliding_window") is None:
        raise config_error("sliding_window", "missing: layers of this model have one")
    passed_over = ("head_dim", "partial_rotary_factor")
    return {
        **{key: value for key, value in keys.items() if key not in passed_over},
        "rms_norm_eps": keys["layer_norm_eps"],
    }


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    full = tuple(i for i, window in enumerate(config.layer_windows) if window is None)
    return {"unrotated_layers": full, "logit_scale": number(keys, _LOGIT_SCALE, 0.0625)}


def _size_fields(config: ModelConfig) -> Fields:
    full = full_layers(config.block_count, _PERIOD)
    return {
        "sliding_window": config.sliding_window or _WINDOW,
        "full_attention_layers": full,
        "unrotated_layers": full,
        "logit_scale": 0.0625,
    }


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    """A file's windows, unrotated layers and logit scale, where 0 stands for 1 as in llama.cpp. Raises GGUFError."""
    if not file.get_int("cohere2.attention.sliding_window"):
        raise file.error("cohere2.attention.sliding_window", "missing, or 0: layers of this model have one")
    scale = file.get_float(f"cohere2.{_LOGIT_SCALE}")
    if scale is None:
        raise file.error(f"cohere2.{_LOGIT_SCALE}", "missing from the metadata")
    found = gguf_fields(file, config, _PERIOD, None)
    return {**found, "unrotated_layers": found["full_attention_layers"], "logit_scale": scale or 1.0}


COHERE2 = Architecture(
    name="cohere2",
    block=BlockForm(AttentionForm(rope_layout="pairs"), norms=Norms(kind="layer", placement="parallel")),
    model_types={
        "cohere2": ModelType(
            {
                "vocab_size": 256000,
                "hidden_size": 8192,
                "intermediate_size": 22528,
                "num_hidden_layers": 40,
                "num_attention_heads": 64,
                "max_position_embeddings": 8192,
                "layer_norm_eps": 1e-5,
                "sliding_window": 4096,
                "tie_word_embeddings": True,
            },
            layer_kinds=_layer_kinds,
            reads_layer_types=True,
            common_keys=_common_keys,
            fields=_fields,
        )
    },
    hf_rope_pairs=True,
    size_fields=_size_fields,
    gguf_keys=(PATTERN, _LOGIT_SCALE),
    gguf_fields=_gguf_fields,
    synthetic={
        "command-r7b": {
            "vocab_size": 256000,
            "context_length": 8192,
            "block_count": 32,
            "rope_freq_base": 5e4,
            "sliding_window": 4096,
            "tied_output": True,
        },
        "cohere2-tiny": {"block_count": 5, "sliding_window": 64, "tied_output": True},
    },
)
