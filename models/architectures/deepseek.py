"""DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash and Mistral Small 4: latent attention, and a mixture of experts.

The first layers are dense; the others have shared experts beside the chosen ones. V3 and its successors choose from
the best groups, by sigmoid scores with a bias of each expert; V2 and Mistral Small 4 choose by softmax. YaRN
multiplies queries and keys by the factor of `mscale_all_dim`, and cos and sin by that of `mscale` divided by it; GGUF
files have only `mscale_all_dim`, times 0.1. Layers at a file's end that only draft tokens are ignored. Source:
`DeepseekV2Model`, `DeepseekV3Model`, `Glm4MoeLiteModel` and `Mistral4Model` in `transformers`; llama.cpp's converter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Fields, Keys, ModelType
from quengine.models.architectures.file_traits import DRAFTS, tensor_kinds, without_drafts
from quengine.models.architectures.mixtures import DEEPSEEK, SHARED_EXPERTS
from quengine.models.blocks import AttentionForm, BlockForm, ExpertsForm
from quengine.models.blocks.block import Block
from quengine.models.blocks.latent_attention import LatentAttention, LatentSizes
from quengine.models.blocks.uniform import channel_mixer
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, flag, integer, number
from quengine.models.rotation import RopeLayout, yarn_mscale

_MOST = LIMITS["block_count"][1]
_SIZE = LIMITS["head_dim"][1]
_INNER_EPS = 1e-6
"""The epsilon of latents' norms in folders, whatever config.json has for the others."""

_RANK, _QUERY_RANK = "attention.kv_lora_rank", "attention.q_lora_rank"
_KEY, _VALUE = "attention.key_length_mla", "attention.value_length_mla"
_TEMPERATURE = "attention.temperature_length"
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_HF_SIZES = {"rank": "kv_lora_rank", "plain": "qk_nope_head_dim", "values": "v_head_dim"}


def _build(config: ModelConfig) -> Sequence[Block]:
    return [Block(_attention(config, i), channel_mixer(config, i)) for i in range(config.block_count)]


def _attention(config: ModelConfig, layer: int) -> LatentAttention:
    assert config.latent is not None
    temperature, length = config.attention_temperature_scale, config.attention_temperature_length
    return LatentAttention(
        width=config.embedding_length,
        heads=config.head_count,
        sizes=config.latent,
        rotation=config.rotation(layer),
        scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        temperature=(temperature, length, config.attention_temperature_offset) if temperature else None,
    )


def _size_fields(config: ModelConfig) -> Fields:
    """Sizes for synthetic models that give none; the sizes in files replace them."""
    if config.latent is not None:
        return {}
    rotated = config.head_dim // 2
    latent = LatentSizes(0, 128, config.head_dim - rotated, rotated, config.head_dim, config.rms_eps)
    return {"latent": latent, "rope_dim": rotated, "head_count_kv": 1}


def _dense_layers(keys: Keys, blocks: int) -> Sequence[int]:
    return range(min(integer(keys, "first_k_dense_replace", 0, _MOST, default=0), blocks))


def _common_keys(keys: Keys) -> Keys:
    """config.json with `head_dim` set to the number of rotated elements, for which `hf.rope_hf` makes frequencies."""
    rotated = integer(keys, "qk_rope_head_dim", 2, _SIZE)
    of_head = rotated + integer(keys, "qk_nope_head_dim", 1, _SIZE)
    expected = of_head if keys.get("model_type") == "mistral4" else rotated
    if keys.get("head_dim") not in (None, expected):
        problem = f"{keys['head_dim']!r} is not {expected}, as the other sizes make it"
        raise config_error("head_dim", problem)
    if keys.get("attention_bias"):
        raise config_error("attention_bias", "biases of latent attention are not implemented")
    return {**_without_share(keys, rotated), "head_dim": rotated}


