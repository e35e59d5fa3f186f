"""ERNIE 4.5 as a folder and as GGUF: the logits of `transformers`, which layers have experts, refusals by name."""

from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.gguf import open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened

EXPERTS = {
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 48,
    "intermediate_size": 192,  # the converter takes that of the shared experts to be this by the key heads
    "num_hidden_layers": 3,
}
FIVE = {**EXPERTS, "num_hidden_layers": 5}
NO_SHARED = {"moe_num_shared_experts": 0, "moe_layer_start_index": 0}
MIXTURE = {"tokenizer": "", "gate_up": True}


CASES = {
    "plain": Case("ernie4_5", tokenizer=""),
    "untied": Case("ernie4_5", {"tie_word_embeddings": False, "head_dim": 32}, tokenizer=""),
    "experts": Case("ernie4_5_moe", {**EXPERTS, "head_dim": 16}, **MIXTURE),
    "every second": Case("ernie4_5_moe", {**FIVE, "moe_layer_interval": 2}, tokenizer=""),
    "without shared": Case("ernie4_5_moe", {**EXPERTS, **NO_SHARED}, tokenizer=""),
    "a last layer": Case("ernie4_5_moe", {**EXPERTS, "moe_layer_end_index": 1}, converts=False),
}


class TestLogits(SameLogits):
    main = ("experts",)
    engine_kinds = ("gguf",)  # the folder has no tokenizer.json


def test_which_layers_are_dense(root: Path) -> None:
    dense = {"experts": (0,), "every second": (0, 2, 4), "without shared": ()}
    for name, layers in dense.items():
        for kind in KINDS:
            experts = opened(root, name, kind).config.experts
            assert experts is not None and experts.dense_layers == layers, (name, kind)
            assert experts.shared_feed_forward_length == (0 if name == "without shared" else 96)
    experts = opened(root, "a last layer", "folder").config.experts
    assert experts is not None and experts.dense_layers == (0, 2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_bias": True}, "use_bias: biases on all projections"),
        ({"moe_norm_min": 0.1}, "moe_norm_min: 0.1 is not implemented"),
        ({"moe_layer_interval": 0}, "moe_layer_interval: 0 is not from 1"),
        ({"moe_layer_start_index": 2}, "moe_num_experts|all 2 layers are dense"),
        ({"moe_num_shared_experts": -1}, "moe_num_shared_experts: -1"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], problem: str) -> None:
    config = hf_config(ModelSizes("ernie4_5-moe"), 64)
    with pytest.raises(EngineError, match=problem):
        read_hf_config(config | changes)


def test_keys_of_another_name_count() -> None:
    config = hf_config(ModelSizes("ernie4_5-moe"), 64, num_experts=8, num_experts_per_tok=4, moe_k=1)
    experts = read_hf_config(config).experts
    assert experts is not None and (experts.count, experts.router.used) == (8, 4)


def test_a_file_says_how_often_layers_have_experts(tmp_path: Path) -> None:
    changes = {"ernie4_5-moe.interleave_moe_layer_step": 2}
    path = model_builder(ModelSizes("ernie4_5-moe"), changes=changes).write(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        experts = read_gguf_config(file).experts
    assert experts is not None and experts.dense_layers == (0,)
