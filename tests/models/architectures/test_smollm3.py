"""SmolLM3 as a folder and as GGUF: the logits of `transformers`, and which layers do not rotate."""

import json
from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.hf.config_hf import read_hf_config
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened

FIVE = {"num_hidden_layers": 5}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}

CASES = {
    "plain": Case("smollm3", FIVE),
    "untied": Case("smollm3", {**FIVE, "tie_word_embeddings": False}),
    "every second": Case("smollm3", {"no_rope_layer_interval": 2, "num_hidden_layers": 3}, converts=False),
    "own layers": Case("smollm3", {**FIVE, "no_rope_layers": [0, 1, 1, 0, 1]}, converts=False),
    "a window": Case("smollm3", {**FIVE, **WINDOW}, converts=False),
    "a window that is not used": Case("smollm3", {**FIVE, "sliding_window": 5}, converts=False),
}


class TestLogits(SameLogits):
    main = ("plain",)


def test_every_fourth_layer_does_not_rotate(root: Path) -> None:
    for kind in KINDS:
        assert opened(root, "plain", kind).config.unrotated_layers == (3,)
    assert opened(root, "own layers", "folder").config.unrotated_layers == (0, 3)
    windowed = opened(root, "a window", "folder").config
    assert windowed.layer_windows == (None, None, None, 5, None)


def test_a_window_that_is_and_is_not_used_is_refused(root: Path) -> None:
    config = json.loads((root / "a window" / "config.json").read_text())
    with pytest.raises(EngineError, match="use_sliding_window: is not true, and layer_types has layers"):
        read_hf_config({**config, "use_sliding_window": False})


@pytest.mark.parametrize("flags", [[1, 1], "1111", [1, 1, 2, 0, 1], [True, False, True, True, True]])
def test_what_is_no_flag_for_each_layer_is_refused(root: Path, flags: Any) -> None:
    config = json.loads((root / "plain" / "config.json").read_text())
    with pytest.raises(EngineError, match="no_rope_layers: is not a 0 or 1 for each of 5 layers"):
        read_hf_config({**config, "no_rope_layers": flags})
