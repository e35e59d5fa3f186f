"""Arcee's AFM as a folder and as GGUF: the logits of `transformers`, biases that are refused."""

import json
from pathlib import Path

import pytest

from quengine.errors import EngineError
from quengine.models.hf.config_hf import read_hf_config
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

CASES = {
    "plain": Case("arcee"),
    "tied": Case("arcee", {"tie_word_embeddings": True}),
    "yarn": Case("arcee", {"rope_parameters": YARN}),
}


class TestLogits(SameLogits):
    pass


def test_there_is_no_gate(root: Path) -> None:
    for kind in KINDS:
        checkpoint = opened(root, "plain", kind)
        assert checkpoint.config.block.feed_forward.pointwise == "relu2"
        assert not [name for name in checkpoint.tensors if "gate" in name]


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_are_refused(root: Path, key: str) -> None:
    config = json.loads((root / "plain" / "config.json").read_text())
    with pytest.raises(EngineError, match=f"{key}: biases on the output or feed-forward projections"):
        read_hf_config({**config, key: True})


def test_another_activation_is_refused(root: Path) -> None:
    config = json.loads((root / "plain" / "config.json").read_text())
    with pytest.raises(EngineError, match="hidden_act: 'silu' is not implemented, only relu2 is"):
        read_hf_config({**config, "hidden_act": "silu"})
