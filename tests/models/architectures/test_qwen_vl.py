"""The text models of Qwen's models with vision, as folders and as GGUF: the logits of `transformers`."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened
from tests.transformers_models import DROP, edit, edit_tensors

SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
YARN = {**SECTIONS, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
INTERLEAVED = {**SECTIONS, "mrope_interleaved": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}


def as_released(folder: Path) -> None:
    """Keys of the text model at the top level, and the sections as a kind of scaling."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text.pop("model_type"), text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": [4, 2, 2]}
    edit(folder, **text, text_config=DROP, rope_scaling=scaling, rope_theta=1e4)


def transposed(folder: Path) -> None:
    """As released: newer releases of `transformers` save experts as other models have them."""
    edit_tensors(
        folder,
        lambda tensors: tensors.update(
            {name: weight.transpose(1, 2) for name, weight in tensors.items() if ".experts." in name}
        ),
    )


def _case(name: str, converts: bool = True, edited: Any = None, **config: Any) -> Case:
    return Case(f"{name}_text", {"rope_parameters": SECTIONS, **config}, True, converts=converts, edit=edited)


CASES = {
    "qwen2": _case("qwen2_vl"),
    "qwen2 as released": _case("qwen2_vl", edited=as_released, tie_word_embeddings=False),
    "qwen2.5, yarn": _case("qwen2_5_vl", rope_parameters=YARN, tie_word_embeddings=False),
    "qwen2, tied by its text": _case(
        "qwen2_vl",
        edited=partial(edit, tie_word_embeddings=False, text={"tie_word_embeddings": True}),
    ),
    "qwen3": _case("qwen3_vl", rope_parameters=INTERLEAVED),
    "qwen3, untied": _case("qwen3_vl", rope_parameters=INTERLEAVED, tie_word_embeddings=False),
    "experts": _case("qwen3_vl_moe", edited=transposed, rope_parameters=INTERLEAVED, **EXPERTS),
    "a dense layer": _case(
        "qwen3_vl_moe", False, rope_parameters=INTERLEAVED, **EXPERTS, mlp_only_layers=[1]
    ),
}


class TestLogits(SameLogits):
    main = ("qwen3", "experts")


def test_images_parts_are_passed_over(root: Path) -> None:
    for name in ("qwen2", "qwen3", "experts"):
        folder, gguf = (opened(root, name, kind) for kind in KINDS)
        assert folder.tensors.keys() >= {"blk.0.attn_q.weight"} and not any(
            "visual" in n for n in folder.tensors
        )
        assert any("that the text model does not use" in note for note in folder.notes)
        assert folder.config.block == gguf.config.block and folder.config.experts == gguf.config.experts


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ([2, 2, 2, 2], "is not implemented, only three sections"),
        ([8], "is not implemented, only three sections"),
        ([2, 2, 2, 0], "are not the 8 frequencies"),
    ],
    ids=str,
)
def test_other_sections_are_refused(tmp_path: Path, sections: list[int], problem: str) -> None:
    changes = {"qwen3vl.rope.dimension_sections": sections}
    path = model_builder(ModelSizes("qwen3vl"), changes=changes).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match=f"dimension_sections.*{problem}"):
        read_gguf_config(file)


def test_another_text_model_is_refused() -> None:
    text = hf_config(ModelSizes("llama"), 64)
    with pytest.raises(EngineError, match="qwen3_vl with text model llama"):
        read_hf_config({"model_type": "qwen3_vl", "text_config": text})
