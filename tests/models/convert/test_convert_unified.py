"""Gemma 4 12B, whose folder names tokens that are never generated: the file is llama.cpp's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import quengine
from quengine.errors import EngineError
from tests.llama_cpp_convert import VOCAB, Conversion, convert
from tests.models.convert.test_convert import check_equal, contents, write_gemma4_tokenizer
from tests.models.vision.test_gemma4uv import CASE
from tests.models.vision.vision_models import write_vision
from tests.transformers_models import edit

TEXT = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "sliding_window": 64,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 128,
}


def test_the_file_is_llama_cpps(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_vision(folder, replace(CASE, text={**CASE.text, **TEXT}))
    write_gemma4_tokenizer(folder)
    # As released configurations have it, which the converter expects.
    edit(folder, text={"moe_intermediate_size": None})
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [5, 7]}))
    convert([Conversion(folder, tmp_path / "theirs.gguf", "gemma4")])
    quengine.convert(folder, tmp_path / "ours.gguf", "f32", threads=1)
    check_equal(tmp_path / "ours.gguf", tmp_path / "theirs.gguf")
    assert contents(tmp_path / "ours.gguf")[0]["tokenizer.ggml.suppress_tokens"] == ("array of int32", [5, 7])
    for damaged in ([5, VOCAB], ["x"], 5):
        (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": damaged}))
        with pytest.raises(EngineError, match=f"suppress_tokens: must be ids from 0 to {VOCAB - 1}"):
            quengine.convert(folder, tmp_path / "none.gguf", "f32", threads=1)
