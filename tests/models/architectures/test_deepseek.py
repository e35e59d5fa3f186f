"""DeepSeek-V2 and V3, GLM-4.7-Flash and Mistral Small 4 as folders and as GGUF: the logits of `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.memory import kv_cache_bytes
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.synthetic.presets import PRESETS
from tests.models.architectures.both_files import Case, SameLogits
from tests.transformers_models import edit

SIZES = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
MISTRAL_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
LONGER = {**MISTRAL_YARN, "original_max_position_embeddings": 64}


def _name_scores(folder: Path) -> None:
    """As released folders do, from which the converter has it; `transformers` passes it over."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    if model_type in ("deepseek_v3", "glm4_moe_lite"):
        edit(folder, scoring_func="sigmoid", topk_method="noaux_tc")
    if model_type == "glm4_moe_lite":
        edit(folder, first_k_dense_replace=1)


def _case(
    model_type: str, mixture: bool = False, converts: bool = True, vision: bool = False, **config: Any
) -> Case:
    sizes = {key: value for key, value in SIZES.items() if key != "first_k_dense_replace"}
    config = {**(sizes if "lite" in model_type else SIZES), **config}
    return Case(model_type, config, vision, mixture=mixture, converts=converts, edit=_name_scores)


CASES = {
    "v2": _case("deepseek_v2", rope_parameters=YARN, n_shared_experts=2, routed_scaling_factor=1.5),
    "v2 lite": _case("deepseek_v2", q_lora_rank=None),
    "v3": _case("deepseek_v3", n_group=4, topk_group=2, rope_parameters=YARN),
    "v3, halves": _case("deepseek_v3", converts=False, n_group=1, topk_group=1, rope_interleave=False),
    "glm": _case("glm4_moe_lite", mixture=True, rms_norm_eps=1e-6),
    "mistral": _case("mistral4", vision=True, rope_parameters=LONGER, n_group=4, topk_group=2),
    # The converter leaves out the temperature, which is 1 up to the original context.
    "mistral, hot": _case("mistral4", vision=True, converts=False, rope_parameters=MISTRAL_YARN),
}


class TestLogits(SameLogits):
    main = ("v2", "glm")


RELEASED = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "qk_rope_head_dim": 64,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 10000,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 32}, "head_dim: 32 is not 64"),
        (
            {"partial_rotary_factor": 0.25},
            "partial_rotary_factor: 0.25 of 64 elements is not qk_rope_head_dim",
        ),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not implemented, only sigmoid is"),
        ({"attention_bias": True}, "attention_bias"),
        ({"kv_lora_rank": 500}, "kv_lora_rank: 500 is not a multiple of 32"),
        (
            {
                "model_type": "deepseek_v2",
                "scoring_func": "softmax",
                "topk_method": "group_limited_greedy",
                "n_group": 8,
            },
            "topk_method: 'group_limited_greedy' with 8 groups is not implemented",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_hf_config({**RELEASED, "num_experts_per_tok": 8, **change})


def test_sizes_of_released_models_in_the_cache() -> None:
    """576 values a position and layer, once."""
    config = PRESETS["glm-4.7-flash"].config()
    assert kv_cache_bytes(config, 1) == 47 * 576 * 2
    assert kv_cache_bytes(config, 1, "q8_0") == 47 * (576 + 2 * 18)
