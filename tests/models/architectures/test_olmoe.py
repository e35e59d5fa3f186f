"""OLMoE in every form of its files: the logits of `transformers`, and refusals by name."""

from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFError, open_gguf
from tests.gguf_builder import ModelSizes, model_builder
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import (
    CPU_TOLERANCE,
    TOLERANCE,
    Case,
    cpu_difference,
    difference,
    engine_difference,
    of_kind,
    opened,
    write_cases,
)


def _case(converts: bool = True, **config: Any) -> Case:
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "eos_token_id": 1}
    return Case("olmoe", {**sizes, **config}, converts=converts, mixture=True)


CASES = {
    "three of eight": _case(),
    "as many key heads as queries": _case(num_key_value_heads=4, num_experts=4, num_experts_per_tok=1),
    "all of four, tied": _case(num_experts=4, num_experts_per_tok=4, tie_word_embeddings=True),
    "normalized": _case(False, norm_topk_prob=True),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cases(tmp_path_factory.mktemp("olmoe"), CASES)


@pytest.mark.parametrize(("name", "kind"), of_kind(CASES))
def test_logits_are_those_of_transformers(root: Path, name: str, kind: str) -> None:
    assert difference(root, name, kind, CASES[name]) < TOLERANCE


@pytest.mark.parametrize(("name", "kind"), of_kind(CASES))
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_the_cpus_kernels_compute_them(root: Path, name: str, kind: str, decode: bool) -> None:
    assert cpu_difference(root, name, kind, CASES[name], decode) < CPU_TOLERANCE


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_the_engine_computes_them_on_the_cpu(root: Path, kind: str, decode: bool) -> None:
    assert engine_difference(root, "three of eight", kind, CASES["three of eight"], decode) < CPU_TOLERANCE


def test_norms_are_over_whole_rows(root: Path) -> None:
    tensors = opened(root, "three of eight", "gguf").tensors
    assert tensors["blk.0.attn_q_norm.weight"].shape == (64,)
    assert tensors["blk.0.attn_k_norm.weight"].shape == (32,)


def test_clipped_queries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"clip_qkv: 8.0 is not implemented"):
        ModelConfig.from_hf(hf_config(ModelSizes("olmoe"), 64, clip_qkv=8.0))
    changes = {"olmoe.attention.clamp_kqv": 8.0}
    path = model_builder(ModelSizes("olmoe"), changes=changes).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match=r"clamp_kqv.*does not implement"):
        ModelConfig.from_gguf(file)
