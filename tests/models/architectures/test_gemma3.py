"""Gemma 3 as a folder and as GGUF: the logits of `transformers`, defaults of released folders, refusals by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quengine.errors import EngineError
from quengine.models.config import CacheGroup, ModelConfig
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.models.architectures.both_files import Case, SameLogits, opened

LAYERS = {"num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 16}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
OF_27B = {"num_hidden_layers": 62, "hidden_size": 80, "query_pre_attn_scalar": 20}
CASES = {
    "plain": Case("gemma3_text", LAYERS),
    "untied": Case("gemma3_text", {**LAYERS, "tie_word_embeddings": False}),
    "with vision": Case("gemma3_text", LAYERS, vision=True),
    "linear scaling": Case("gemma3_text", {**LAYERS, "rope_parameters": LINEAR}),
    "SentencePiece": Case("gemma3_text", LAYERS, tokenizer=""),
    "as deep as 27B": Case("gemma3_text", {**LAYERS, **OF_27B}),
    "own layer types": Case(
        "gemma3_text", {**LAYERS, "num_hidden_layers": 3, "layer_types": MIXED}, converts=False
    ),
    "own scale": Case("gemma3_text", {**LAYERS, "query_pre_attn_scalar": 40}, converts=False),
}


class TestLogits(SameLogits):
    pass


def test_layers_are_in_two_cache_groups(root: Path) -> None:
    config = opened(root, "plain", "gguf").config
    assert config.cache_groups == (CacheGroup(None, (5,)), CacheGroup(5, (0, 1, 2, 3, 4, 6)))
    assert opened(root, "plain", "folder").config.cache_groups == config.cache_groups


def test_vision_tensors_are_passed_over_with_a_note(root: Path) -> None:
    (note,) = opened(root, "with vision", "folder").notes
    assert "tensors that the text model does not use: multi_modal_projector" in note


def test_tokenizers_of_the_file(root: Path) -> None:
    tokenizer = opened(root, "SentencePiece", "gguf").tokenizer()
    ids = tokenizer.encode("the cat", bos=True)
    assert ids[0] == tokenizer.bos_id and tokenizer.decode(ids[1:]) == "the cat"


TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
"""The text_config of gemma-3-4b-it: all else is the class's."""


def config_of(**changes: Any) -> ModelConfig:
    return read_hf_config({"model_type": "gemma3", "text_config": TEXT | changes})


def test_a_released_folder_leaves_most_to_defaults() -> None:
    config = config_of()
    assert (config.vocab_size, config.head_count, config.head_count_kv, config.head_dim) == (
        262208,
        8,
        4,
        256,
    )
    assert config.full_attention_layers == (5, 11, 17, 23, 29) and config.sliding_window == 1024
    assert (config.rope_freq_base, config.rope_freq_base_swa) == (1e6, 1e4)
    assert config.tied_output and config.attention_scale == 256**-0.5
    assert config.embedding_scale == float(np.sqrt(np.float32(2560)))
    full, windowed = config.rotation(5).spec(), config.rotation(0).spec()
    assert (full.scaling, full.factor, full.base) == ("linear", 8.0, 1e6)
    assert (windowed.scaling, windowed.base) == ("none", 1e4)


def test_keys_of_older_folders() -> None:
    config = config_of(rope_local_base_freq=2e4, rope_theta=5e5, sliding_window_pattern=3)
    assert (config.rope_freq_base, config.rope_freq_base_swa) == (5e5, 2e4)
    assert config.full_attention_layers[:2] == (2, 5)
    each = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    assert config_of(rope_parameters=each, sliding_window_pattern=3) == config
    with_type = {"sliding_attention": {"type": "default"}}
    assert config_of(rope_parameters=with_type) == config_of()


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"use_bidirectional_attention": True},
        {"hidden_activation": "gelu"},
        {"sliding_window": None},
        {"sliding_window_pattern": 0},
        {"query_pre_attn_scalar": 0},
        {"query_pre_attn_scalar": "256"},
        {"rope_local_base_freq": 0.5},
        {"rope_parameters": [1]},
        {"rope_parameters": {"full_attention": 1}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        {"rope_scaling": "linear"},
        {"layer_types": ["full_attention"]},
    ],
    ids=str,
)
def test_what_the_decoder_does_not_compute_is_refused_in_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"^config.json: ") as caught:
        config_of(**changes)
    assert "\n" not in str(caught.value)


def from_metadata(tmp_path: Path, **changes: Any) -> ModelConfig:
    keys = {"attention.sliding_window": 8} | changes
    sizes = ModelSizes("gemma3", blocks=7)
    path = model_builder(
        sizes, tied=True, changes={f"gemma3.{key}": value for key, value in keys.items()}
    ).write(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        return read_gguf_config(file)


def test_layer_patterns_of_metadata(tmp_path: Path) -> None:
    assert from_metadata(tmp_path).full_attention_layers == (5,)
    assert from_metadata(tmp_path, **{"attention.sliding_window_pattern": 3}).full_attention_layers == (2, 5)
    flags = [True, False, True, True, True, True, False]
    given = from_metadata(tmp_path, **{"attention.sliding_window_pattern": flags})
    assert given.full_attention_layers == (1, 6)
    assert from_metadata(tmp_path, **{"rope.freq_base_swa": 3e4}).rope_freq_base_swa == 3e4
    without = from_metadata(tmp_path, **{"attention.sliding_window": 0})
    assert without.layer_windows == (None,) * 7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("attention.sliding_window_pattern", [True, False]),
        ("attention.sliding_window_pattern", 0),
        ("attention.sliding_window_pattern", [0.5] * 7),
        ("attention.sliding_window_pattern", "6"),
        ("rope.freq_base_swa", float("nan")),
        ("rope.freq_base_swa", 10000),
        ("rope.freq_base_swa", 1.0),
        ("rope.freq_base", None),
    ],
    ids=str,
)
def test_bad_metadata_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(GGUFError) as caught:
        from_metadata(tmp_path, **{key: value})
    assert caught.value.field == f"gemma3.{key}"
