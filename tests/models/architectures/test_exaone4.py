"""EXAONE 4 as a folder and as GGUF: the logits of `transformers`, and which layers rotate."""

from pathlib import Path

from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened

FIVE = {"num_hidden_layers": 5, "sliding_window": 5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FULL = ["full_attention"]

CASES = {
    "plain": Case("exaone4", FIVE),
    "no window": Case("exaone4", {"sliding_window": None, "layer_types": 2 * FULL}),
    "llama3": Case("exaone4", {**FIVE, "rope_parameters": LLAMA3}),
    "every second": Case("exaone4", {**FIVE, "sliding_window_pattern": 2}),
    "own layers": Case("exaone4", {**FIVE, "layer_types": [*FULL, *["sliding_attention"] * 3, *FULL]}),
    "a window of no layer": Case("exaone4", {**FIVE, "layer_types": 5 * FULL}, converts=False),
}


class TestLogits(SameLogits):
    main = ("plain",)


def test_layers_without_a_window_do_not_rotate_where_others_have_one(root: Path) -> None:
    for kind in KINDS:
        assert opened(root, "plain", kind).config.unrotated_layers == (3,)
        assert opened(root, "own layers", kind).config.unrotated_layers == (0, 4)
        assert opened(root, "no window", kind).config.unrotated_layers == ()
    assert opened(root, "a window of no layer", "folder").config.unrotated_layers == (0, 1, 2, 3, 4)
