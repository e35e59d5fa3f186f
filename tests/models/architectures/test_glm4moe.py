"""GLM-4.5 as a folder and as GGUF: the logits of `transformers`, the router's options, the draft layer."""

from pathlib import Path

import pytest
import torch

from tests.models.architectures.both_files import (
    TOLERANCE,
    Case,
    difference,
    of_kind,
    write_cases,
)
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


CASES = {
    "plain": Case("glm4_moe", SIZES),
    "query and key norms": Case("glm4_moe", {**SIZES, "use_qk_norm": True}),
    "without biases": Case("glm4_moe", {**SIZES, "attention_bias": False}),
    "groups": Case("glm4_moe", {**SIZES, **GROUPS}),
    "weights as they are": Case("glm4_moe", {**SIZES, "norm_topk_prob": False, "routed_scaling_factor": 1.5}),
    "two dense layers": Case("glm4_moe", {**SIZES, "first_k_dense_replace": 2}),
    "no dense layer": Case("glm4_moe", {**SIZES, "first_k_dense_replace": 0}),
    "all experts": Case("glm4_moe", {**SIZES, "num_experts_per_tok": 8}),
    "rotates all": Case("glm4_moe", {**SIZES, "partial_rotary_factor": 1.0}),
    "a draft layer": Case("glm4_moe", SIZES, edit=add_draft_layer),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cases(tmp_path_factory.mktemp("glm4moe"), CASES)


@pytest.mark.parametrize(("name", "kind"), of_kind(CASES))
def test_logits_are_those_of_transformers(root: Path, name: str, kind: str) -> None:
    assert difference(root, name, kind, CASES[name]) < TOLERANCE
