"""ERNIE 4.5, dense and as a mixture of experts: Llama's layers, whose folders have rotated elements as neighbours too.

The mixture chooses experts by softmax plus a bias per expert, and has a shared expert. The first layers are dense, and
so are all others but each `moe_layer_interval`th. Source: `Ernie4_5_MoeModel` in the `transformers` library.
"""

from collections.abc import Sequence
from dataclasses import replace

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Fields, Keys, ModelType
from quengine.models.architectures.mixtures import SHARED_EXPERTS
from quengine.models.blocks import AttentionForm, BlockForm, ExpertsForm
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, integer, number

_STEP = "interleave_moe_layer_step"
_MOST = LIMITS["block_count"][1]
_LEAST_SUM = 1e-9
"""The largest `moe_norm_min`, below which no sum of chosen scores is divided by itself, that changes nothing."""

_DEFAULTS = {
    "vocab_size": 103424,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}


def _common_keys(keys: Keys) -> Keys:
    if keys.get("use_bias"):
        raise config_error("use_bias", "biases on all projections are not implemented")
    return keys


_OTHER_NAMES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
"""Keys that `transformers` takes in place of the others."""


def _common_keys_of_mixture(keys: Keys) -> Keys:
    given = {ours: keys[key] for key, ours in _OTHER_NAMES.items() if key in keys}
    if not 0.0 <= number(keys, "moe_norm_min", 0.0) <= _LEAST_SUM:
        raise config_error(
            "moe_norm_min", f"{keys['moe_norm_min']} is not implemented, only up to {_LEAST_SUM}"
        )
    return _common_keys({**keys, **given})


def _dense(blocks: int, first: int, last: int, step: int) -> tuple[int, ...]:
    """The dense layers, if each `step`th layer from `first` to `last` has experts."""
    return tuple(i for i in range(blocks) if not first <= i <= last or (i + 1) % step)


def _dense_layers(keys: Keys, blocks: int) -> Sequence[int]:
    first = integer(keys, "moe_layer_start_index", 0, _MOST)
    last = integer(keys, "moe_layer_end_index", -1, _MOST)
    step = integer(keys, "moe_layer_interval", 1, _MOST)
    return _dense(blocks, first, blocks - 1 if last == -1 else last, step)


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    """After the leading dense layers, each `step`th layer has experts up to the end: no key names the last."""
    experts, blocks = config.experts, config.block_count
    assert experts is not None
    step = file.get_int(f"{config.architecture}.{_STEP}", 1, _MOST) or 1
    dense = _dense(blocks, len(experts.dense_layers), blocks - 1, step)
    return {"experts": replace(experts, dense_layers=dense)}


ERNIE4_5 = Architecture(
    name="ernie4_5",
    block=BlockForm(AttentionForm(rope_layout="pairs")),
    model_types={
        "ernie4_5": ModelType(
            {
                **_DEFAULTS,
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 18,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 128,
            },
            common_keys=_common_keys,
        )
    },
    hf_rope_pairs=True,
    vocabulary="spm",
    synthetic={
        "ernie4.5-0.3b": {
            "vocab_size": 103424,
            "context_length": 131072,
            "embedding_length": 1024,
            "block_count": 18,
            "feed_forward_length": 3072,
            "head_count": 16,
            "head_count_kv": 2,
            "rope_freq_base": 5e5,
            "tied_output": True,
        },
        "ernie4_5-tiny": {"tied_output": True},
    },
)

ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="ernie4_5-moe",
    block=BlockForm(AttentionForm(rope_layout="pairs"), experts=ExpertsForm(selection_bias=True)),
    router=RouterKind(used=6, scores="softmax", normalized=True),
    model_types={
        "ernie4_5_moe": ModelType(
            {
                **_DEFAULTS,
                "hidden_size": 2560,
                "intermediate_size": 12288,
                "num_hidden_layers": 28,
                "num_attention_heads": 20,
                "num_key_value_heads": 4,
                "moe_intermediate_size": 1536,
                "moe_k": 6,
                "moe_num_experts": 64,
                "moe_num_shared_experts": 2,
                "moe_layer_start_index": 1,
                "moe_layer_end_index": -1,
                "moe_layer_interval": 1,
            },
            expert_keys={
                "count": "moe_num_experts",
                "used": "moe_k",
                "feed_forward_length": "moe_intermediate_size",
                "shared_count": "moe_num_shared_experts",
            },
            dense_layers=_dense_layers,
            common_keys=_common_keys_of_mixture,
        )
    },
    hf_modules={
        "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
        **SHARED_EXPERTS,
    },
    hf_rows=frozenset({"exp_probs_b"}),
    gguf_keys=(_STEP,),
    gguf_fields=_gguf_fields,
    synthetic={
        "ernie4.5-21b-a3b": {
            "vocab_size": 103424,
            "context_length": 131072,
            "embedding_length": 2560,
            "block_count": 28,
            "feed_forward_length": 12288,
            "head_count": 20,
            "head_count_kv": 4,
            "rope_freq_base": 5e5,
            "tied_output": True,
            "experts": 64,
            "experts_used": 6,
            "expert_feed_forward_length": 1536,
            "shared_feed_forward_length": 3072,
            "dense_layers": 1,
        },
        "ernie4_5-moe-tiny": {
            "block_count": 3,
            "tied_output": True,
            "experts": 16,
            "experts_used": 4,
            "expert_feed_forward_length": 256,
            "shared_feed_forward_length": 512,
            "dense_layers": 1,
        },
    },
)
