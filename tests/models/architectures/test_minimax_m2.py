"""MiniMax-M2 as a folder and as GGUF: the logits of `transformers`, and the part of a head that is rotated."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened
from tests.transformers_models import edit

SIZES = {"num_local_experts": 8, "num_experts_per_tok": 3}


def _case(rotary: int, **config: Any) -> Case:
    """As released: the converter takes the rotated elements from `rotary_dim`, which newer folders lack."""
    config = {**SIZES, "partial_rotary_factor": rotary / 16, **config}
    return Case("minimax_m2", config, edit=partial(edit, rotary_dim=rotary))


CASES = {
    "plain": _case(8),
    "rotates all, tied": _case(16, tie_word_embeddings=True),
    "one of four": _case(4, num_local_experts=4, num_experts_per_tok=1),
}


class TestLogits(SameLogits):
    pass


def test_norms_are_over_whole_rows(root: Path) -> None:
    for kind in KINDS:
        checkpoint = opened(root, "plain", kind)
        assert checkpoint.config.rope_dim == 8 and not checkpoint.config.splits_heads
        assert checkpoint.tensors["blk.0.attn_q_norm.weight"].shape == (64,)


def test_the_rotated_elements_of_released_folders() -> None:
    config = hf_config(ModelSizes("minimax-m2"), 64, rotary_dim=4)
    assert read_hf_config(config).rope_dim == 4
    assert read_hf_config({**config, "partial_rotary_factor": 0.5}).rope_dim == 8
    with pytest.raises(EngineError, match=r"^config.json: rotary_dim: 20 is not from 1 to 16"):
        read_hf_config({**config, "rotary_dim": 20})
