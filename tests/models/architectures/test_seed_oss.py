"""Seed-OSS as a folder and as GGUF: the logits of `transformers`, with and without each kind of bias."""

from pathlib import Path

import pytest

from quengine.errors import EngineError
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

CASES = {
    "plain": Case("seed_oss"),
    "a bias of the output": Case("seed_oss", {"attention_out_bias": True, "rope_parameters": YARN}),
    "no biases, tied": Case("seed_oss", {"attention_bias": False, "tie_word_embeddings": True}),
}


class TestLogits(SameLogits):
    main = ("a bias of the output",)


def test_both_files_have_the_same_biases(root: Path) -> None:
    for kind in KINDS:
        blocks = [opened(root, name, kind).config.block.attention for name in CASES]
        assert [block.qkv_bias for block in blocks] == [True, True, False]
        assert [block.output_bias for block in blocks] == [False, True, False]


def test_biases_of_the_feed_forward_are_refused() -> None:
    with pytest.raises(EngineError, match=r"^config.json: mlp_bias: .* are not implemented"):
        read_hf_config(hf_config(ModelSizes("seed_oss"), 64, mlp_bias=True))
