"""Command R7B as a folder and as GGUF: the logits of `transformers`, windows, layers that do not rotate, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened

FIVE = {"num_hidden_layers": 5, "sliding_window": 5, "rotary_pct": 1.0}
FULL, WINDOW = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def _case(converts: bool = True, **config: Any) -> Case:
    return Case("cohere2", {**FIVE, **config}, converts=converts)


CASES = {
    "plain": _case(),
    "scaled": _case(logit_scale=0.25, layer_norm_eps=1e-2),
    "untied": _case(tie_word_embeddings=False, converts=False),
    "linear": _case(rope_parameters=LINEAR, converts=False),
    "own layers": _case(layer_types=[FULL, WINDOW, WINDOW, FULL, WINDOW], converts=False),
    "no window": _case(layer_types=5 * [FULL], converts=False),
}


class TestLogits(SameLogits):
    pass


def test_layers_without_a_window_do_not_rotate(root: Path) -> None:
    for kind in KINDS:
        config = opened(root, "plain", kind).config
        assert config.unrotated_layers == config.full_attention_layers == (3,)
        assert config.logit_scale == 0.0625 and config.tied_output
        assert not [name for name in opened(root, "plain", kind).tensors if "ffn_norm" in name]
    assert opened(root, "own layers", "folder").config.unrotated_layers == (0, 3)
    assert opened(root, "no window", "folder").config.unrotated_layers == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"attention_bias": True}, "attention_bias: biases on the output"),
        ({"sliding_window": None}, "sliding_window: missing: layers of this model have one"),
        ({"logit_scale": -1.0}, "logit_scale: -1.0 is not a positive"),
    ],
)
def test_what_is_not_computed_in_a_folder_is_refused(
    root: Path, change: dict[str, Any], problem: str
) -> None:
    config = json.loads((root / "plain" / "config.json").read_text())
    with pytest.raises(EngineError, match=problem):
        read_hf_config({**config, **change})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cohere2.attention.sliding_window": 0}, "missing, or 0"),
        ({"cohere2.logit_scale": None}, "logit_scale: missing"),
        ({"cohere2.attention.layer_norm_epsilon": None}, "layer_norm_epsilon: missing"),
        ({"cohere2.rope.freq_base_swa": 5e3}, "does not implement"),
    ],
)
def test_what_is_not_computed_in_a_file_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    keys = {"cohere2.attention.sliding_window": 4, "cohere2.logit_scale": 0.5, **change}
    path = model_builder(ModelSizes("cohere2"), changes=keys, tied=True).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match=problem):
        read_gguf_config(file)
