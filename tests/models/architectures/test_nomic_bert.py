"""Nomic's BERT as folders, as `transformers` saves them and as they were released, and as GGUF: rows and vectors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM
from quengine import convert as convert_folder
from quengine.errors import EngineError
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.reference import ReferenceBackend
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.llama_cpp_convert import Conversion, convert
from tests.llama_cpp_embeddings import llama_cpp_embedding
from tests.models.architectures.test_bert import TEXTS, VOCABULARY, path_of, rows, theirs
from tests.models.convert.equal_files import check_equal
from tests.transformers_models import nmse

SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.12,
    "pad_token_id": 0,
}
RELEASED = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "vocab_size": len(VOCABULARY),
    "type_vocab_size": 2,
    "n_embd": 64,
    "n_inner": 96,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 8192,
    "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu",
    "causal": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
}
"""The keys of nomic-embed-text-v1.5's config.json."""

FILES = [("plain", "folder"), ("released", "folder"), ("released", "gguf")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("nomic")
    torch.manual_seed(1)
    model = transformers.NomicBertModel(transformers.NomicBertConfig(**SIZES))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name.lower():
                weight.add_(torch.randn_like(weight) * 0.2)
    folder = root / "plain"
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    transformers.BertTokenizer(vocab=ids).save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    shutil.copytree(folder, root / "released")
    (root / "released" / "config.json").write_text(json.dumps(RELEASED))
    # The converter takes sizes from the one kind of keys, and the rest from the other.
    shutil.copytree(folder, root / "both")
    keys = json.loads((folder / "config.json").read_text())
    (root / "both" / "config.json").write_text(json.dumps({**keys, **RELEASED}))
    convert([Conversion(root / "both", root / "released.gguf", "jina-v2-en")])
    return root


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_rows_are_those_of_transformers(root: Path, name: str, kind: str) -> None:
    expected = [theirs(root / "plain", text) for text in TEXTS]
    ids = [each for each, _, _ in expected]
    found = rows(path_of(root, name, kind), ids, ReferenceBackend(keep=True))
    assert max(nmse(ours, wanted) for ours, (_, wanted, _) in zip(found, expected, strict=True)) < 1e-9
    on_cpu = rows(path_of(root, name, kind), ids, CpuBackend(1))
    assert max(map(nmse, on_cpu, found)) < 5e-5


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_the_engine_makes_the_vectors(root: Path, name: str, kind: str) -> None:
    expected = torch.stack([theirs(root / "plain", text)[1].mean(0) for text in TEXTS])
    with LLM(path_of(root, name, kind), device="cpu", threads=1, parallel=2) as llm:
        assert llm.model_config.pooling == "mean" and llm.model_config.context_length == 2048
        found = torch.tensor(llm.embed(TEXTS))
    assert nmse(found.double(), torch.nn.functional.normalize(expected, dim=1)) < 5e-5


def test_the_converted_file_is_llama_cpps(root: Path, tmp_path: Path) -> None:
    convert_folder(root / "both", tmp_path / "ours.gguf", "f32", threads=1)
    check_equal(tmp_path / "ours.gguf", root / "released.gguf")


def test_the_vectors_are_llama_cpps(root: Path) -> None:
    path = path_of(root, "released", "gguf")
    with LLM(path, device="cpu", threads=1) as llm:
        ours = torch.tensor(llm.embed(TEXTS[:1]))
        ids = [*llm.encode(TEXTS[0]), 3]
    unit = torch.nn.functional.normalize(torch.from_numpy(llama_cpp_embedding(path, ids, 64)).double(), dim=0)
    assert nmse(ours.double(), unit[None]) < 1e-4


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prenorm": True}, "prenorm: True is not implemented"),
        ({"moe_every_n_layers": 2}, "moe_every_n_layers: 2 is not implemented"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved: True"),
        ({"rotary_scaling_factor": 2.0}, "rotary_scaling_factor: 2.0"),
        ({"qkv_proj_bias": True}, "qkv_proj_bias: True"),
        ({"activation_function": "geglu"}, "activation_function: 'geglu'"),
        ({"n_positions": 0}, "n_positions: 0 is not from 1"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not implemented, only silu is"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "rotary_emb_base": None},
            "rotary_emb_base|dynamic",
        ),
    ],
)
def test_what_is_not_computed_in_a_folder_is_refused(change: dict[str, Any], problem: str) -> None:
    keys = {key: value for key, value in {**RELEASED, **change}.items() if key != "rotary_emb_base" or value}
    with pytest.raises(EngineError, match=problem):
        read_hf_config(keys)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"nomic-bert.attention.causal": True}, "missing, or true"),
        ({"nomic-bert.attention.head_count_kv": 2}, "other than attention.head_count"),
    ],
)
def test_what_is_not_computed_in_a_file_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    path = model_builder(ModelSizes("nomic-bert"), changes=change).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match=problem):
        read_gguf_config(file)
