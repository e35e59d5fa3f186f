"""LFM2: gated short convolutions, with attention in some layers; and its mixture of experts.

In GGUF files a layer without key and value heads is a convolution, and the norm in front of the output matrix has the
name `token_embd_norm`. Experts are chosen by sigmoid scores, in most models with a bias per expert; the first layers
are dense. `transformers` adds 1e-6 to the sum that normalizes the experts' weights, which is not done here. Source:
"LFM2 Technical Report", Liquid AI 2025; `Lfm2Model` and `Lfm2MoeModel` in the `transformers` library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Fields, Keys, ModelType
from quengine.models.architectures.mixtures import QWEN
from quengine.models.blocks import AttentionForm, BlockForm, ExpertsForm
from quengine.models.blocks.block import Block
from quengine.models.blocks.short_conv import ShortConv
from quengine.models.blocks.uniform import hybrid_layers
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, flag, integer, number

_ATTENTION: Mapping[int, tuple[int, ...]] = {16: (2, 5, 8, 10, 12, 14), 24: (2, 6, 10, 14, 18, 21)}
"""Number of layers of a released model (1.2B, 8B-A1B) -> those with attention."""

_TAPS = "shortconv.l_cache"
_MOST_TAPS = 16
_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def _build(config: ModelConfig) -> Sequence[Block]:
    width, channels, ranks = config.embedding_length, config.conv_channels, config.ranks
    conv = ShortConv(width, channels, config.conv_taps, partial=ranks > 1)
    return hybrid_layers(config, conv)


def _common_keys(keys: Keys) -> Keys:
    if keys.get("conv_bias"):
        raise config_error("conv_bias", "biases of convolutions are not implemented")
    return {**keys, "rms_norm_eps": keys["norm_eps"]}


def _dense_keys(keys: Keys) -> Keys:
    return {**_common_keys(keys), "intermediate_size": _feed_forward_length(keys)}


def _feed_forward_length(keys: Keys) -> int:
    """The length as `transformers` adjusts it: two thirds, times a factor, rounded up to a multiple."""
    length = integer({"block_ff_dim": keys["intermediate_size"], **keys}, "block_ff_dim", 1, 1 << 24)
    if not flag({"block_auto_adjust_ff_dim": True, **keys}, "block_auto_adjust_ff_dim"):
        return length
    length = int(2 * length / 3)
    if keys.get("block_ffn_dim_multiplier", 1.0) is None:
        return length
    multiple = integer(keys, "block_multiple_of", 1, 1 << 20, default=256)
    length = int(number(keys, "block_ffn_dim_multiplier", 1.0) * length)
    return multiple * -(-length // multiple)


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    blocks = config.block_count
    kinds = keys.get("layer_types")
    if kinds is None:
        indices = keys.get("full_attn_idxs")
        if indices is not None and not _are_layers(indices, blocks):
            raise config_error("full_attn_idxs", f"is not a list of layers of {blocks}")
        full = range(blocks) if indices is None else indices
        kinds = ["full_attention" if i in full else "conv" for i in range(blocks)]
    if not isinstance(kinds, list) or len(kinds) != blocks:
        raise config_error("layer_types", f"is not a list of the kinds of {blocks} layers")
    if other := sorted({str(kind) for kind in kinds} - {"full_attention", "conv"}):
        raise config_error("layer_types", f"{', '.join(other)}: not implemented")
    if "full_attention" not in kinds:
        raise config_error("layer_types", "no layer has attention: not implemented")
    return {
        "recurrent_layers": tuple(i for i, kind in enumerate(kinds) if kind == "conv"),
        "conv_taps": integer(keys, "conv_L_cache", 1, _MOST_TAPS, default=3),
        "tied_output": flag({"tie_embedding": keys["tie_word_embeddings"], **keys}, "tie_embedding"),
    }


def _are_layers(indices: object, blocks: int) -> bool:
    return isinstance(indices, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < blocks for i in indices
    )


def _size_fields(config: ModelConfig) -> Fields:
    """The layers of a synthetic model: those of a released one, or attention in every third."""
    blocks = config.block_count
    full = _ATTENTION.get(blocks, (*range(2, blocks, 3), blocks - 1))
    return {
        "recurrent_layers": tuple(i for i in range(blocks) if i not in full),
        "conv_taps": 3,
        "conv_channels": config.embedding_length,
        "output_norm": "token_embd_norm",
    }


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    key = f"{config.architecture}.attention.head_count_kv"
    heads = file.get_ints(key) if not isinstance(file.metadata.get(key), int) else None
    if heads is not None and len(heads) != config.block_count:
        raise file.error(key, f"has {len(heads)} numbers for {config.block_count} layers")
    recurrent = () if heads is None else tuple(i for i, count in enumerate(heads.tolist()) if not count)
    return {
        "recurrent_layers": recurrent,
        "conv_taps": file.require_int(f"{config.architecture}.{_TAPS}", 1, _MOST_TAPS),
    }


def _moe_fields(keys: Keys, config: ModelConfig) -> Fields:
    block = config.block.with_experts(selection_bias=flag(keys, "use_expert_bias"))
    return {**_fields(keys, config), "block": block}


def _moe_gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    biases = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    return {**_gguf_fields(file, config), "block": config.block.with_experts(selection_bias=biases)}


def _dense_layers(keys: Keys, blocks: int) -> Sequence[int]:
    return range(min(integer(keys, "num_dense_layers", 0, LIMITS["block_count"][1]), blocks))


_MODULES = {
    "token_embd_norm": "embedding_norm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}


LFM2 = Architecture(
    name="lfm2",
    block=BlockForm(AttentionForm(qk_norm="head")),
    build=_build,
    model_types={"lfm2": ModelType(_DEFAULTS, common_keys=_dense_keys, fields=_fields)},
    hf_modules=_MODULES,
    size_fields=_size_fields,
    gguf_keys=(_TAPS,),
    gguf_fields=_gguf_fields,
    has_recurrent_layers=True,
    synthetic={
        "lfm2-1.2b": {
            "vocab_size": 65536,
            "context_length": 128000,
            "embedding_length": 2048,
            "block_count": 16,
            "feed_forward_length": 8192,
            "head_count": 32,
            "head_count_kv": 8,
            "head_dim": 64,
            "tied_output": True,
        },
        "lfm2-tiny": {"block_count": 4, "tied_output": True},
    },
)

LFM2MOE = replace(
    LFM2,
    name="lfm2moe",
    block=BlockForm(AttentionForm(qk_norm="head"), experts=ExpertsForm(selection_bias=True)),
    router=RouterKind(used=4, scores="sigmoid", normalized=True),
    model_types={
        "lfm2_moe": ModelType(
            {
                **_DEFAULTS,
                "hidden_size": 2048,
                "intermediate_size": 7168,
                "moe_intermediate_size": 1792,
                "num_dense_layers": 2,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "norm_topk_prob": True,
                "use_expert_bias": True,
            },
            expert_keys={**QWEN, "scale": "routed_scaling_factor"},
            dense_layers=_dense_layers,
            common_keys=_common_keys,
            fields=_moe_fields,
        )
    },
    hf_modules={
        **_MODULES,
        "ffn_gate_inp": "feed_forward.gate",
        "exp_probs_b.bias": "feed_forward.expert_bias",
        "ffn_gate.{expert}": "feed_forward.experts.{expert}.w1",
        "ffn_up.{expert}": "feed_forward.experts.{expert}.w3",
        "ffn_down.{expert}": "feed_forward.experts.{expert}.w2",
        "ffn_gate_up_exps.weight": "feed_forward.experts.gate_up_proj",
        "ffn_down_exps.weight": "feed_forward.experts.down_proj",
    },
    gguf_fields=_moe_gguf_fields,
    synthetic={
        "lfm2-8b-a1b": {
            "vocab_size": 65536,
            "context_length": 128000,
            "embedding_length": 2048,
            "block_count": 24,
            "feed_forward_length": 7168,
            "head_count": 32,
            "head_count_kv": 8,
            "head_dim": 64,
            "tied_output": True,
            "experts": 32,
            "experts_used": 4,
            "expert_feed_forward_length": 1792,
            "dense_layers": 2,
        },
        "lfm2moe-tiny": {"block_count": 4, "tied_output": True, "dense_layers": 1},
    },
)
