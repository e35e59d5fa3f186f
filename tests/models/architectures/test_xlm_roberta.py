"""XLM-RoBERTa (BGE-M3, multilingual E5, their rerankers) as folders and GGUF: rows, scores, ids of pairs, refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quengine import LLM
from quengine import convert as convert_folder
from quengine.errors import EngineError
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.reference import ReferenceBackend
from quengine.models.gguf import open_gguf
from quengine.models.hf.config_hf import read_hf_config
from tests.llama_cpp_convert import Conversion, convert
from tests.llama_cpp_embeddings import llama_cpp_embedding
from tests.llama_cpp_source import llama_cpp_source
from tests.models.architectures.test_bert import path_of, rows, theirs, write_pooling
from tests.models.convert.equal_files import check_equal
from tests.transformers_models import nmse

TOKENS = 3000
TEXTS = ["the cat sat on the mat.", "Caf\u00e9, \uff2datting! ", "\u4e2d\u56fd  THE zzz", "que\u0000 123"]
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "initializer_range": 0.12,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"pad_token_id": 63, "type_vocab_size": 2, "max_position_embeddings": 128},
    "headed": {"num_labels": 1},
}


def write_xlm_roberta(folder: Path, **changes: Any) -> Path:
    """A random model with the beginning of the real vocabulary, as `transformers` saves them."""
    import transformers

    torch.manual_seed(1)
    kind = "ForSequenceClassification" if "num_labels" in changes else "Model"
    config = transformers.XLMRobertaConfig(**{**SIZES, **changes})
    model = getattr(transformers, f"XLMRoberta{kind}")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "LayerNorm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    with open_gguf(llama_cpp_source() / "models" / "ggml-vocab-nomic-bert-moe.gguf") as file:
        tokens = list(file.metadata["tokenizer.ggml.tokens"])[: TOKENS - 1]
        scores = file.metadata["tokenizer.ggml.scores"].tolist()[: TOKENS - 1]
        charsmap = np.array(file.metadata["tokenizer.ggml.precompiled_charsmap"]).tobytes()
    transformers.XLMRobertaTokenizer(
        vocab=[*zip(tokens, scores, strict=True), ("<mask>", 0.0)], _spm_precompiled_charsmap=charsmap
    ).save_pretrained(folder)
    if "num_labels" not in changes:
        write_pooling(folder, "cls_token")
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("xlm")
    for name, changes in MODELS.items():
        write_xlm_roberta(root / name, **changes)
    convert([Conversion(root / name, root / f"{name}.gguf", "default") for name in MODELS])
    return root


def test_converted_files_are_llama_cpps(root: Path, tmp_path: Path) -> None:
    for name in MODELS:
        convert_folder(root / name, tmp_path / "ours.gguf", "f32", threads=1)
        check_equal(tmp_path / "ours.gguf", root / f"{name}.gguf")


CASES = [(name, kind) for name in MODELS for kind in ("folder", "gguf")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rows_are_those_of_transformers(root: Path, name: str, kind: str) -> None:
    expected = [theirs(root / name, text) for text in TEXTS]
    ids = [each for each, _, _ in expected]
    found = rows(path_of(root, name, kind), ids, ReferenceBackend(keep=True))
    assert max(nmse(ours, wanted) for ours, (_, wanted, _) in zip(found, expected, strict=True)) < 1e-9
    on_cpu = rows(path_of(root, name, kind), ids, CpuBackend(1))
    assert max(map(nmse, on_cpu, found)) < 5e-5


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_pairs_are_ranked_by_the_head(root: Path, kind: str) -> None:
    query, documents = "the cat", ["sat on the mat", "caf\u00e9"]
    expected = [theirs(root / "headed", query, document) for document in documents]
    with LLM(path_of(root, "headed", kind), device="cpu", threads=1) as llm:
        assert llm.tokenizer.pair_gap == (2,) and llm.model_config.context_length == 64
        found = llm.rank(query, documents)
    assert expected[0][0].count(2) == 3
    scores = torch.cat([score for _, _, score in expected if score is not None])
    assert torch.allclose(torch.tensor(found).double(), scores, rtol=1e-2, atol=1e-3)


def test_the_vectors_are_llama_cpps(root: Path) -> None:
    path = root / "plain.gguf"
    with LLM(path, device="cpu", threads=1) as llm:
        assert llm.model_config.pooling == "cls"
        ours = torch.tensor(llm.embed(TEXTS[:1])).double()
        ids = [*llm.encode(TEXTS[0]), llm.tokenizer.end_of_text]
    unit = torch.nn.functional.normalize(torch.from_numpy(llama_cpp_embedding(path, ids, 64)).double(), dim=0)
    assert nmse(ours, unit[None]) < 1e-4


def test_roberta_has_the_same_form(root: Path, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(1)
    folder = tmp_path / "roberta"
    transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**SIZES)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "plain" / name, folder)
    ids, wanted, scores = theirs(folder, TEXTS[0])
    assert nmse(rows(folder, [ids], ReferenceBackend(keep=True))[0], wanted) < 1e-9
    assert scores is not None and len(scores) == 2
    with LLM(folder, device="cpu", threads=1) as llm, pytest.raises(EngineError, match="a head of 2 outputs"):
        llm.rank("the", ["cat"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_act": "relu"}, "hidden_act: 'relu' is not implemented, only gelu is"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key'"),
        ({"pad_token_id": 65}, "pad_token_id: 65 is not from 0 to 64"),
        ({"pad_token_id": None}, "pad_token_id: missing"),
        ({"type_vocab_size": 0}, "type_vocab_size: 0"),
        ({"is_decoder": True}, "is_decoder: True"),
    ],
)
def test_what_is_not_computed_in_a_folder_is_refused(
    root: Path, change: dict[str, Any], problem: str
) -> None:
    config = json.loads((root / "plain" / "config.json").read_text())
    with pytest.raises(EngineError, match=problem):
        read_hf_config({**config, **change})