def _without_share(keys: Keys, rotated: int) -> Keys:
    """`keys` without `partial_rotary_factor`. Raises EngineError where it is not the share of `rotated` elements."""
    plain = integer(keys, "qk_nope_head_dim", 1, _SIZE)
    kept: dict[str, Any] = dict(keys)
    for holder in (None, "rope_parameters", "rope_scaling"):
        given = keys if holder is None else keys.get(holder)
        if not isinstance(given, Mapping) or given.get("partial_rotary_factor") is None:
            continue
        share = number(given, "partial_rotary_factor", 1.0)
        whole = plain + rotated if keys.get("model_type") == "mistral4" else rotated
        if int(whole * share) != rotated:
            problem = f"{share} of {whole} elements is not qk_rope_head_dim, {rotated}"
            raise config_error("partial_rotary_factor", problem)
        rest = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
        if holder is None:
            del kept["partial_rotary_factor"]
        else:
            kept[holder] = rest
    return kept


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    sizes = {field: integer(keys, key, 1, _SIZE) for field, key in _HF_SIZES.items()}
    query_rank = integer(keys, "q_lora_rank", 0, 1 << 14, default=0)
    latent = LatentSizes(
        query_rank, rotated=integer(keys, "qk_rope_head_dim", 2, _SIZE), eps=_INNER_EPS, **sizes
    )
    layout: RopeLayout = "pairs" if flag({"rope_interleave": True, **keys}, "rope_interleave") else "halves"
    rope, scaling = keys["rope_parameters"], config.rope_scaling
    stretched = 1.0
    if rope["rope_type"] != "default":
        if scaling.kind != "yarn" and number(rope, "mscale_all_dim", 0.0):
            raise config_error("rope_scaling", "mscale_all_dim is implemented for yarn alone")
        stretched = yarn_mscale(scaling.factor, number(rope, "mscale_all_dim", 0.0))
    return {
        **_latent_fields(latent, stretched),
        "block": config.block.with_attention(rope_layout=layout),
        "draft_layers": integer(keys, f"num_{DRAFTS}", 0, _MOST, default=0),
    }


def _latent_fields(latent: LatentSizes, stretched: float) -> dict[str, Any]:
    """The fields that follow from the sizes. stretched: the factor by which YaRN multiplies queries and keys."""
    head = latent.plain + latent.rotated
    return {
        "latent": latent,
        "head_dim": head,
        "rope_dim": latent.rotated,
        "head_count_kv": 1,
        "attention_scale": None if stretched == 1.0 else stretched * stretched * head**-0.5,
    }


def _check_router(keys: Keys, scores: str, *methods: str) -> None:
    """Raises EngineError for a router that the models' own code computes and `transformers` ignores."""
    for key, known in (("scoring_func", (scores,)), ("topk_method", methods)):
        if methods and keys.get(key) not in (None, *known):
            raise config_error(key, f"{keys[key]!r} is not implemented, only {known[0]} is")


def _v2_fields(keys: Keys, config: ModelConfig) -> Fields:
    _check_router(keys, "softmax", "greedy", "group_limited_greedy")
    method, groups = keys.get("topk_method", "greedy"), keys.get("n_group") or 1
    if method != "greedy" and (method != "group_limited_greedy" or groups != 1):
        raise config_error(
            "topk_method", f"{method!r} with {groups} groups is not implemented, only greedy is"
        )
    assert config.experts is not None
    router = replace(config.experts.router, scores="softmax", normalized=False, groups=1, groups_used=1)
    fields = _fields(keys, config)
    block = fields["block"].with_experts(selection_bias=False)
    return {**fields, "block": block, "experts": replace(config.experts, router=router)}


def _v2_keys(keys: Keys) -> Keys:
    if keys.get("norm_topk_prob"):
        raise config_error(
            "norm_topk_prob", "true is not implemented: transformers passes it over in this model"
        )
    if keys.get("mlp_bias"):
        raise config_error("mlp_bias", "biases of feed-forwards are not implemented")
    return {**_common_keys(keys), "rope_interleave": True}


def _v3_fields(keys: Keys, config: ModelConfig) -> Fields:
    _check_router(keys, "sigmoid", "noaux_tc")
    return _fields(keys, config)


def _glm_keys(keys: Keys) -> Keys:
    """config.json with the number of leading dense layers by `mlp_layer_types`; without that key it is 1."""
    kinds, blocks = keys.get("mlp_layer_types"), integer(keys, "num_hidden_layers", 1, _MOST)
    dense = 1
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != blocks or not set(kinds) <= {"dense", "sparse"}:
            raise config_error("mlp_layer_types", f"is not a list of dense and sparse for {blocks} layers")
        dense = kinds.index("sparse") if "sparse" in kinds else blocks
        if "dense" in kinds[dense:]:
            raise config_error(
                "mlp_layer_types", "dense layers behind those with experts are not implemented"
            )
    if integer(keys, "first_k_dense_replace", 0, _MOST, default=dense) != dense:
        problem = f"{keys['first_k_dense_replace']} is not {dense}, which transformers takes"
        raise config_error("first_k_dense_replace", problem)
    return {**_common_keys(keys), "first_k_dense_replace": dense}


