"""OLMo 2 and 3 as a folder and as GGUF: the logits of `transformers`, and refusals by name."""

from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.kernels.rope import RopeSpec
from quengine.models.config import CacheGroup
from quengine.models.gguf import open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened
from tests.transformers_models import DROP, edit

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
WINDOWS = {"num_hidden_layers": 5, "sliding_window": 5}


def as_released(folder: Path) -> None:
    """With keys of older releases of `transformers`, where scaling is that of layers without a window."""
    scaling = {**YARN, "attention_factor": 1.2}
    del scaling["rope_theta"]
    edit(folder, rope_parameters=DROP, rope_scaling=scaling, rope_theta=5e5, layer_types=DROP)


CASES = {
    "plain": Case("olmo2"),
    "tied": Case("olmo2", {"tie_word_embeddings": True}),
    "as many key heads as queries": Case("olmo2", {"num_key_value_heads": 4}),
    "yarn": Case("olmo2", {"rope_parameters": YARN}),
    "OLMo 3": Case("olmo3", WINDOWS),
    "OLMo 3, yarn": Case(
        "olmo3", {**WINDOWS, "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT}}
    ),
    "OLMo 3 as released": Case("olmo3", WINDOWS, edit=as_released),
    "OLMo 3, own layers": Case(
        "olmo3", {**WINDOWS, "layer_types": ["full_attention", *["sliding_attention"] * 4]}
    ),
}


class TestLogits(SameLogits):
    main = ("plain", "OLMo 3")


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


def test_three_of_four_layers_have_the_window(root: Path) -> None:
    for kind in KINDS:
        config = opened(root, "OLMo 3", kind).config
        assert config.cache_groups == (CacheGroup(None, (3,)), CacheGroup(5, (0, 1, 2, 4)))
        windowed = opened(root, "OLMo 3, yarn", kind).config.rotation(0)
        assert windowed.spec() == RopeSpec(16, 1e4, "halves", attention_factor=1.0)


def test_layers_of_metadata(tmp_path: Path) -> None:
    def windows(**changes: Any) -> tuple[int | None, ...]:
        keys = {f"olmo2.{key}": value for key, value in changes.items()}
        path = model_builder(ModelSizes("olmo2", blocks=4), changes=keys).write(tmp_path / "m.gguf")
        with open_gguf(path) as file:
            return read_gguf_config(file).layer_windows

    assert windows() == (None,) * 4
    assert windows(**{"attention.sliding_window": 8}) == (8, 8, 8, None)
    pattern = {"attention.sliding_window_pattern": [True, False, False, True]}
    assert windows(**{"attention.sliding_window": 8}, **pattern) == (8, None, None, 8)


def test_scaled_layers_with_a_window_are_refused() -> None:
    rope = {"full_attention": {"rope_type": "default"}, "sliding_attention": {**YARN, "rope_type": "yarn"}}
    config = {**hf_config(ModelSizes("olmo2"), 64), "model_type": "olmo3", "rope_parameters": rope}
    with pytest.raises(EngineError, match="rope_parameters: 'yarn' for layers with a window"):
        read_hf_config(config)
