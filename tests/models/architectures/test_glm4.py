"""GLM-4 as a folder and as GGUF: the logits of `transformers`, rotation in pairs, layers that only draft."""

from pathlib import Path

import pytest
import torch

from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
}
CASES = {
    "plain": Case("glm4"),
    "rotates a quarter, tied": Case("glm4", {"partial_rotary_factor": 0.25, "tie_word_embeddings": True}),
    "no biases, yarn": Case("glm4", {"attention_bias": False, "rope_parameters": YARN}),
}


class TestLogits(SameLogits):
    pass


def test_both_files_describe_the_same_model(root: Path) -> None:
    for kind in KINDS:
        configs = [opened(root, name, kind).config for name in CASES]
        assert [config.rope_dim for config in configs] == [8, 4, 8]
        assert [config.block.attention.qkv_bias for config in configs] == [True, True, False]
        assert {(config.rope_axes, config.block.attention.rope_layout) for config in configs} == {
            ((), "pairs")
        }


def test_rows_of_a_folder_stay_in_their_order(root: Path) -> None:
    folder, gguf = (opened(root, "plain", kind) for kind in KINDS)
    for name in ("blk.0.attn_q.weight", "blk.1.attn_k.bias", "blk.1.ffn_up.weight"):
        assert torch.equal(folder.tensors[name].data, gguf.tensors[name].data)
    assert not any("copied" in note for note in folder.notes)


def test_draft_layers_are_passed_over_and_other_rotations_refused(tmp_path: Path) -> None:
    def read(**changes: object) -> tuple[int, int]:
        metadata = {f"glm4.{key}": value for key, value in changes.items()}
        path = model_builder(ModelSizes("glm4"), changes=metadata).write(tmp_path / "m.gguf")
        with open_gguf(path) as file:
            config = read_gguf_config(file)
        return config.block_count, config.draft_layers

    assert read() == (2, 0)
    assert read(nextn_predict_layers=1) == (1, 1)
    with pytest.raises(GGUFError, match="nextn_predict_layers"):
        read(nextn_predict_layers=2)
    with pytest.raises(GGUFError, match=r"dimension_sections.*are not the \d+ frequencies"):
        read(**{"rope.dimension_sections": [8, 12, 12, 0]})
