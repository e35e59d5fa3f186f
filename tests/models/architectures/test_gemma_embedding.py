"""EmbeddingGemma as a folder and as GGUF: rows of `transformers`, matrices for the pooled vector, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine import LLM
from quengine import convert as convert_folder
from quengine.errors import EngineError
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.reference import ReferenceBackend
from quengine.models.checkpoint import open_checkpoint
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.llama_cpp_convert import Conversion, convert, write_tokenizer
from tests.llama_cpp_embeddings import llama_cpp_embedding
from tests.models.architectures.test_bert import path_of, rows, theirs, write_pooling
from tests.models.convert.equal_files import check_equal
from tests.transformers_models import nmse

TEXTS = ["the cat sat on the mat, and that is that", "Caf\u00e9, matting! " * 3, "that", " \u4e2d\u0000  x\n"]
SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 256,
    "sliding_window": 6,
    "use_bidirectional_attention": True,
    "initializer_range": 0.12,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense": {"sliding_window": 5},
    "kinds": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 9,
    },
}
FOLDERS_ALONE = {"kinds"}
"""llama.cpp's converter writes neither kinds of layers nor the scale of scores."""

DENSE = ((64, 96), (96, 64))


def write_gemma(folder: Path, dense: bool, **changes: Any) -> Path:
    """A random model, as `transformers` and sentence-transformers save it."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    torch.manual_seed(1)
    model = transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    engine = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [(name, engine.token_to_id(name)) for name in ("<s>", "</s>")]
    engine.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    engine.save(str(folder / "tokenizer.json"))
    write_pooling(folder, "mean_tokens")
    if dense:
        write_dense(folder)
    return folder


def write_dense(folder: Path, **changes: Any) -> None:
    from safetensors.torch import save_file

    modules = json.loads((folder / "modules.json").read_text())
    for number, (columns, out) in enumerate(DENSE, 2):
        place = folder / f"{number}_Dense"
        place.mkdir()
        keys = {"in_features": columns, "out_features": out, "bias": False}
        keys["activation_function"] = "torch.nn.modules.linear.Identity"
        (place / "config.json").write_text(json.dumps({**keys, **changes}))
        save_file({"linear.weight": torch.randn(out, columns)}, place / "model.safetensors")
        modules.append({"type": "sentence_transformers.models.Dense", "path": place.name})
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("gemma")
    for name, changes in MODELS.items():
        write_gemma(root / name, dense=name == "dense", **changes)
    names = [name for name in MODELS if name not in FOLDERS_ALONE]
    convert(
        [Conversion(root / name, root / f"{name}.gguf", "gpt-2", dense=name == "dense") for name in names]
    )
    return root


CASES = [(name, kind) for name in MODELS for kind in ("folder", "gguf") if (name, kind) != ("kinds", "gguf")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rows_are_those_of_transformers(root: Path, name: str, kind: str) -> None:
    expected = [theirs(root / name, text) for text in TEXTS]
    ids = [each for each, _, _ in expected]
    found = rows(path_of(root, name, kind), ids, ReferenceBackend(keep=True))
    assert max(nmse(ours, wanted) for ours, (_, wanted, _) in zip(found, expected, strict=True)) < 1e-9
    on_cpu = rows(path_of(root, name, kind), ids, CpuBackend(1))
    assert max(map(nmse, on_cpu, found)) < 5e-5


def test_converted_files_are_llama_cpps(root: Path, tmp_path: Path) -> None:
    for name in ("plain", "dense"):
        convert_folder(root / name, tmp_path / "ours.gguf", "f32", threads=1)
        check_equal(tmp_path / "ours.gguf", root / f"{name}.gguf")


def test_a_window_hides_what_is_far_on_either_side(root: Path) -> None:
    config = open_checkpoint(root / "plain").config
    assert config.full_attention_layers == (5,) and config.sliding_window == 6
    ids = theirs(root / "plain", TEXTS[0])[0]
    found, other = (
        rows(root / "plain", [ids], ReferenceBackend(keep=True), config=each)[0]
        for each in (config, replace(config, sliding_window=512))
    )
    assert nmse(other, found) > 1e-4


def projected(folder: Path, vector: Tensor) -> Tensor:
    """The modules' matrices times a pooled vector, of length 1."""
    from safetensors.torch import load_file

    for number in (2, 3):
        vector = load_file(folder / f"{number}_Dense/model.safetensors")["linear.weight"].double() @ vector
    return torch.nn.functional.normalize(vector, dim=0)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_pooled_vector_is_projected(root: Path, kind: str) -> None:
    folder = root / "dense"
    hidden = [theirs(folder, text)[1] for text in TEXTS]
    with LLM(path_of(root, "dense", kind), device="cpu", threads=1, parallel=2, chunk_size=4) as llm:
        assert llm.model_config.pooling == "mean"
        own, first = (torch.tensor(llm.embed(TEXTS, pooling)).double() for pooling in (None, "cls"))
        every = [torch.tensor(each).view(-1, 64).double() for each in llm.embed(TEXTS, "none")]
        with pytest.raises(EngineError, match="a gemma-embedding model makes embeddings, and generates no"):
            llm.generate("the cat")
    assert nmse(own, torch.stack([projected(folder, each.mean(0)) for each in hidden])) < 5e-5
    assert nmse(first, torch.stack([projected(folder, each[0]) for each in hidden])) < 5e-5
    assert max(map(nmse, every, hidden)) < 5e-5


