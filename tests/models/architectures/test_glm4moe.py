"""GLM-4.5 as a folder and as GGUF: the logits of `transformers`, the router's options, the draft layer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.cli.show_report import lines_of
from quengine.errors import EngineError
from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.model_summary import summarize
from tests.gguf_builder import ModelSizes, model_builder
from tests.models.architectures.both_files import Case, SameLogits, opened, path_of
from tests.transformers_models import edit, edit_tensors

SIZES = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "attention_bias": True,
    "num_nextn_predict_layers": 0,
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2}
DRAFT = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,)}


def add_draft_layer(folder: Path) -> None:
    """As released files have it: a copy of the last layer with tensors of its own, which `transformers` passes over."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        last = "model.layers.2."
        copies = {
            "model.layers.3." + name.removeprefix(last): t
            for name, t in tensors.items()
            if name.startswith(last)
        }
        tensors |= {name: t.clone() for name, t in copies.items()}
        tensors |= {f"model.layers.3.{name}.weight": torch.ones(shape) for name, shape in DRAFT.items()}

    edit_tensors(folder, change)
    edit(folder, num_nextn_predict_layers=1)


def _case(**config: Any) -> Case:
    return Case("glm4_moe", {**SIZES, **config}, mixture=True)


CASES = {
    "plain": _case(),
    "query and key norms": _case(use_qk_norm=True),
    "without biases": _case(attention_bias=False),
    "groups": _case(**GROUPS),
    "weights as they are": _case(norm_topk_prob=False, routed_scaling_factor=1.5),
    "two dense layers": _case(first_k_dense_replace=2),
    "no dense layer, all experts": _case(first_k_dense_replace=0, num_experts_per_tok=8),
    "rotates all": _case(partial_rotary_factor=1.0),
    "a draft layer": Case("glm4_moe", SIZES, edit=add_draft_layer),
}


class TestLogits(SameLogits):
    main = ("a draft layer",)


def test_both_files_describe_the_same_model(root: Path) -> None:
    for name in CASES:
        folder, gguf = (opened(root, name, kind).config for kind in ("folder", "gguf"))
        assert folder.experts == gguf.experts and folder.block == gguf.block, name
        assert (folder.block_count, folder.rope_dim) == (gguf.block_count, gguf.rope_dim)
        assert folder.draft_layers == gguf.draft_layers == int(name == "a draft layer")
    experts = opened(root, "groups", "gguf").config.experts
    assert experts is not None and experts.dense_layers == (0,)
    assert experts.router == RouterKind(3, "sigmoid", True, 2.5, groups=4, groups_used=2)
    assert experts.shared_feed_forward_length == 96


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_draft_layer_is_passed_over_and_said_to_be(root: Path, kind: str) -> None:
    plain, drafts = (opened(root, name, kind) for name in ("plain", "a draft layer"))
    (note,) = [note for note in drafts.notes if "draft" in note]
    count = 21 if kind == "gguf" else 42  # experts are stored one by one there
    assert note == f"the model has a layer that drafts tokens (MTP), which --draft-mtp uses: {count} tensors"
    assert set(drafts.tensors) == set(plain.tensors) and drafts.types == plain.types
    assert (drafts.nbytes, drafts.weights) == (plain.nbytes, plain.weights)
    shown = summarize(path_of(root, "a draft layer", kind))
    assert len(shown.drafts) == count and shown.problem is None
    assert shown.parameters == plain.weights and shown.weight_bytes == plain.nbytes
    assert f"note          {note}" in lines_of(shown, [], tensors=False)
    assert not summarize(path_of(root, "plain", kind)).drafts


RELEASED = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
"""The config.json of GLM-4.5-Air."""


def test_the_released_configuration() -> None:
    config = read_hf_config(RELEASED)
    assert (config.block_count, config.draft_layers, config.rope_dim) == (46, 1, 64)
    assert config.block.attention.qkv_bias and config.block.attention.qk_norm is None
    experts = config.experts
    assert experts is not None and experts.router == RouterKind(8, "sigmoid", normalized=True)
    assert (experts.count, experts.feed_forward_length, experts.shared_feed_forward_length) == (
        128,
        1408,
        1408,
    )
    without = {
        key: value for key, value in RELEASED.items() if key not in ("partial_rotary_factor", "n_group")
    }
    assert read_hf_config(without) == config  # the class's defaults


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", 1),
        ("use_qk_norm", None),
        ("norm_topk_prob", "yes"),
        ("first_k_dense_replace", -1),
        ("first_k_dense_replace", 2**40),
        ("num_nextn_predict_layers", -1),
        ("num_nextn_predict_layers", 10**6),
        ("n_routed_experts", 0),
        ("num_experts_per_tok", 129),
        ("moe_intermediate_size", 2**40),
        ("n_shared_experts", -1),
        ("n_group", 3),
        ("n_group", 0),
        ("topk_group", 2),
        ("routed_scaling_factor", 0.0),
        ("routed_scaling_factor", float("inf")),
        ("partial_rotary_factor", 0.0),
    ],
    ids=str,
)
def test_bad_config_json_values_are_refused_in_one_line(key: str, value: Any) -> None:
    with pytest.raises(EngineError, match=f"^config.json: {key}: ") as caught:
        read_hf_config(RELEASED | {key: value})
    assert "\n" not in str(caught.value)


def from_metadata(tmp_path: Path, **changes: Any) -> ModelConfig:
    metadata = {f"glm4moe.{key}": value for key, value in changes.items()}
    path = model_builder(ModelSizes("glm4moe"), changes=metadata).write(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        return read_gguf_config(file)


def test_groups_of_metadata_must_divide_the_experts(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="expert_group_used_count"):
        from_metadata(tmp_path, expert_group_count=2)
    with pytest.raises(GGUFError, match="4 experts do not make 3 equal groups"):
        from_metadata(tmp_path, expert_group_count=3, expert_group_used_count=1)
    experts = from_metadata(tmp_path, expert_group_count=2, expert_group_used_count=1).experts
    assert experts is not None and (experts.router.groups, experts.router.groups_used) == (2, 1)


def test_traits_of_metadata(tmp_path: Path) -> None:
    config = from_metadata(tmp_path)
    assert config.block.attention.qk_norm == "head" and config.block.attention.qkv_bias
    experts = config.experts
    assert experts is not None and experts.router == RouterKind(
        2, "sigmoid", normalized=False
    )  # as llama.cpp
    experts = from_metadata(tmp_path, expert_weights_norm=True).experts
    assert experts is not None and experts.router == RouterKind(2, "sigmoid", normalized=True)
    drafts = from_metadata(tmp_path, nextn_predict_layers=1)
    assert (drafts.block_count, drafts.draft_layers) == (1, 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nextn_predict_layers", 2),
        ("nextn_predict_layers", -1),
        ("nextn_predict_layers", 1.0),
        ("leading_dense_block_count", 3),
        ("expert_gating_func", 4),
        ("expert_weights_scale", -1.0),
        ("expert_weights_scale", float("nan")),
        ("expert_group_count", -1),
        ("expert_weights_norm", 1),
    ],
    ids=str,
)
def test_bad_metadata_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(GGUFError) as caught:
        from_metadata(tmp_path, **{key: value})
    assert caught.value.field == f"glm4moe.{key}"
