"""The mixture of experts in config.json: what each key means, and one line for each value that is refused."""

from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.kernels.moe.router_kind import MOST_EXPERTS, RouterKind
from quengine.models.architectures import MODEL_TYPES
from quengine.models.blocks.experts import ExpertConfig
from quengine.models.config import ModelConfig
from quengine.models.hf.config_hf import read_hf_config
from tests.each_case import each_case
from tests.gguf_builder import ModelSizes
from tests.hf_writer import hf_config

MIXTURES = [name for name, (_, model_type) in MODEL_TYPES.items() if model_type.expert_keys]
SMALL = {"count": 8, "used": 2, "feed_forward_length": 48, "groups": 4, "groups_used": 2}
"""Values that go together; other keys have what `transformers` takes for them."""
_GEMMA4 = {
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_LATENT = {
    "head_dim": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
}
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA4),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT),
    "mistral4": {**_LATENT, "head_dim": 32},
    "granitemoehybrid": {"layer_types": ["attention"] * 4},
}
"""Keys without which models of a type are none that is implemented."""

USED = dict.fromkeys(("llama4", "llama4_text"), 1)
"""Experts of a row, where 2 are not implemented."""


def config(model_type: str, **fields: Any) -> ModelConfig:
    """Of a model of four layers; `fields` of its experts replace SMALL's."""
    keys = MODEL_TYPES[model_type][1].expert_keys
    small = SMALL | {"used": USED.get(model_type, SMALL["used"])} | fields
    changes = {keys[field]: value for field, value in small.items() if field in keys}
    given = {**hf_config(ModelSizes(model_type, blocks=4), 64), **OTHERS.get(model_type, {})}
    if keys.get("count") == "num_local_experts":
        given.pop("num_experts", None)  # the other name, which would count
    return read_hf_config({**given, "intermediate_size": 48, "sliding_window": 8, **changes})


def experts(model_type: str, **fields: Any) -> ExpertConfig:
    found = config(model_type, **fields).experts
    assert found is not None
    return found


@pytest.mark.parametrize("model_type", MIXTURES)
def test_the_sizes_are_those_of_the_folder(model_type: str) -> None:
    found = experts(model_type)
    used = USED.get(model_type, 2)
    assert (found.count, found.router.used, found.feed_forward_length) == (8, used, 48)


def test_traits_of_the_router_are_those_of_the_folder() -> None:
    mixtral = ExpertConfig(8, RouterKind(2, "softmax", normalized=True), 48)
    assert experts("mixtral") == mixtral
    for normalized in (False, True):
        assert experts("olmoe", normalized=normalized).router == RouterKind(2, "softmax", normalized)
    glm = experts("glm4_moe", normalized=False, scale=1.5, shared_count=2)
    assert glm.router == RouterKind(2, "sigmoid", False, 1.5, 4, 2)
    assert glm.shared_feed_forward_length == 2 * 48


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_goes_by_either_name(model_type: str, key: str) -> None:
    given = hf_config(ModelSizes(model_type), 64, **{key: 12})
    found = read_hf_config(given).experts
    assert found is not None and found.count == 12


WRONG: dict[str, list[Any]] = {
    "count": [0, -1, MOST_EXPERTS + 1, 2**63, 10**400, 8.0, "8", True, [8]],
    "used": [0, -1, 9, 2**63, 2.0, "2", True, {}],
    "feed_forward_length": [0, -1, 2**24 + 1, 2**63, 48.0, "48", True],
    "shared_feed_forward_length": [-1, 2**24 + 1, 2**63, 48.0, "48", True],
    "shared_count": [-1, MOST_EXPERTS + 1, 2**63, 1.0, "1", True],
    "normalized": [None, 0, 1, "true", [True]],
    "scale": [0.0, -1.0, float("nan"), float("inf"), 1e31, "1", True],
    "groups": [0, -1, 3, 16, 2.0, "2", True],
    "groups_used": [0, -1, 5, 1.0, "1", True],
}


CASES = [
    (name, field, key, value)
    for name in MIXTURES
    for field, key in MODEL_TYPES[name][1].expert_keys.items()
    for value in WRONG[field]
    if not (MODEL_TYPES[name][1].may_be_dense and field == "count" and value == 0)
    # Llama 4's files have the length of experts as intermediate_size.
    if (name, field) not in (("llama4", "feed_forward_length"), ("llama4_text", "feed_forward_length"))
]


@each_case(("model_type", "field", "key", "value"), CASES)
def test_values_out_of_range_or_of_another_type_are_refused_by_key(
    model_type: str, field: str, key: str, value: Any
) -> None:
    with pytest.raises(EngineError) as caught:
        config(model_type, **{field: value})
    message = str(caught.value)
    assert message.startswith("config.json: ") and key in message.split(": ")[1]
    assert "\n" not in message and len(message) < 1000


def test_groups_must_have_as_many_experts_as_a_row_chooses() -> None:
    with pytest.raises(EngineError, match=r"topk_group: 1 groups have fewer than 3 experts"):
        config("glm4_moe", used=3, groups_used=1)
