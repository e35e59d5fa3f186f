"""Single changes of config.json: what each makes of a tiny model in `transformers` and here.

Seeds are folders that `transformers` saves, of every model type that is loaded, each with the rotary scalings and
windows that it may have. A change takes a key out, sets it to null, or gives it another legal value, at the top level,
in the text model's part or in the rotary parameters; keys that only some configuration class knows are put into all.
`compare` says whether both sides then compute the same, or who refuses the folder.
"""

import json
import random
import signal
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.models.architectures import MODEL_TYPES
from quengine.models.hf.hf_checkpoint import HFCheckpoint
from tests.transformers_models import (
    TOKENS,
    is_encoder,
    nmse,
    our_logits,
    token_ids,
    transformers_model,
    write_model,
)

Outcome = Literal["equal", "refused here", "refused there", "other", "failed"]
"""`other`: the logits differ, and nobody said so. `failed`: anything but an error of one line."""

TOLERANCE = 1e-9
"""Of logits beside those of `transformers`, which computes norms, angles and routers in float32."""

SECONDS = 120
"""A guard for a change that lets either side run away."""

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
MINISTRAL = {**YARN, "llama_4_scaling_beta": 0.3}
KINDS = {"linear": LINEAR, "yarn": YARN, "llama3": LLAMA3}


@dataclass(frozen=True)
class Seed:
    """A model for `write_model`. rotary: only what concerns rotation is changed; another seed has the rest."""

    model_type: str
    config: Mapping[str, Any]
    vision: bool = False
    rotary: bool = False


