"""Phi-3 as a folder and as GGUF: the logits of `transformers`, LongRoPE's two sets of factors, refusals by name."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quengine.errors import EngineError
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import Case, SameLogits, opened

PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
LONGROPE = {
    **PARTIAL,
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.0 + 0.5 * i for i in range(6)],
}


def case(tokenizer: str = "GPT2Tokenizer", **config: Any) -> Case:
    return Case("phi3", config, tokenizer=tokenizer)


CASES = {
    "plain": case(),
    "tied": case(tie_word_embeddings=True),
    "window": case(sliding_window=5),
    "partial rotation": case(rope_parameters=PARTIAL),
    "SentencePiece": case(tokenizer=""),
    # The tests run it in a context of 128: the long factors.
    "long factors": case(rope_parameters=LONGROPE, original_max_position_embeddings=32),
    "short factors": case(
        rope_parameters=LONGROPE, original_max_position_embeddings=128, max_position_embeddings=256
    ),
}


class TestLogits(SameLogits):
    main = ("plain", "window", "long factors")


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_context_of_a_run_chooses_the_factors(root: Path, kind: str) -> None:
    config = opened(root, "long factors", kind).config
    assert config.rotation(0).spec(32).freq_factors == pytest.approx(LONGROPE["short_factor"])
    assert config.rotation(0).spec(33).freq_factors == pytest.approx(LONGROPE["long_factor"])
    magnitude = math.sqrt(1.0 + math.log(128 / 32) / math.log(32))
    assert config.rotation(0).spec(32).magnitude == pytest.approx(magnitude)
    assert config.rotation(0).spec(33).magnitude == pytest.approx(magnitude)


def test_merged_tensors_are_cut_without_a_copy(root: Path) -> None:
    merged = opened(root, "plain", "gguf").tensors["blk.0.ffn_up.weight"]
    gate, up = merged.row_slices(96)
    assert gate.shape == up.shape == (96, 64)
    assert gate.data.data_ptr() == merged.data.data_ptr()
    assert torch.equal(torch.cat([gate.data, up.data]), merged.data)


HF = hf_config(ModelSizes("phi3"), 64, head_dim=None)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_longrope(name: str) -> None:
    scaling = {"type": name, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = read_hf_config(HF | {"rope_scaling": scaling, "original_max_position_embeddings": 64})
    assert config.rope_scaling.kind == "longrope"
    assert config.rotation(0).spec(65).freq_factors == (2.0,) * 8


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8}},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": ["1"] * 8}},
        {"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": 2.0}},
        {"rope_scaling": {"type": ["longrope"]}},
        {"partial_rotary_factor": 0.0},
        {"partial_rotary_factor": 2.0},
        {"partial_rotary_factor": 0.2},
        {"original_max_position_embeddings": 0, "rope_scaling": {"type": "su"}},
    ],
    ids=str,
)
def test_bad_rotary_parameters_are_refused_in_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"^config.json: ") as caught:
        read_hf_config(HF | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("factors", "named"),
    [
        ({"long": 8}, "rope_factors_short.weight"),
        ({"long": 7, "short": 8}, "rope_factors_long.weight"),
        ({"long": 8, "short": 7}, "rope_factors_short.weight"),
    ],
    ids=str,
)
def test_factors_in_a_file_are_checked(tmp_path: Path, factors: dict[str, int], named: str) -> None:
    builder = model_builder(ModelSizes("phi3"))
    for name, count in factors.items():
        builder.tensor(f"rope_factors_{name}.weight", (count,), "F32", np.ones(count, np.float32))
    with open_gguf(builder.write(tmp_path / "m.gguf")) as file, pytest.raises(GGUFError, match=named):
        read_gguf_config(file)
