"""OLMoE in every form of its files: the logits of `transformers`, and refusals by name."""

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


def _case(converts: bool = True, **config: Any) -> Case:
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "eos_token_id": 1}
    return Case("olmoe", {**sizes, **config}, converts=converts, mixture=True)


CASES = {
    "three of eight": _case(),
    "as many key heads as queries": _case(num_key_value_heads=4, num_experts=4, num_experts_per_tok=1),
    "all of four, tied": _case(num_experts=4, num_experts_per_tok=4, tie_word_embeddings=True),
    "normalized": _case(False, norm_topk_prob=True),
}


class TestLogits(SameLogits):
    main = ("three of eight",)


def test_norms_are_over_whole_rows(root: Path) -> None:
    tensors = opened(root, "three of eight", "gguf").tensors
    assert tensors["blk.0.attn_q_norm.weight"].shape == (64,)
    assert tensors["blk.0.attn_k_norm.weight"].shape == (32,)


def test_clipped_queries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"clip_qkv: 8.0 is not implemented"):
        read_hf_config(hf_config(ModelSizes("olmoe"), 64, clip_qkv=8.0))
    changes = {"olmoe.attention.clamp_kqv": 8.0}
    path = model_builder(ModelSizes("olmoe"), changes=changes).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match=r"clamp_kqv.*does not implement"):
        read_gguf_config(file)
