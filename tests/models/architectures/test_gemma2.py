"""Gemma 2 as a folder and as GGUF: the logits of `transformers`, soft caps, windows in every other layer."""

from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.config import CacheGroup, ModelConfig
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.models.architectures.both_files import Case, SameLogits, opened

CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
LAYERS = {"num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 16}
CASES = {
    "plain": Case("gemma2", {**LAYERS, **CAPS}),
    "defaults": Case("gemma2", LAYERS),
    "uncapped": Case(
        "gemma2",
        {**LAYERS, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        converts=False,
    ),
    "own scale, untied": Case(
        "gemma2",
        {**LAYERS, **CAPS, "query_pre_attn_scalar": 40, "tie_word_embeddings": False},
        converts=False,
    ),
}


class TestLogits(SameLogits):
    pass


def test_both_files_describe_the_same_model(root: Path) -> None:
    for kind in ("gguf", "folder"):
        config = opened(root, "plain", kind).config
        assert config.cache_groups == (CacheGroup(None, (1,)), CacheGroup(5, (0, 2)))
        assert (config.attention_softcap, config.logit_softcap) == (2.0, 3.0)
        config = opened(root, "defaults", kind).config
        assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)


def config_of(**changes: Any) -> ModelConfig:
    return read_hf_config({"model_type": "gemma2", "sliding_window": 4096, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_logit_softcapping": 0.0},
        {"final_logit_softcapping": -1.0},
        {"final_logit_softcapping": "30"},
        {"use_bidirectional_attention": True},
        {"hidden_activation": "gelu"},
        {"sliding_window": None},
        {"query_pre_attn_scalar": 0},
        {"layer_types": ["full_attention"]},
    ],
    ids=str,
)
def test_what_the_decoder_does_not_compute_is_refused_in_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"^config.json: ") as caught:
        config_of(**changes)
    assert "\n" not in str(caught.value)


def test_a_released_folder_leaves_most_to_defaults() -> None:
    config = config_of()
    assert (config.head_count, config.head_dim, config.attention_scale) == (8, 256, 256**-0.5)
    assert config.full_attention_layers == tuple(range(1, 26, 2)) and config.tied_output


def from_metadata(tmp_path: Path, **changes: Any) -> ModelConfig:
    keys = {"attention.sliding_window": 8} | changes
    sizes = ModelSizes("gemma2", blocks=4)
    path = model_builder(
        sizes, tied=True, changes={f"gemma2.{key}": value for key, value in keys.items()}
    ).write(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        return read_gguf_config(file)


def test_metadata_may_leave_out_the_caps(tmp_path: Path) -> None:
    config = from_metadata(tmp_path)
    assert config.full_attention_layers == (1, 3)
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 0.0),
        ("final_logit_softcapping", float("nan")),
        ("attention.sliding_window", 0),
        ("attention.sliding_window_pattern", 0),
    ],
    ids=str,
)
def test_bad_metadata_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(GGUFError) as caught:
        from_metadata(tmp_path, **{key: value})
    assert caught.value.field == f"gemma2.{key}"
