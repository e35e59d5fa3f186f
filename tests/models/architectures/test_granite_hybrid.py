"""Granite 4.0-H as a folder and as GGUF: the logits of `transformers`, its multipliers, and refusals by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.architectures import layers_of
from quengine.models.blocks.experts import Experts
from quengine.models.blocks.mamba2 import Mamba2
from quengine.models.config import CacheGroup
from quengine.models.gguf import open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, bpe_vocabulary, model_builder
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened
from tests.models.architectures.test_nemotron_h import remember
from tests.transformers_models import DROP, edit

SCALES = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
LAYERS = ["mamba", "attention", "mamba", "attention"]
SIZES = {
    **SCALES,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 24,
    "shared_intermediate_size": 80,
    "num_local_experts": 4,
}


def as_released(folder: Path) -> None:
    """With the first names of layers' kinds, which llama.cpp's converter reads."""
    kinds = json.loads((folder / "config.json").read_text())["layer_types"]
    edit(folder, layer_types=["mamba" if kind == "linear_attention" else "attention" for kind in kinds])
    edit(folder, head_dim=DROP, position_embedding_type="nope")


def rotated(folder: Path) -> None:
    as_released(folder)
    edit(folder, position_embedding_type="rope", mamba_d_head="auto")


def case(config: dict[str, Any], **options: Any) -> Case:
    options = {"change": remember, "edit": as_released, **options}
    return Case("granitemoehybrid", {**SIZES, **config}, **options)


CASES = {
    "plain": case({}, gate_up=True),
    "dense, groups, tied": case(
        {
            "num_local_experts": 0,
            "intermediate_size": 80,
            "mamba_n_groups": 4,
            "tie_word_embeddings": True,
            "mamba_d_conv": 3,
        }
    ),
    "a large epsilon, no bias": case({"rms_norm_eps": 1e-2, "mamba_conv_bias": False}, converts=False),
    "rotated, limits": case({"time_step_limit": [0.2, 0.6]}, edit=rotated, converts=False),
    "attention alone, experts": case({"layer_types": ["full_attention"] * 4}, converts=False),
}


class TestLogits(SameLogits):
    main = ("plain", "dense, groups, tied")
    faults = ("attention scale", "layers")


def test_layers_are_declared_one_by_one(root: Path) -> None:
    for kind in KINDS:
        config = opened(root, "plain", kind).config
        assert config.cache_groups == (CacheGroup(None, (1, 3)), CacheGroup(None, (0, 2), is_state=True))
        blocks = layers_of(config)
        assert [isinstance(block.mixer, Mamba2) for block in blocks] == [True, False] * 2
        assert all(isinstance(block.feed_forward, Experts) for block in blocks)
        assert config.unrotated_layers == (0, 1, 2, 3)
        assert config.rms_eps == pytest.approx(1e-6 / 0.22**2)
        assert config.mamba2 is not None and config.mamba2.eps == pytest.approx(1e-6)


def test_models_that_only_attend_are_granites(root: Path) -> None:
    config = json.loads((root / "dense, groups, tied" / "config.json").read_text())
    config |= {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"}
    assert read_hf_config(config).architecture == "granite"
    assert read_hf_config({**config, "position_embedding_type": None}).architecture == "granitehybrid"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": LAYERS[:3]}, "layer_types: is not a list of the kinds of 4 layers"),
        ({"layer_types": [*LAYERS[:3], "conv"]}, "layer_types: conv: not implemented"),
        ({"layer_types": None}, "layer_types: no layer has attention: not implemented"),
        ({"layer_types": "mamba"}, "layer_types: mamba is not a list of the kinds of layers"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type: 'alibi' is not implemented"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias: biases of Mamba2's projections are not implemented"),
        ({"mamba_d_head": 24}, "mamba_d_head: 8 heads of 24 are not 128 elements: not implemented"),
        ({"mamba_n_groups": 3}, "mamba_n_heads: 8 is not a multiple of the 3 groups"),
        ({"mamba_d_state": 264}, "mamba_d_state: 264 is not from 8 to 256"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit: .* is not a least and a largest step of time"),
        ({"time_step_limit": None}, "time_step_limit: None is not a least and a largest step"),
        ({"attention_bias": True}, "attention_bias: biases on the output"),
    ],
)
def test_what_a_folder_has_that_is_not_computed_is_refused(
    root: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((root / "plain" / "config.json").read_text())
    with pytest.raises(EngineError, match=message):
        read_hf_config({**config, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.inner_size": 33}, "ssm.inner_size.*is not a multiple of the 4 heads"),
        ({"ssm.state_size": 12}, "ssm.state_size.*12 is not a multiple of 8"),
        ({"ssm.time_step_rank": None}, "ssm.time_step_rank.*missing"),
        ({"attention.head_count_kv": [0, 0]}, "head_count_kv.*is 0 in every layer"),
        ({"attention.head_count_kv": [0, 2, 2]}, "head_count_kv.*has 3 numbers for 2 layers"),
        ({"attention.sliding_window": 8}, "attention.sliding_window.*windows are not implemented"),
        ({"residual_scale": 1e-9}, "residual_scale.*is not from 1e-06"),
    ],
)
def test_what_a_file_has_that_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    sizes = ModelSizes("granitehybrid")
    changed = {f"granitehybrid.{key}": value for key, value in changes.items()}
    path = model_builder(sizes, bpe_vocabulary(), changes=changed).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(EngineError, match=message):
        read_gguf_config(file)
