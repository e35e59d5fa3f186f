"""Synthetic models are files that llama.cpp loads too, so that benchmarks compare the same ones."""

import ctypes
from pathlib import Path

import pytest

from quengine.models.synthetic.synthetic import write_synthetic
from tests.llama_cpp_vocab import library


@pytest.mark.parametrize(
    "preset",
    ["deepseek2-tiny", "bailingmoe2-tiny", "gemma-4-tiny", "gemma-4-moe-tiny", "ernie4_5-moe-tiny",
     "llama4-tiny", "nemotron-h-tiny", "nemotron-h-moe-tiny"],
)  # fmt: skip
def test_llama_cpp_loads_it(tmp_path: Path, preset: str) -> None:
    path, lib = write_synthetic(tmp_path / "model.gguf", preset), library()
    lib.llama_model_free.argtypes = [ctypes.c_void_p]
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    assert model
    lib.llama_model_free(model)
