"""Writes tiny Hugging Face checkpoint folders: random weights, config.json, one safetensors file or several.

The same weights are given under their GGUF names, Q and K in GGUF's order, so that a test can write them as a
GGUF file too. Reordering is done here by the reshape that GGUF converters use, not by the code under test.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.gguf_builder import GATED_DELTAS, TAPS, ModelSizes

MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate.*": "mlp.experts.*.gate_proj",
    "ffn_up.*": "mlp.experts.*.up_proj",
    "ffn_down.*": "mlp.experts.*.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MODEL_TYPES = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "ernie4_5-moe": "ernie4_5_moe",
    "minimax-m2": "minimax_m2",
    "qwen35": "qwen3_5_text",
    "hunyuan-dense": "hunyuan_v1_dense",
    "hunyuan-moe": "hunyuan_v1_moe",
    "gemma4": "gemma4_text",
}
"""Architecture -> model type, where they differ."""

SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
OTHER_MODULES = {
    "glm4moe": {"post_attention_norm": "post_attention_layernorm", **SHARED_EXPERTS},
    "granitemoe": {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_down_exps": "block_sparse_moe.output_linear",
    },
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "minimax-m2": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate.*": "block_sparse_moe.experts.*.w1",
        "ffn_up.*": "block_sparse_moe.experts.*.w3",
        "ffn_down.*": "block_sparse_moe.experts.*.w2",
    },
    "qwen35": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate.*": "block_sparse_moe.experts.*.w1",
        "ffn_up.*": "block_sparse_moe.experts.*.w3",
        "ffn_down.*": "block_sparse_moe.experts.*.w2",
    },
    "olmo2": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "dots1": SHARED_EXPERTS,
    "ernie4_5-moe": SHARED_EXPERTS,
    "hunyuan-dense": {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gemma2": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "gemma4": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
"""Architecture or model type -> what differs."""

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_config(sizes: ModelSizes, vocab: int, tied: bool = False, **changes: Any) -> dict[str, Any]:
    """The config.json of a model of `sizes`; a change to None drops the key."""
    config = {
        "model_type": MODEL_TYPES.get(sizes.architecture, sizes.architecture),
        "vocab_size": vocab,
        "max_position_embeddings": sizes.context,
        "hidden_size": sizes.embedding,
        "num_hidden_layers": sizes.blocks,
        "intermediate_size": sizes.feed_forward,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        **(_experts(sizes) if sizes.experts else {}),
        **(_gated_delta(sizes) if sizes.architecture in GATED_DELTAS else {}),
    }
    return {key: value for key, value in {**config, **changes}.items() if value is not None}


def _gated_delta(sizes: ModelSizes) -> dict[str, Any]:
    return {
        "full_attention_interval": 2,
        "linear_conv_kernel_dim": TAPS,
        "linear_key_head_dim": sizes.delta_head_dim,
        "linear_value_head_dim": sizes.delta_head_dim,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "partial_rotary_factor": 1.0,
    }


def _experts(sizes: ModelSizes) -> dict[str, Any]:
    counts = dict.fromkeys(("llama", "granitemoe", "gpt-oss", "minimax-m2"), "num_local_experts")
    counts |= dict.fromkeys(("glm4moe", "dots1"), "n_routed_experts")
    return {
        counts.get(sizes.architecture, "num_experts"): sizes.experts,
        "num_experts_per_tok": sizes.experts_used,
        "moe_intermediate_size": sizes.expert_feed_forward,
        "shared_expert_intermediate_size": sizes.shared_feed_forward,
    }


def hf_name(gguf_name: str, architecture: str = "llama") -> str:
    if gguf_name in TOP or gguf_name.startswith("model."):
        return TOP.get(gguf_name, gguf_name)
    _, block, module, *expert, kind = gguf_name.split(".")
    modules = MODULES | OTHER_MODULES.get(architecture, {})
    name = modules[".".join([module, *"*" * len(expert)])].replace("*", "".join(expert))
    return f"model.layers.{block}.{name}.{kind}"


def fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by their names in a folder, a layer's experts in one tensor each, as `transformers` holds them."""
    kinds = ("gate_proj", "up_proj", "down_proj")
    rows: dict[tuple[str, str], list[Tensor]] = {}
    rest = {}
    for name, values in weights.items():
        layer, found, expert = name.partition(".experts.")
        if found:
            rows.setdefault((layer, expert.split(".")[1]), []).append(values)
        else:
            rest[name] = values
    for layer in {layer for layer, _ in rows}:
        gate, up, down = (torch.stack(rows[layer, kind]) for kind in kinds)
        rest[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        rest[f"{layer}.experts.down_proj"] = down
    return rest


def within_others(weights: dict[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Weights by their GGUF names, but those that a folder holds within others, which are by their names there."""
    held = {name: weights[name] for name in weights if name != "rope_freqs.weight"}
    for layer in {name.split(".")[1] for name in weights if name.startswith("blk.")}:
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        for name, module in (("ssm_a", "A_log"), ("ssm_dt.bias", "dt_bias")):
            if f"{ours}.{name}" in held:
                held[f"{theirs}.linear_attn.{module}"] = held.pop(f"{ours}.{name}")
        if architecture == "gemma4":
            held[f"{theirs}.layer_scalar"] = held.pop(f"{ours}.layer_output_scale.weight")
        if architecture in ("glm4moe", "dots1"):
            held[f"{theirs}.mlp.gate.e_score_correction_bias"] = held.pop(f"{ours}.exp_probs_b.bias")
        if architecture == "minimax-m2":
            bias = held.pop(f"{ours}.exp_probs_b.bias")
            held[f"{theirs}.block_sparse_moe.e_score_correction_bias"] = bias
        if architecture == "ernie4_5-moe":
            bias = held.pop(f"{ours}.exp_probs_b.bias")
            held[f"{theirs}.mlp.moe_statics.e_score_correction_bias"] = bias[None]
        if architecture == "granitemoe":
            both = [held.pop(f"{ours}.ffn_{kind}_exps.weight") for kind in ("gate", "up")]
            held[f"{theirs}.block_sparse_moe.input_linear.weight"] = torch.cat(both, dim=1)
        if architecture == "gpt-oss":
            experts = f"{theirs}.mlp.experts"
            both = [held.pop(f"{ours}.ffn_{kind}_exps.weight") for kind in ("gate", "up")]
            held[f"{experts}.gate_up_proj"] = (
                torch.stack(both, dim=2).flatten(1, 2).transpose(1, 2).contiguous()
            )
            both = [held.pop(f"{ours}.ffn_{kind}_exps.bias") for kind in ("gate", "up")]
            held[f"{experts}.gate_up_proj_bias"] = torch.stack(both, dim=2).flatten(1, 2)
            down = held.pop(f"{ours}.ffn_down_exps.weight")
            held[f"{experts}.down_proj"] = down.transpose(1, 2).contiguous()
            held[f"{experts}.down_proj_bias"] = held.pop(f"{ours}.ffn_down_exps.bias")
            held[f"{theirs}.self_attn.sinks"] = held.pop(f"{ours}.attn_sinks.weight")
    return held


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A gpt-oss folder's tensors with random MXFP4 blocks and scales in place of the experts' matrices."""
    generator = torch.Generator().manual_seed(5)
    held = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, cols, rows = held.pop(name).shape
        groups = (experts, rows, cols // 32)
        random = partial(torch.randint, generator=generator, dtype=torch.uint8)
        held |= {f"{name}_blocks": random(0, 256, (*groups, 16)), f"{name}_scales": random(119, 126, groups)}
    return held


def random_weights(
    sizes: ModelSizes, vocab: int, tied: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """GGUF name -> weights, Q and K in Hugging Face's order."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in sizes.tensor_shapes(vocab, tied).items():
        shape = (1, *shape) if name.endswith("ffn_gate_inp_shexp.weight") else shape
        shape = (shape[0], 1, shape[1]) if name.endswith("ssm_conv1d.weight") else shape
        values = torch.randn(shape, generator=generator) * 0.3
        weights[name] = (values + 1.0 if name.endswith("norm.weight") else values).to(dtype)
    return weights


def in_gguf_order(weights: dict[str, Tensor], sizes: ModelSizes) -> dict[str, Tensor]:
    """The weights as a GGUF converter writes them: Q and K of the llama family with rotated rows in pairs."""
    if sizes.architecture not in ("llama", "mistral3", "granite"):
        return weights
    ordered = dict(weights)
    for name, values in weights.items():
        heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}.get(name.split(".")[-2])
        if heads:
            halves = values.reshape(heads, 2, sizes.head_dim // 2, *values.shape[1:])
            ordered[name] = halves.swapaxes(1, 2).reshape(values.shape).contiguous()
    return ordered


def write_hf(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], shards: int = 1, rename: Any = hf_name
) -> Path:
    """A checkpoint folder with `weights` (by GGUF name; `rename` gives the name in the files)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    named = {rename(name): values for name, values in weights.items()}
    if shards == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(named.items())[i::shards])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