def _of_kinds(full: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of models with a window in some layers, whose other layers have `full`."""
    return {"full_attention": dict(full), "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}


_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 8}
_GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
_ROUTED = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_GLM = {
    **_ROUTED,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 0,
}
_ERNIE = {
    "num_hidden_layers": 4,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 48,
    "moe_layer_interval": 2,
    "tie_word_embeddings": False,
}
_LFM = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_DELTA = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
    "final_logit_softcapping": 3.0,
}
_GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
_GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 64,
    "laurel_rank": 16,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "final_logit_softcapping": 3.0,
}
_GEMMA4_LAYERED = {
    **_GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_key_value_heads": 1,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_MAMBA = {
    **_EXPERTS,
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
}
_TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "mixtral": {**_EXPERTS, "sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 80},
    "qwen3_moe": {**_QWEN_EXPERTS, "norm_topk_prob": True},
    "olmo2": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, **_EXPERTS},
    "granitemoeshared": {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 80},
    "granitemoehybrid": {
        **_GRANITE,
        "layer_types": ["attention", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 32,
    },
    "glm4_moe": _GLM,
    "gpt_oss": {**_EXPERTS, "num_hidden_layers": 3, "sliding_window": 5, "attention_bias": True},
    "smollm3": {"num_hidden_layers": 4},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 8},
    "glm4": {},
    "ernie4_5": {},
    "ernie4_5_moe": _ERNIE,
    "dots1": {**_ROUTED, "n_shared_experts": 1, "sliding_window": 8, "norm_topk_prob": True},
    "deepseek_v2": {**_LATENT, "num_key_value_heads": 4},
    "deepseek_v3": {**_LATENT, "n_group": 2, "topk_group": 1},
    "glm4_moe_lite": {key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
    "minimax_m2": {**_EXPERTS, "partial_rotary_factor": 0.5},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "gemma2": {"num_hidden_layers": 3, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    "arcee": {},
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 96,
        "intermediate_size": 48,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "floor_scale": 8,
        "attention_chunk_size": 64,
    },
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 8},
    "seed_oss": {"attention_out_bias": True},
    "lfm2": {**_LFM, "block_multiple_of": 32},
    "lfm2_moe": {**_LFM, **_QWEN_EXPERTS, "num_dense_layers": 1},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_QWEN_EXPERTS, "shared_expert_intermediate_size": 80},
    "qwen3_next": {**_DELTA, **_QWEN_EXPERTS, "shared_expert_intermediate_size": 80},
}


def _seeds() -> Iterator[tuple[str, Seed]]:
    for name, config in _TYPES.items():
        yield name, Seed(name, config)
        for kind, rope in KINDS.items():
            yield f"{name}, {kind}", Seed(name, {**config, "rope_parameters": rope}, rotary=True)
    for name in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        yield f"{name}, windows", Seed(name, {**_TYPES[name], **_WINDOWS, "max_window_layers": 1})
    yield "granitemoehybrid, mamba", Seed("granitemoehybrid", {**_TYPES["granitemoehybrid"], **_MAMBA})
    yield "smollm3, windows", Seed("smollm3", {**_TYPES["smollm3"], **_WINDOWS})
    yield "ministral3", Seed("ministral3", {"rope_parameters": MINISTRAL})
    rope = {**LINEAR, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16}
    yield "ministral3, linear", Seed("ministral3", {"rope_parameters": rope}, rotary=True)
    yield "mistral3", Seed("ministral3", {"rope_parameters": MINISTRAL}, vision=True)
    yield "mistral3 of mistral", Seed("mistral", {"sliding_window": 8}, vision=True)
    sections = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        yield name, Seed(f"{name}_text", sections, vision=True)
    yield "qwen3_vl_moe", Seed("qwen3_vl_moe_text", {**sections, **_QWEN_EXPERTS}, vision=True)
    for name, layers in (("gemma3_text", 7), ("olmo3", 4)):
        base = {"num_hidden_layers": layers, "sliding_window": 5}
        yield name, Seed(name, base)
        if name == "gemma3_text":
            base = {**base, "num_hidden_layers": 3, "layer_types": _MIXED}
            yield "gemma3", Seed(name, base, vision=True)
        for kind, rope in KINDS.items():
            yield f"{name}, {kind}", Seed(name, {**base, "rope_parameters": _of_kinds(rope)}, rotary=True)
    yield "gemma4_text", Seed("gemma4_text", _GEMMA4)
    yield "gemma4_text, experts", Seed("gemma4_text", {**_GEMMA4, **_GEMMA4_EXPERTS})
    yield "mistral4", Seed("mistral4", {**_LATENT, "n_group": 2, "topk_group": 1}, vision=True)
    yield "gemma3n_text", Seed("gemma3n_text", _GEMMA3N)
    yield "gemma4_text, layered", Seed("gemma4_text", _GEMMA4_LAYERED)
    yield from _encoders()
    yield "phi3", Seed("phi3", {"sliding_window": 8})
    yield (
        "phi3, longrope",
        Seed("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    )


def _encoders() -> Iterator[tuple[str, Seed]]:
    for name, config in _ENCODERS.items():
        yield name, Seed(name, config)
        if name != "nomic_bert":
            yield f"{name}, headed", Seed(name, {**config, "num_labels": 3})
    both = {"use_bidirectional_attention": True, "num_hidden_layers": 3, "sliding_window": 6}
    yield "gemma3_text, both sides", Seed("gemma3_text", {**both, "layer_types": _MIXED})


_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "xlm-roberta": {"pad_token_id": 7},
    "nomic_bert": {},
    "jina_embeddings_v3": {},
    "modernbert": {"num_hidden_layers": 4, "local_attention": 7},
}

_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SEEDS: dict[str, Seed] = dict(_seeds())


def write_seed(root: Path, name: str) -> Path:
    """The folder of a seed, made where it is not there."""
    folder, seed = root / name, SEEDS[name]
    if not (folder / "config.json").exists():
        write_model(folder, seed.model_type, seed.vision, **deepcopy(dict(seed.config)))
    return folder


class Absent(Enum):
    """In the place of a value: the key is not there. Unlike `DROP`, it stays itself in another process."""

    KEY = "absent"


@dataclass(frozen=True)
class Change:
    """The value, or Absent.KEY, of the key at `path` in config.json."""

    path: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        place = ".".join(self.path)
        return f"without {place}" if self.value is Absent.KEY else f"{place} = {json.dumps(self.value)}"

    def of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The changed configuration."""
        changed = deepcopy(dict(config))
        part = changed
        for key in self.path[:-1]:
            part = part[key]
        if self.value is Absent.KEY:
            del part[self.path[-1]]
        else:
            part[self.path[-1]] = deepcopy(self.value)
        return changed


_IGNORED = {"architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "vision_config"}
_ROPE_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "short_factor",
    "long_factor",
    "short_mscale",
    "long_mscale",
    "llama_4_scaling_beta",
    "max_position_embeddings",
    "mrope_section",
    "finetuned",
    "alpha",
)
_ROTARY = {
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rotary_pct",
    "original_max_position_embeddings",
    "max_position_embeddings",
    "sliding_window",
    "layer_types",
}
_ALSO: dict[str, tuple[Any, ...]] = {
    "is_causal": (True, False),
    "is_decoder": (True, False),
    "attention_chunk_size": (8,),
    "rope_theta": (2e4, 1000, 1e6),
    "rope_local_base_freq": (2e4,),
    "rope_interleaved": (True, False),
    "partial_rotary_factor": (0.5, 0.25, 1.0),
    "rotary_pct": (0.5,),
    "rotary_dim": (4, 8, 16),
    "original_max_position_embeddings": (16, 32, 64, 4096),
    "sliding_window_pattern": (1, 2, 3, 6),
    "no_rope_layers": ([1, 0],),
    "qk_layernorm": (True, False),
    "per_layer_config": ({"0": {"sliding_window": 4}}, {"1": {"rms_norm_eps": 1e-2}}, {}),
    "hidden_activation": ("silu", "gelu", "gelu_pytorch_tanh"),
    "parallel_attn": (True,),
    "use_parallel_residual": (True,),
    "attn_implementation": ("eager", "sdpa"),
    "num_kv_shared_layers": (1,),
    "add_cross_attention": (True,),
    "logits_mup_width_multiplier": (2.0,),
    "layer_norm_eps": (1e-3,),
    "norm_eps": (1e-3,),
    "mup": (True,),
    "head_dim": (8, 16, 32),
    "quantization_config": ({"quant_method": "gptq", "bits": 4}, {}),
    "rope_scaling": (
        {},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0},
        {"type": "dynamic", "factor": 1.0, "alpha": 50.0},
        {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
        {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
        {k: v for k, v in LONGROPE.items() if k != "rope_theta"},
        {"type": "su", "short_factor": LONGROPE["short_factor"], "long_factor": LONGROPE["long_factor"]},
        {"type": "mrope", "mrope_section": [2, 3, 3]},
        {"type": "default"},
    ),
    "rope_parameters": (
        {},
        {"rope_theta": 2e4},
        {"rope_type": "default"},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0},
        {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
        LINEAR,
        YARN,
        LLAMA3,
        LONGROPE,
        MINISTRAL,
        _of_kinds({"rope_type": "default"}),
        _of_kinds(LINEAR),
        _of_kinds(YARN),
        {"full_attention": LINEAR},
        {"sliding_attention": {"rope_theta": 2e4}},
        {"full_attention": None, "sliding_attention": None},
    ),
    "rope_type": (
        "default",
        "linear",
        "yarn",
        "llama3",
        "longrope",
        "dynamic",
        "proportional",
        "su",
        "mrope",
    ),
    "type": ("default", "linear", "yarn", "llama3", "longrope", "dynamic", "su"),
    "factor": (0.5, 1, 1.0, 2, 8.0, 40.0, 1e3),
    "attention_factor": (0.5, 1.0, 2),
    "beta_fast": (0, 1, 8, 16.0, 64),
    "beta_slow": (0, 0.5, 2, 16.0, 40),
    "low_freq_factor": (0.5, 1, 2.0, 4.0),
    "high_freq_factor": (1.0, 2, 8.0),
    "mscale": (0, 0.5, 1.0, 2),
    "mscale_all_dim": (0, 0.5, 1.0, 2),
    "truncate": (True, False),
    "short_factor": ([1.0] * 8, [3] * 8, [1.0] * 4, []),
    "long_factor": ([1.0] * 8, [3] * 8, [1.0] * 4, []),
    "short_mscale": (1.2,),
    "long_mscale": (1.2,),
    "llama_4_scaling_beta": (0, 0.1, 1, 0.5),
    "mrope_section": ([2, 3, 3],),
    "finetuned": (True, False),
    "alpha": (2.0,),
    "hidden_act": (
        "silu",
        "swish",
        "gelu",
        "gelu_new",
        "gelu_pytorch_tanh",
        "relu",
        "quick_gelu",
        "mish",
        "relu2",
    ),
    "mlp_only_layers": ([], [0], [1], [0, 1], [7], [-1]),
    "position_embedding_type": ("rope", "nope", None),
    "num_experts": (2, 4, 8),
    "num_local_experts": (0, 2, 4, 8),
    "n_routed_experts": (4, 8),
    "num_experts_per_tok": (1, 2, 3, 4, 5),
    "num_experts_per_token": (1,),
    "experts_per_token": (1,),
    "moe_k": (1,),
    "moe_topk": (1, 2, 3, [2, 2], [1, 2], [2]),
    "top_k": (1,),
    "moe_num_experts": (0, 2, 4, 8),
    "moe_norm_min": (0, 1e-10, 1e-6, 0.5),
    "use_bias": (True, False, None),
    "n_group": (1, 2, 4, 8),
    "topk_group": (1, 2, 3, 4),
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "noaux_tc"),
    "first_k_dense_replace": (0, 1, 2, 3, 5),
    "decoder_sparse_step": (0, 1, 2, 3),
    "query_pre_attn_scalar": (1, 4, 16, 64, 256, 1000),
    "rms_norm_eps": (1e-12, 1e-6, 1e-5, 1e-3, 0.1, 0.5, 1.0, 0, 1),
    "sliding_window": (1, 2, 5, 8, 39, 40, 41, 4096, 0, -1),
    "max_window_layers": (0, 1, 2, 3, 28),
    "max_position_embeddings": (1, 16, 32, 39, 64, 256, 4096, 131072),
    "clip_qkv": (0.5, 8.0),
    "swiglu_limit": (7, 5.0, None),
    "swiglu_alpha": (1.702, 1.0),
    "embedding_multiplier": (1, 1.0, 12, 0.5, 0),
    "logits_scaling": (1, 1.0, 16, 0.5),
    "residual_multiplier": (1, 1.0, 0.22, 2, 0),
    "attention_multiplier": (1, 1.0, 0.015625, 0),
    "routed_scaling_factor": (1, 1.0, 0.5, 16, 0),
    "attn_logit_softcapping": (50.0, 0.0, 2),
    "final_logit_softcapping": (30.0, 0.0, 1),
    "tie_word_embeddings": (True, False),
    "use_sliding_window": (True, False),
}
"""Key -> values to try, beside those that follow from the value that it has."""


def layer_types(layers: int) -> list[Any]:
    full, window = "full_attention", "sliding_attention"
    return [
        [full] * layers,
        [window] * layers,
        [(full, window)[i % 2] for i in range(layers)],
        [(window, full)[i % 2] for i in range(layers)],
        [full] * (layers - 1),
        [full] * (layers + 1),
        ["attention"] * layers,
        ["chunked_attention"] * layers,
        ["linear_attention"] * layers,
        [],
    ]


def _values(key: str, value: Any, layers: int) -> list[Any]:
    """Other values for a key that has `value`: null, those listed for it, and those that its type suggests."""
    found: list[Any] = [None, *_ALSO.get(key, ())]
    if key == "layer_types":
        found += layer_types(layers)
    elif key == "model_type":
        found += sorted(MODEL_TYPES)
    elif isinstance(value, bool):
        found += [True, False]
    elif isinstance(value, int):
        found += [0, 1, 2, 3, value - 1, value + 1, value * 2, value // 2, -1, float(value)]
    elif isinstance(value, float):
        found += [0.0, 1.0, value * 2, value / 2, value * 10, -value, int(value)]
    elif isinstance(value, list):
        found += [[], value[:-1], value + value[-1:], value[::-1]]
    elif isinstance(value, str) and not _ALSO.get(key):
        found += ["", "other"]
    return found


def _unlike(values: list[Any], *others: Any) -> Iterator[Any]:
    """The values in turn, each once, but for those of `others`."""
    seen = {json.dumps(value) for value in others if value is not Absent.KEY}
    for value in values:
        if (text := json.dumps(value)) not in seen:
            seen.add(text)
            yield value


def known_keys() -> dict[str, Any]:
    """The keys that the configuration class of any model type has, and one of their defaults."""
    from transformers import CONFIG_MAPPING

    keys: dict[str, Any] = {}
    # Assistants have another model's configuration within, and their class refuses its own defaults.
    whole = {name for name in MODEL_TYPES if not name.endswith("_assistant")}
    for name in sorted(whole.intersection(CONFIG_MAPPING.keys())):
        for key, value in CONFIG_MAPPING[name]().to_dict().items():
            if keys.get(key) is None:
                keys[key] = value
    keys = {key: value for key, value in keys.items() if not isinstance(value, dict)}
    return {key: value for key, value in keys.items() if key not in ("id2label", "label2id", "layer_types")}


def changes(name: str, config: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Change]:
    """Every single change of the seed `name`, whose config.json is `config`. known: see `known_keys`."""
    seed = SEEDS[name]
    parts: list[tuple[str, ...]] = [("text_config",), ()] if seed.vision else [()]
    for part in parts:
        text = config["text_config"] if part else config
        inner = config.get("text_config", config)
        layers = inner.get("num_hidden_layers") or len(inner["layers_block_type"])
        own = {*text, *_ALSO, "layer_types"}
        for key in sorted({*known, *own} - _IGNORED - set(_ROPE_KEYS) | _ROTARY):
            if seed.rotary and key not in _ROTARY:
                continue
            found = _of_key((*part, key), text.get(key, Absent.KEY), known.get(key), layers)
            # Of a key that neither the file nor this module knows of, one value shows whether anybody reads it.
            yield from found if key in own else islice(found, 1, 2)


def _of_key(path: tuple[str, ...], value: Any, default: Any, layers: int) -> Iterator[Change]:
    key = path[-1]
    if key == "text_config":
        return
    if value is not Absent.KEY:
        yield Change(path, Absent.KEY)
    own = default if value is Absent.KEY or value is None else value
    for other in _unlike(_values(key, own, layers), value):
        yield Change(path, other)
    if key in ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention") and isinstance(
        value, dict
    ):
        for inner in sorted({*value, *_ROPE_KEYS} - {"rope_parameters"}):
            yield from _of_key((*path, inner), value.get(inner, Absent.KEY), None, layers)


class TooSlowError(BaseException):
    """A comparison took more than SECONDS."""


def _too_slow(_signal: int, _frame: object) -> None:
    raise TooSlowError


def compare(seed: Path, change: Change, scratch: Path) -> tuple[Outcome, str]:
    """What becomes of a seed's folder by a change, and what was said or how far the logits lie apart."""
    folder = scratch / "case"
    folder.mkdir(exist_ok=True)
    for file in seed.iterdir():
        if file.suffix == ".safetensors" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    config = change.of(json.loads((seed / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(SECONDS)
    try:
        return _compare(folder)
    except TooSlowError:
        return "failed", f"took more than {SECONDS} s"
    finally:
        signal.alarm(0)
        for path in folder.iterdir():
            path.unlink()


def _compare(folder: Path) -> tuple[Outcome, str]:
    try:
        checkpoint = HFCheckpoint(folder)
        ours = our_logits(checkpoint, context=TOKENS)
    except EngineError as error:
        text = str(error)
        return ("failed" if "\n" in text or len(text) > 2000 else "refused here"), text
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"[:300]
    try:
        theirs = _their_logits(folder)
    except Exception as error:
        return "refused there", f"{type(error).__name__}: {error}"[:300]
    if theirs is None:
        return "refused there", "no finite logits, or weights that no file has"
    if ours.shape != theirs.shape:
        return "other", f"{list(ours.shape)}, not {list(theirs.shape)}"
    some = theirs.abs().sum(-1) > 0  # a padding token whose embedding is zero has none in a window of itself
    difference = nmse(ours[some], theirs[some])
    if (ours[~some] != 0).any():
        return "other", "logits that are zero there"
    return ("equal" if difference < TOLERANCE else "other"), f"NMSE {difference:.1e}"


def _their_logits(folder: Path) -> Tensor | None:
    """None: some are not finite, or `transformers` made weights up that the folder lacks."""
    model, missing = transformers_model(folder)
    if missing:
        return None
    with torch.no_grad():
        found = model(token_ids()[None])
    headed = found.get("last_hidden_state") is None
    logits: Tensor = found.logits if headed and is_encoder(model.config.to_dict()) else _first(found)
    return logits if logits.isfinite().all() else None


def _first(found: Any) -> Tensor:
    """Logits, or an encoder's rows, of the one text."""
    rows: Tensor = (found.logits if found.get("last_hidden_state") is None else found.last_hidden_state)[0]
    return rows


def sample(found: list[Change], count: int, seed: int) -> list[Change]:
    """`count` of the changes, the same for the same seed."""
    return random.Random(seed).sample(found, min(count, len(found)))