def _mistral_fields(keys: Keys, config: ModelConfig) -> Fields:
    rope = keys["rope_parameters"]
    beta = rope.get("llama_4_scaling_beta")
    if beta is None:
        raise config_error("rope_parameters", "llama_4_scaling_beta is missing, which transformers needs")
    return {
        **_fields(keys, config),
        "attention_temperature_scale": number(rope, "llama_4_scaling_beta", 0.0),
        "attention_temperature_length": integer(
            rope, "original_max_position_embeddings", 1, LIMITS["context_length"][1]
        ),
    }


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    prefix, kinds = config.architecture, tensor_kinds(file)
    rank = file.require_int(f"{prefix}.{_RANK}", 1, _SIZE)
    rotated = file.require_int(f"{prefix}.rope.dimension_count", 2, _SIZE)
    head, values = _head_lengths(file, prefix, rank, rotated)
    if head <= rotated:
        problem = f"{head} is not more than the {rotated} rotated elements"
        raise file.error(f"{prefix}.{_KEY}", problem)
    query_rank = 0
    if "attn_q.weight" not in kinds:
        query_rank = file.require_int(f"{prefix}.{_QUERY_RANK}", 1, 1 << 14)
    latent = LatentSizes(query_rank, rank, head - rotated, rotated, values, config.rms_eps)
    experts = config.experts
    assert experts is not None
    router = experts.router
    if not file.get_int(f"{prefix}.expert_gating_func"):
        # GLM-4.7-Flash's first files lack the key; llama.cpp recognizes them by their sizes.
        glm = config.block_count in (47, 48) and config.vocab_size == 154880
        router = replace(router, scores="sigmoid" if glm else "softmax")
    normalized = bool(file.get_bool(f"{prefix}.expert_weights_norm"))  # as in llama.cpp where no key says it
    return {
        **_latent_fields(latent, _stretched(file, config)),
        "block": config.block.with_experts(selection_bias="exp_probs_b.bias" in kinds),
        "experts": replace(experts, router=replace(router, normalized=normalized)),
        "attention_temperature_length": _temperature_length(file, config),
        **without_drafts(file, config),
    }


def _head_lengths(file: GGUFFile, prefix: str, rank: int, rotated: int) -> tuple[int, int]:
    """(key, value) elements of a head. Files from before April 2025 have them at the keys of a cached row's sizes."""
    head, values = (file.get_int(f"{prefix}.{key}", 1, _SIZE) for key in (_KEY, _VALUE))
    held = {
        key: file.get_int(f"{prefix}.attention.{key}", 1, _SIZE) for key in ("key_length", "value_length")
    }
    if head is None and values is None:
        for key, length in held.items():
            if length is None:
                raise file.error(f"{prefix}.attention.{key}", "missing from the metadata")
        return held["key_length"] or 0, held["value_length"] or 0
    for key, length in ((_KEY, head), (_VALUE, values)):
        if length is None:
            raise file.error(f"{prefix}.{key}", "missing from the metadata")
    for key, expected in (("key_length", rank + rotated), ("value_length", rank)):
        if held[key] != expected:
            problem = f"{held[key]} is not {expected}, of which the cache is made"
            raise file.error(f"{prefix}.attention.{key}", problem)
    return head or 0, values or 0


def _stretched(file: GGUFFile, config: ModelConfig) -> float:
    """The factor by which YaRN multiplies queries and keys: `0.1 m ln(factor) + 1`, where files have 0.1 m.

    cos and sin are multiplied by the factor of `mscale` over the factor of `mscale_all_dim`. llama.cpp takes the two
    keys as equal, except in mistral4, where it takes `mscale` as 1. Without m, llama.cpp multiplies scores and the
    models' own code does not: such files are refused.
    """
    kind, attention = config.rope_scaling.kind, f"{config.architecture}.rope.scaling.attn_factor"
    if file.get_float(attention) not in (None, 1.0):
        raise file.error(attention, f"{file.get_float(attention):.6g} is not implemented, only 1 is")
    if kind not in ("none", "yarn"):  # llama.cpp multiplies scores with every factor
        problem = f"{kind} scaling of latent attention is not implemented, only none and yarn are"
        raise file.error(f"{config.architecture}.rope.scaling.type", problem)
    if kind == "none":
        return 1.0
    key = f"{config.architecture}.{_LOG_MULTIPLIER}"
    tenth = file.get_float(key)
    if not tenth:
        raise file.error(key, "missing or 0: YaRN of latent attention is not implemented without it")
    multiplier = tenth / 0.1
    if config.architecture == "mistral4" and abs(multiplier - 1.0) > 1e-6:
        raise file.error(key, f"{tenth:.6g} is not implemented, only 0.1 is")
    return yarn_mscale(config.rope_scaling.factor, multiplier)


def _temperature_length(file: GGUFFile, config: ModelConfig) -> int:
    if not config.attention_temperature_scale:
        return 0
    return file.require_int(f"{config.architecture}.{_TEMPERATURE}", 1, LIMITS["context_length"][1])


