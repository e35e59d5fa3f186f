"""Hunyuan as a folder and as GGUF: the logits of `transformers`, norms of rotated heads, the raised base."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened
from tests.transformers_models import edit

ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"num_experts": 8, "moe_topk": 3}
RELEASED = {"moe_intermediate_size": [96, 96], "num_shared_expert": [1, 1], "moe_topk": [3, 3]}
"""Keys of released folders that the converter reads."""

CASES = {
    "plain": Case("hunyuan_v1_dense"),
    "alpha": Case("hunyuan_v1_dense", {"rope_parameters": ALPHA, "max_position_embeddings": 32768}),
    "yarn, biases": Case(
        "hunyuan_v1_dense", {"rope_parameters": YARN, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "experts": Case("hunyuan_v1_moe", EXPERTS, edit=partial(edit, **RELEASED)),
    "experts, alpha": Case("hunyuan_v1_moe", {**EXPERTS, "rope_parameters": ALPHA}, converts=False),
}


class TestLogits(SameLogits):
    main = ("plain", "experts")


def test_both_files_describe_the_same_model(root: Path) -> None:
    for kind in KINDS:
        config = opened(root, "alpha", kind).config
        assert config.block.attention.qk_norm == "rotated head" and config.rope_scaling.kind == "none"
        assert config.rope_freq_base == pytest.approx(1e4 * 50.0 ** (16 / 14))
        experts = opened(root, "experts", kind).config.experts
        assert experts is not None and (experts.feed_forward_length, experts.router.used) == (96, 3)
        assert experts.shared_feed_forward_length == 96
        block = opened(root, "yarn, biases", kind).config.block.attention
        assert block.qkv_bias and block.output_bias


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: 'dynamic' without alpha"),
        ({"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "alpha: -1.0 for heads of 16"),
        ({"moe_topk": [1, 2]}, "moe_topk: is not the same number for each of 2 layers"),
        ({"moe_topk": [2]}, "moe_topk: is not the same number for each of 2 layers"),
        ({"attention_bias": 1}, "attention_bias: 1 is not true or false"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], problem: str) -> None:
    config = hf_config(ModelSizes("hunyuan-moe"), 64, moe_topk=2)
    del config["num_experts_per_tok"]
    with pytest.raises(EngineError, match=f"^config.json: {problem}"):
        read_hf_config(config | changes)
