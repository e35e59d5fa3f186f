"""Qwen2-MoE and Qwen3-MoE in every form of their files: the logits of `transformers`, and refusals by name."""

from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import Case, SameLogits, opened

SIZES = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 48}
NORMALIZED = {"norm_topk_prob": True}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8}


def qwen2(converts: bool = True, **config: Any) -> Case:
    return Case("qwen2_moe", {**SIZES, **SHARED, **config}, converts=converts, mixture=True)


def qwen3(converts: bool = True, **config: Any) -> Case:
    return Case("qwen3_moe", {**SIZES, **config}, converts=converts, mixture=True)


CASES = {
    "qwen2": qwen2(),
    "qwen2, all experts, tied": qwen2(num_experts_per_tok=6, tie_word_embeddings=True),
    "qwen2, one expert": qwen2(num_experts_per_tok=1, shared_expert_intermediate_size=96),
    "qwen2, normalized": qwen2(False, **NORMALIZED),
    "qwen2, the first layer dense": qwen2(False, mlp_only_layers=[0]),
    "qwen2, windows": qwen2(False, **WINDOWS, max_window_layers=2, num_hidden_layers=4),
    "qwen3": qwen3(**NORMALIZED),
    "qwen3, all experts": qwen3(**NORMALIZED, num_experts_per_tok=6),
    "qwen3, one expert, wide heads": qwen3(**NORMALIZED, num_experts_per_tok=1, head_dim=32),
    "qwen3, not normalized": qwen3(False),
    "qwen3, every other layer dense": qwen3(False, **NORMALIZED, num_hidden_layers=4, decoder_sparse_step=2),
    "qwen3, a window": qwen3(False, **WINDOWS),
}


class TestLogits(SameLogits):
    main = ("qwen2", "qwen3")


def test_dense_layers_are_those_that_the_folder_names(root: Path) -> None:
    config = opened(root, "qwen3, every other layer dense", "folder").config
    assert [config.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    config = opened(root, "qwen2, the first layer dense", "folder").config
    assert [config.has_experts(layer) for layer in range(2)] == [False, True]


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe"])
def test_files_without_the_experts_lengths_have_those_of_llama_cpp(tmp_path: Path, architecture: str) -> None:
    """As the first files of Qwen2-MoE: a share of the feed-forward's for each of the chosen experts."""
    sizes = ModelSizes(architecture, experts_used=4)
    keys = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    changes = {f"{architecture}.{key}": None for key in keys}
    with open_gguf(model_builder(sizes, changes=changes).write(tmp_path / "m.gguf")) as file:
        experts = read_gguf_config(file).experts
    assert experts is not None and experts.feed_forward_length == sizes.feed_forward // 4
    shared = sizes.feed_forward if architecture == "qwen2moe" else 0
    assert experts.shared_feed_forward_length == shared


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe"])
@pytest.mark.parametrize("count", [0, None])
def test_files_without_experts_are_refused(tmp_path: Path, architecture: str, count: int | None) -> None:
    changes = {f"{architecture}.expert_count": count}
    path = model_builder(ModelSizes(architecture), changes=changes).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match=f"{architecture}.expert_count"):
        read_gguf_config(file)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"qkv_bias": False}, "qkv_bias: false is not implemented"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: 0 is not from 1"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers: 'all' is not a list of layers"),
        ({"mlp_only_layers": [True]}, "is not a list of layers"),
        ({"mlp_only_layers": [0, 1]}, "all 2 layers are dense"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: 0 is not from 1"),
        ({"decoder_sparse_step": 3}, "all 2 layers are dense"),
        ({"num_experts": 0}, "num_experts: 0 is not from 1"),
        ({"num_local_experts": 2000}, "num_local_experts: 2000 is not from 1"),
        ({"num_experts_per_tok": 61}, "num_experts_per_tok: 61 is not from 1 to 60"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: 0 is not from 1"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob: 'yes' is not true or false"),
    ],
)
def test_values_that_are_not_implemented_are_refused(changes: dict[str, Any], problem: str) -> None:
    assert read_hf_config(hf_config(ModelSizes("qwen2_moe"), 64)).experts
    with pytest.raises(EngineError, match=problem):
        read_hf_config(hf_config(ModelSizes("qwen2_moe"), 64, **changes))