_V2_EXPERTS = {
    name: key for name, key in DEEPSEEK.items() if name not in ("normalized", "groups", "groups_used")
}
_GGUF_KEYS = (DRAFTS, _RANK, _QUERY_RANK, _KEY, _VALUE, _TEMPERATURE)
_MISTRAL_ROPE: Mapping[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_V3_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    f"num_{DRAFTS}": 1,
}
_TINY: Mapping[str, Any] = {
    "block_count": 3,
    "head_count_kv": 1,
    "head_dim": 96,
    "rope_dim": 32,
    "latent_rank": 128,
    "value_dim": 64,
    "experts": 16,
    "experts_used": 4,
    "expert_feed_forward_length": 256,
    "shared_feed_forward_length": 256,
    "dense_layers": 1,
}

DEEPSEEK2 = Architecture(
    name="deepseek2",
    block=BlockForm(AttentionForm(rope_layout="pairs"), experts=ExpertsForm(selection_bias=True)),
    build=_build,
    router=RouterKind(used=8, scores="sigmoid", normalized=True),
    rope_scalings=frozenset({"linear", "yarn"}),
    model_types={
        "deepseek_v2": ModelType(
            {
                "vocab_size": 102400,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "max_position_embeddings": 2048,
                "first_k_dense_replace": 0,
                "kv_lora_rank": 512,
                "q_lora_rank": 1536,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "moe_intermediate_size": 1407,
            },
            expert_keys=_V2_EXPERTS,
            dense_layers=_dense_layers,
            common_keys=_v2_keys,
            fields=_v2_fields,
        ),
        "deepseek_v3": ModelType(
            _V3_DEFAULTS,
            expert_keys=DEEPSEEK,
            dense_layers=_dense_layers,
            common_keys=_common_keys,
            fields=_v3_fields,
        ),
        "glm4_moe_lite": ModelType(
            {
                **_V3_DEFAULTS,
                "vocab_size": 154880,
                "hidden_size": 2048,
                "intermediate_size": 10240,
                "moe_intermediate_size": 1536,
                "num_hidden_layers": 47,
                "num_attention_heads": 20,
                "n_routed_experts": 64,
                "routed_scaling_factor": 1.8,
                "q_lora_rank": 768,
                "v_head_dim": 256,
                "qk_nope_head_dim": 192,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 4,
                "max_position_embeddings": 202752,
                "rms_norm_eps": 1e-5,
                f"num_{DRAFTS}": 0,
                "first_k_dense_replace": None,
            },
            expert_keys=DEEPSEEK,
            dense_layers=_dense_layers,
            common_keys=_glm_keys,
            fields=_v3_fields,
        ),
    },
    hf_modules=SHARED_EXPERTS,
    hf_rope_pairs=True,
    size_fields=_size_fields,
    gguf_keys=_GGUF_KEYS,
    gguf_fields=_gguf_fields,
    latent=True,
    synthetic={
        "glm-4.7-flash": {
            "vocab_size": 154880,
            "context_length": 202752,
            "embedding_length": 2048,
            "block_count": 47,
            "feed_forward_length": 10240,
            "head_count": 20,
            "head_count_kv": 1,
            "head_dim": 256,
            "rope_dim": 64,
            "latent_rank": 512,
            "query_rank": 768,
            "value_dim": 256,
            "experts": 64,
            "experts_used": 4,
            "expert_feed_forward_length": 1536,
            "shared_feed_forward_length": 1536,
            "dense_layers": 1,
        },
        "deepseek2-tiny": {**_TINY, "query_rank": 256},
    },
)

MISTRAL4 = replace(
    DEEPSEEK2,
    name="mistral4",
    block=BlockForm(AttentionForm(rope_layout="pairs")),
    router=RouterKind(used=4, scores="softmax", normalized=True),
    model_types={
        "mistral4": ModelType(
            {
                "vocab_size": 131072,
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "moe_intermediate_size": 2048,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "n_shared_experts": 1,
                "n_routed_experts": 128,
                "kv_lora_rank": 256,
                "q_lora_rank": 1024,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "qk_nope_head_dim": 64,
                "num_experts_per_tok": 4,
                "first_k_dense_replace": 0,
                "norm_topk_prob": True,
                "max_position_embeddings": 1048576,
                "rope_parameters": _MISTRAL_ROPE,
            },
            expert_keys=DEEPSEEK,
            dense_layers=_dense_layers,
            common_keys=_common_keys,
            fields=_mistral_fields,
        ),
    },
    synthetic={
        "mistral-small-4": {
            "vocab_size": 131072,
            "context_length": 262144,
            "block_count": 36,
            "feed_forward_length": 12288,
            "head_count_kv": 1,
            "rope_dim": 64,
            "rope_freq_base": 1e4,
            "latent_rank": 256,
            "query_rank": 1024,
            "value_dim": 128,
            "experts": 128,
            "experts_used": 4,
            "expert_feed_forward_length": 2048,
            "shared_feed_forward_length": 2048,
        },
        "mistral4-tiny": {**_TINY, "dense_layers": 0},
    },
)
