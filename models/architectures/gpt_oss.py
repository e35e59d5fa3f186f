"""gpt-oss: attention sinks, a window in every second layer, and experts with biases and a clamped activation, in MXFP4.

The router chooses experts by its logits, and weights them by a softmax over the logits of the chosen ones. Layers with
and without a window have the same YaRN, whose limits are not rounded (`truncate` in config.json). GGUF files cannot say
so, and llama.cpp rounds them; here they are not rounded for GGUF files either, as the model was trained.

In folders the gate and up rows of an expert alternate in one tensor: packed as MXFP4 in released folders, transposed
and not packed in others that `transformers` saves.
"""

from collections.abc import Sequence
from dataclasses import replace

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import (
    Architecture,
    Fields,
    HFPart,
    Keys,
    LayerKind,
    ModelType,
)
from quengine.models.architectures.mixtures import MIXTRAL
from quengine.models.blocks import AttentionForm, BlockForm, ExpertsForm, FeedForwardForm, Norms
from quengine.models.config import ModelConfig
from quengine.models.hf.hf_keys import config_error, number

_COMPUTED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # as kernels/glu.py has them
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _layer_kinds(_keys: Keys, blocks: int) -> Sequence[LayerKind]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(blocks)]


def _common_keys(keys: Keys) -> Keys:
    for key, computed in _COMPUTED.items():
        if (given := number(keys, key, computed)) != computed:
            raise config_error(key, f"{given} is not implemented, only {computed} is")
    if keys.get("attention_bias") is not True:
        raise config_error(
            "attention_bias", f"{keys.get('attention_bias')!r} is not implemented, only true is"
        )
    return keys


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    truncate = keys["rope_parameters"].get("truncate", True)
    return {"rope_scaling": replace(config.rope_scaling, truncate=truncate)}


def _size_fields(config: ModelConfig) -> Fields:
    windowed = config.sliding_window is not None
    return {
        "full_attention_layers": tuple(range(1, config.block_count, 2)) if windowed else (),
        "rope_scaling": replace(config.rope_scaling, truncate=config.rope_scaling.kind != "yarn"),
    }


GPT_OSS = Architecture(
    name="gpt-oss",
    block=BlockForm(
        AttentionForm(qkv_bias=True, output_bias=True, sinks=True),
        feed_forward=FeedForwardForm(activation="clamped_swish"),
        experts=ExpertsForm(bias=True),
        norms=Norms(ffn="post_attention_norm"),
    ),
    router=RouterKind(used=4, scores="softmax_of_chosen", normalized=False),
    model_types={
        "gpt_oss": ModelType(
            {
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "rms_norm_eps": 1e-5,
                "sliding_window": 128,
                "attention_bias": True,
                "rope_theta": 150000.0,
                "rope_parameters": _ROPE,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
            },
            layer_kinds=_layer_kinds,
            reads_layer_types=True,
            expert_keys=MIXTRAL,
            quantization="mxfp4",
            common_keys=_common_keys,
            fields=_fields,
        )
    },
    hf_modules={"ffn_gate_inp": "mlp.router"},
    hf_parts={
        "ffn_gate_exps.weight": HFPart("mlp.experts.gate_up_proj", "even", transposed=True),
        "ffn_up_exps.weight": HFPart("mlp.experts.gate_up_proj", "odd", transposed=True),
        "ffn_down_exps.weight": HFPart("mlp.experts.down_proj", transposed=True),
        "ffn_gate_exps.bias": HFPart("mlp.experts.gate_up_proj_bias", "even"),
        "ffn_up_exps.bias": HFPart("mlp.experts.gate_up_proj_bias", "odd"),
    },
    size_fields=_size_fields,
)
