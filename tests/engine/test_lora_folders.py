"""PEFT folders beside a model's weights: the logits that `transformers` gets from the folder with them merged."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quengine
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.kernels.lora.reference import AdaptedReference
from quengine.loading.open_adapters import OpenAdapters, open_adapters
from quengine.models.checkpoint import open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.synthetic.synthetic import write_synthetic
from tests.forward import one_sequence
from tests.llama_cpp_convert import VOCAB, write_tokenizer
from tests.models.adapters import random_adapters
from tests.models.adapters import write_adapter as write_adapter_file
from tests.models.architectures.both_files import write_case
from tests.models.lora.lora_folders import ALPHA, RANK, is_linear, write_adapter, write_merged
from tests.transformers_models import (
    CONTEXT,
    nmse,
    token_ids,
    transformers_logits,
    unrounded_cache,
    write_model,
)

CASES = {
    "llama": ("", ""),
    "phi3": ("test_phi3", "plain"),
    "qwen2moe": ("test_qwen_moe", "qwen2"),
    "granite": ("test_granite", "attention alone"),
}
"""The module and name of a model's case."""


def written(folder: Path, name: str) -> Path:
    module, case = CASES[name]
    if case:
        write_case(folder, import_module(f"tests.models.architectures.{module}").CASES[case])
    else:
        write_model(folder, "llama", vocab=VOCAB)
        write_tokenizer(folder)
    return folder


def picked(name: str, weight: Tensor) -> bool:
    """All but experts."""
    return is_linear(name, weight) and ".experts." not in name


def logits(path: Path, adapters: OpenAdapters, scale: float) -> Tensor:
    """Float64, over a cache that keeps fp32."""
    checkpoint = open_checkpoint(path)
    config, weights = checkpoint.config, adapters.weights
    assert weights is not None
    backend = AdaptedReference(weights, keep=True)
    decoder = Decoder(config, checkpoint.tensors, backend, CONTEXT, CONTEXT)
    adapters.check_taken(backend.end_loading())
    batch = one_sequence(token_ids(VOCAB), all_logits=True, blocks=CONTEXT // 32)
    batch = replace(batch, adapters=torch.full((1, len(batch)), scale))
    return decoder.forward(batch, unrounded_cache(config))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_merged_model(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "model", name)
    embedding = "model.embed_tokens.weight" if name == "llama" else ""
    adapter = write_adapter(tmp_path / "adapter", folder, picked, embedding=embedding)
    merged = write_merged(tmp_path / "merged", folder, adapter, 0.5 * ALPHA / RANK)
    file = tmp_path / "model.gguf"
    quengine.convert(folder, file, "f32", threads=1)
    wanted = transformers_logits(merged, VOCAB)
    assert nmse(transformers_logits(folder, VOCAB), wanted) > 0.05
    for path in (folder, file):
        adapters = open_adapters(EngineConfig(lora=(str(adapter),)), open_checkpoint(path))
        assert nmse(logits(path, adapters, 0.5), wanted) < 1e-9


def test_an_embedding_that_is_the_output_matrix_is_changed_as_its_module(tmp_path: Path) -> None:
    """`transformers` has the same model as one whose output matrix is a copy, which the adapter leaves as it is."""
    folder = written(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": table.clone()}, folder / "model.safetensors", {"format": "pt"})
    given = {"picks": lambda *_: False, "embedding": "model.embed_tokens.weight"}
    adapter = write_adapter(tmp_path / "adapter", folder, **given)
    merged = write_merged(tmp_path / "merged", folder, adapter, 0.5 * ALPHA / RANK)
    wanted = transformers_logits(merged, VOCAB)
    assert nmse(transformers_logits(folder, VOCAB), wanted) > 0.05
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.tied_output
    adapters = open_adapters(EngineConfig(lora=(str(adapter),)), checkpoint)
    assert nmse(logits(folder, adapters, 0.5), wanted) < 1e-9


def test_a_change_of_the_output_alone_of_a_tied_model_is_not_merged(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "llama")
    adapter = write_adapter(tmp_path / "adapter", folder, lambda name, _: name == "lm_head.weight")
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    adapters = open_adapters(EngineConfig(lora=(str(adapter),)), open_checkpoint(folder))
    assert list(adapters.files[0].changes) == ["output.weight"] and adapters.weights.tied
    quengine.convert(folder, tmp_path / "m.gguf", "f32", threads=1)
    with pytest.raises(EngineError, match=r"output.weight: the model's output matrix is its embedding"):
        quengine.merge(tmp_path / "m.gguf", [adapter], tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_matrices_whose_rows_are_taken_in_another_order_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_synthetic(tmp_path / "m.gguf", "qwen3-next-tiny"))
    adapters = random_adapters(checkpoint.tensors, ("ssm_ba",), (4,))
    path = write_adapter_file(tmp_path / "a.gguf", "qwen3next", adapters, 0, 4.0)
    with pytest.raises(
        EngineError, match=r"ssm_ba.weight: a change of this tensor is not implemented beside"
    ):
        open_adapters(EngineConfig(lora=(str(path),)), checkpoint)


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "qwen2moe")
    adapter = write_adapter(tmp_path / "adapter", folder)
    with pytest.raises(EngineError, match=r"_exps.weight: a change of this tensor is not implemented beside"):
        open_adapters(EngineConfig(lora=(str(adapter),)), open_checkpoint(folder))
