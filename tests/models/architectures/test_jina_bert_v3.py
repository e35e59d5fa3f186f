"""Jina Embeddings v3 as a folder, and as GGUF of one with the released keys: rows of `transformers`, llama.cpp's."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM
from quengine.errors import EngineError
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.reference import ReferenceBackend
from quengine.models.config import Task
from quengine.models.hf.config_hf import read_hf_config
from tests.llama_cpp_convert import Conversion, convert
from tests.llama_cpp_embeddings import llama_cpp_embedding
from tests.models.architectures.test_bert import path_of, rows, theirs, write_pooling
from tests.models.architectures.test_xlm_roberta import SIZES, TEXTS, write_xlm_roberta
from tests.transformers_models import edit, nmse


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("jina")
    tokenizer = write_xlm_roberta(root / "tokenizer")
    torch.manual_seed(1)
    for name, kind in (("model", "Model"), ("headed", "ForSequenceClassification")):
        labels = {"num_labels": 1} if name == "headed" else {}
        config = transformers.JinaEmbeddingsV3Config(**SIZES, **labels)
        model = getattr(transformers, f"JinaEmbeddingsV3{kind}")(config)
        with torch.no_grad():
            for parameter, weight in model.named_parameters():
                if parameter.endswith("bias") or "norm" in parameter.lower():
                    weight.add_(torch.randn_like(weight) * 0.2)
        model.save_pretrained(root / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / file, root / name)
    write_pooling(root / "model", "mean_tokens")
    shutil.copytree(root / "model", root / "released")
    edit(
        root / "released",
        architectures=["XLMRobertaModel"],
        model_type="xlm-roberta",
        lora_adaptations=["retrieval.query"],
        position_embedding_type="rotary",
        rotary_emb_base=20000.0,
    )
    convert([Conversion(root / "released", root / "model.gguf", "default")])
    return root


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_rows_are_those_of_transformers(root: Path, kind: str) -> None:
    expected = [theirs(root / "model", text) for text in TEXTS]
    ids = [each for each, _, _ in expected]
    found = rows(path_of(root, "model", kind), ids, ReferenceBackend(keep=True))
    assert max(nmse(ours, wanted) for ours, (_, wanted, _) in zip(found, expected, strict=True)) < 1e-9
    on_cpu = rows(path_of(root, "model", kind), ids, CpuBackend(1))
    assert max(map(nmse, on_cpu, found)) < 5e-5


def test_released_keys_are_read(root: Path) -> None:
    keys = json.loads((root / "released" / "config.json").read_text())
    config = read_hf_config(
        {**keys, "rotary_emb_base": 500.0, "task_instructions": {"retrieval.query": "Q: "}}
    )
    assert config.architecture == "jina-bert-v3" and config.rope_freq_base == 500.0
    assert config.encoder is not None and config.encoder.tasks == (Task("retrieval.query", "Q: "),)
    assert read_hf_config({**keys, "rotary_emb_base": None}).rope_freq_base == 10_000.0


def test_pairs_are_ranked_by_the_head(root: Path) -> None:
    query, document = "the cat", "sat on the mat"
    expected = theirs(root / "headed", query, document)[2]
    with LLM(root / "headed", device="cpu", threads=1) as llm:
        found = llm.rank(query, [document])
    assert expected is not None
    assert torch.allclose(torch.tensor(found).double(), expected, rtol=1e-2, atol=1e-3)


def test_the_vectors_are_llama_cpps(root: Path) -> None:
    path = root / "model.gguf"
    with LLM(path, device="cpu", threads=1) as llm:
        assert llm.model_config.pooling == "mean"
        ours = torch.tensor(llm.embed(TEXTS[:1])).double()
        ids = [*llm.encode(TEXTS[0]), llm.tokenizer.end_of_text]
    unit = torch.nn.functional.normalize(torch.from_numpy(llama_cpp_embedding(path, ids, 64)).double(), dim=0)
    assert nmse(ours, unit[None]) < 1e-4


@pytest.mark.parametrize(
    ("folder", "change", "problem"),
    [
        (
            "released",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type: 'relative_key' is not",
        ),
        ("released", {"rotary_emb_base": "high"}, "rotary_emb_base: 'high'"),
        ("model", {"hidden_act": "relu"}, "hidden_act: 'relu' is not implemented"),
        ("model", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ("model", {"type_vocab_size": 0}, "type_vocab_size: 0"),
    ],
)
def test_what_is_not_computed_is_refused(
    root: Path, folder: str, change: dict[str, Any], problem: str
) -> None:
    config = json.loads((root / folder / "config.json").read_text())
    with pytest.raises(EngineError, match=problem):
        read_hf_config({**config, **change})