@pytest.mark.parametrize("name", ["plain", "dense"])
def test_the_vectors_are_llama_cpps(root: Path, name: str) -> None:
    path = root / f"{name}.gguf"
    with LLM(path, device="cpu", threads=1) as llm:
        ours = torch.tensor(llm.embed(TEXTS[:1])).double()
        ids = [*llm.encode(TEXTS[0]), llm.tokenizer.end_of_text]
    unit = torch.nn.functional.normalize(torch.from_numpy(llama_cpp_embedding(path, ids, 64)).double(), dim=0)
    assert nmse(ours, unit[None]) < 1e-4


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sliding_window": None}, "sliding_window: missing"),
        ({"sliding_window": 0}, "sliding_window: 0 is not positive"),
        ({"attn_logit_softcapping": 5.0}, "attn_logit_softcapping: 5.0 is not implemented"),
        ({"attention_bias": True}, "attention_bias: biases on the output"),
        ({"hidden_activation": "gelu"}, "hidden_act: 'gelu' is not implemented"),
        ({"layer_types": ["full_attention"]}, "is not a list of the kinds of 7 layers"),
    ],
)
def test_what_is_not_computed_in_a_folder_is_refused(
    root: Path, change: dict[str, Any], problem: str
) -> None:
    config = json.loads((root / "plain" / "config.json").read_text())
    with pytest.raises(EngineError, match=problem):
        read_hf_config({**config, **change})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"activation_function": "torch.nn.modules.activation.Tanh"}, "activation.Tanh' is not implemented"),
        ({"bias": True}, "bias: a bias is not implemented"),
        ({"out_features": 48}, "of 64: 96 columns after 48 are not implemented"),
        ({"in_features": "64"}, "are not numbers from 1"),
    ],
)
def test_modules_that_are_not_computed_are_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    folder = tmp_path / "model"
    write_gemma(folder, dense=False)
    write_dense(folder, **change)
    if change == {"out_features": 48}:  # of the first alone
        keys = {"in_features": 96, "out_features": 64, "bias": False}
        (folder / "3_Dense" / "config.json").write_text(json.dumps(keys))
    with pytest.raises(EngineError, match=problem):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("pooling", "problem"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not implemented"),
        ({"pooling_mode": "weightedmean"}, "pooling_mode: 'weightedmean' is not implemented"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "is not implemented"),
    ],
)
def test_a_pooling_that_is_not_computed_is_refused(
    tmp_path: Path, pooling: dict[str, Any], problem: str
) -> None:
    folder = write_gemma(tmp_path / "model", dense=False)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(EngineError, match=problem):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"attention.causal": True}, "true: positions see each other"),
        ({"attention.sliding_window": None}, "missing: layers of this model have one"),
        ({"attention.sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"attn_logit_softcapping": 2.0}, "2.0: the decoder does not implement this"),
    ],
)
def test_what_is_not_computed_in_a_file_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    changes = {f"gemma-embedding.{key}": value for key, value in change.items()}
    path = model_builder(ModelSizes("gemma-embedding"), changes=changes).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match=problem):
        read_gguf_config(file)
