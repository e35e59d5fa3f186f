"""Hunyuan, dense and as a mixture of experts: Llama's layers with a norm of each query and key head once it is rotated.

A folder's `alpha` raises the rotary base, for every length alike: `theta * alpha^(d / (d - 2))` for heads of d
elements; files have the raised base. The mixture has a shared expert in every layer, of the experts' length. Source:
`HunYuanMoEV1Model` in the `transformers` library.
"""

from collections.abc import Mapping
from dataclasses import replace

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Keys, ModelType
from quengine.models.architectures.file_traits import attention_biases, gguf_attention_biases
from quengine.models.blocks import AttentionForm, BlockForm
from quengine.models.config import LIMITS
from quengine.models.hf.hf_keys import config_error, integer, number

_MOST_ALPHA = 1e9
_ROTARY = ("rope_scaling", "rope_parameters")


def _common_keys(keys: Keys) -> Keys:
    """config.json with `alpha` turned into the rotary base of the default rotation. Raises EngineError."""
    changed = dict(keys)
    key = next((key for key in _ROTARY if keys.get(key)), None)
    given = keys.get(key) if key else None
    if isinstance(given, Mapping) and given.get("rope_type", given.get("type")) == "dynamic":
        if not given.get("alpha"):
            raise config_error(str(key), "'dynamic' without alpha is not implemented")
        base = number({"rope_theta": 10000.0, **keys, **given}, "rope_theta", 10000.0)
        changed |= {
            "rope_scaling": None,
            "rope_parameters": {"alpha": given["alpha"], "rope_theta": _raised(keys, given, base)},
        }
    return changed


def _raised(keys: Keys, given: Keys, base: float) -> float:
    alpha, size = number(given, "alpha", 1.0), integer(keys, "head_dim", *LIMITS["head_dim"])
    if not 0.0 < alpha <= _MOST_ALPHA or size < 4:
        raise config_error("alpha", f"{alpha} for heads of {size} is not implemented")
    return float(base * alpha ** (size / (size - 2)))


def _common_keys_of_mixture(keys: Keys) -> Keys:
    """config.json with one number of experts per token for all layers, in place of a list by layer or another key."""
    used = keys.get("num_experts_per_tok", keys.get("moe_topk"))
    if isinstance(used, list):
        blocks = integer(keys, "num_hidden_layers", *LIMITS["block_count"])
        if len(used) < blocks or any(value != used[0] for value in used[:blocks]):
            raise config_error("moe_topk", f"is not the same number for each of {blocks} layers")
        used = used[0]
    return _common_keys({**keys, "moe_topk": used})


_DEFAULTS = {
    "vocab_size": 290943,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}
_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_RELEASED = {
    "vocab_size": 128167,
    "context_length": 262144,
    "rope_freq_base": 11158840.0,
    "tied_output": True,
}

HUNYUAN_DENSE = Architecture(
    name="hunyuan-dense",
    block=BlockForm(AttentionForm(qk_norm="rotated head", qkv_bias=True)),
    model_types={"hunyuan_v1_dense": ModelType(_DEFAULTS, common_keys=_common_keys, fields=attention_biases)},
    hf_modules=_NORMS,
    gguf_fields=gguf_attention_biases,
    synthetic={"hunyuan-7b": _RELEASED, "hunyuan-dense-tiny": {"tied_output": True}},
)

HUNYUAN_MOE = replace(
    HUNYUAN_DENSE,
    name="hunyuan-moe",
    router=RouterKind(used=8, scores="softmax", normalized=True),
    model_types={
        "hunyuan_v1_moe": ModelType(
            {**_DEFAULTS, "num_experts": 1, "moe_topk": 1},
            expert_keys={
                "count": "num_experts",
                "used": "moe_topk",
                "feed_forward_length": "intermediate_size",
                "shared_feed_forward_length": "intermediate_size",
            },
            common_keys=_common_keys_of_mixture,
            fields=attention_biases,
        )
    },
    hf_modules={
        **_NORMS,
        "ffn_gate_inp": "mlp.gate.wg",
        "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
        "ffn_up_shexp": "mlp.shared_mlp.up_proj",
        "ffn_down_shexp": "mlp.shared_mlp.down_proj",
    },
    synthetic={
        "hunyuan-a13b": {
            **_RELEASED,
            "feed_forward_length": 3072,
            "experts": 64,
            "experts_used": 8,
            "shared_feed_forward_length": 3072,
        },
        "hunyuan-moe-tiny": {
            "feed_forward_length": 256,
            "experts": 16,
            "experts_used": 4,
            "shared_feed_forward_length": 256,
        },
    },
)
