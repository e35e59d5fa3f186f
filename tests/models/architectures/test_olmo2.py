"""OLMo 2 as a folder and as GGUF: the logits of `transformers`, and refusals by name."""

from pathlib import Path

import pytest

from quengine.errors import EngineError
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFError, open_gguf
from tests.gguf_builder import ModelSizes, model_builder
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import Case, SameLogits, opened

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "plain": Case("olmo2"),
    "tied": Case("olmo2", {"tie_word_embeddings": True}),
    "as many key heads as queries": Case("olmo2", {"num_key_value_heads": 4}),
    "yarn": Case("olmo2", {"rope_parameters": YARN}),
}


class TestLogits(SameLogits):
    pass


def test_norms_are_behind_the_blocks_and_over_whole_rows(root: Path) -> None:
    tensors = opened(root, "plain", "gguf").tensors
    assert {n for n in tensors if n.startswith("blk.0.") and "norm" in n} == {
        "blk.0.attn_q_norm.weight",
        "blk.0.attn_k_norm.weight",
        "blk.0.post_attention_norm.weight",
        "blk.0.post_ffw_norm.weight",
    }
    assert tensors["blk.0.attn_q_norm.weight"].shape == (64,)
    assert tensors["blk.0.attn_k_norm.weight"].shape == (32,)


def test_windowed_layers_are_refused(tmp_path: Path) -> None:
    """Olmo 3's files have the same architecture in GGUF."""
    changes = {"olmo2.attention.sliding_window": 8}
    path = model_builder(ModelSizes("olmo2"), changes=changes).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match=r"sliding_window.*OLMo 3"):
        ModelConfig.from_gguf(file)
    with pytest.raises(EngineError, match="'olmo3' is not supported"):
        ModelConfig.from_hf(hf_config(ModelSizes("olmo3"), 64))
