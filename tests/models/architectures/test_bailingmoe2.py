"""Ling 2.0 as GGUF, which llama.cpp's converter makes of a folder by the names of its own code.

`transformers` has no such model. GLM-4.5 with norms of heads computes the same of the same tensors, under other names.
"""

import json
from pathlib import Path

import pytest
import torch

from quengine.kernels.moe.router_kind import RouterKind
from tests.llama_cpp_convert import Conversion, convert, write_tokenizer
from tests.models.architectures.both_files import (
    CPU_TOLERANCE,
    TOLERANCE,
    Case,
    cpu_difference,
    engine_difference,
    opened,
    reference_run,
    write_cases,
)
from tests.transformers_models import edit, edit_tensors

CASE = Case(
    "glm4_moe",
    {
        "use_qk_norm": True,
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,
    },
    converts=False,
)
NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}


def _rename(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        for theirs, ours in NAMES.items():
            if theirs in name:
                tensors[name.replace(theirs, ours)] = tensors.pop(name)
    for layer in range(3):
        rows = [tensors.pop(f"model.layers.{layer}.self_attn.{kind}_proj.weight") for kind in "qkv"]
        tensors[f"model.layers.{layer}.attention.query_key_value.weight"] = torch.cat(rows)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_cases(tmp_path_factory.mktemp("models"), {"ling": CASE})
    folder = root / "ling"
    edit_tensors(folder, _rename)
    edit(
        folder,
        architectures=["BailingMoeV2ForCausalLM"],
        model_type="bailing_moe",
        num_experts=8,
        num_shared_experts=2,
        score_function="sigmoid",
    )
    write_tokenizer(folder)
    convert([Conversion(folder, root / "ling.gguf", "bailingmoe2")])
    return root


def test_the_reference_backend_has_the_same_logits(root: Path) -> None:
    assert reference_run(root, "ling", "gguf", CASE.vocab).difference < TOLERANCE


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_the_cpus_kernels_and_the_engine_compute_them(root: Path, decode: bool) -> None:
    assert cpu_difference(root, "ling", "gguf", CASE, decode) < CPU_TOLERANCE
    assert engine_difference(root, "ling", "gguf", CASE, decode) < CPU_TOLERANCE


def test_the_file_says_all_of_it(root: Path) -> None:
    config = opened(root, "ling", "gguf").config
    assert config.experts is not None and config.experts.dense_layers == (0,)
    assert config.experts.router == RouterKind(3, "sigmoid", True, 2.5, groups=4, groups_used=2)
    assert (config.rope_dim, config.experts.shared_feed_forward_length) == (8, 96)
    assert json.loads((root / "ling" / "config.json").read_text())["model_type"] == "bailing_moe"
