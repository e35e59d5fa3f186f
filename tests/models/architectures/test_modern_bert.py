"""ModernBERT as a folder and as GGUF: rows and scores of `transformers`, its tokenizer, windows, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

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
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "local_attention": 7,
    "pad_token_id": 261,
    "bos_token_id": 258,
    "cls_token_id": 258,
    "eos_token_id": 259,
    "sep_token_id": 259,
    "initializer_range": 0.12,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "period": {
        "global_attn_every_n_layers": 2,
        "local_attention": 4,
        "local_rope_theta": 500.0,
        "layer_norm_eps": 1e-5,
    },
    "kinds": {"hidden_activation": "silu", "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "headed": {"num_labels": 1, "classifier_bias": True},
    "mean": {"num_labels": 1, "classifier_pooling": "mean"},
}
FOLDERS_ALONE = {"kinds"}
"""llama.cpp's converter writes no kinds of layers but by their period."""


def write_modern_bert(folder: Path, **changes: Any) -> Path:
    """A random model with a byte-level tokenizer, as `transformers` saves them; with a head where it has labels."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    folder.mkdir()
    torch.manual_seed(1)
    config = transformers.ModernBertConfig(**{**SIZES, **changes})
    kind = "ForSequenceClassification" if "num_labels" in changes else "Model"
    model = getattr(transformers, f"ModernBert{kind}")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    if "num_labels" not in changes:
        write_pooling(folder, "cls_token")
    if "global_attn_every_n_layers" in changes:  # as released folders have it, and the converter reads it
        keys = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**keys, **changes}))
    write_tokenizer(folder)
    engine = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = {"[CLS]": "cls", "[SEP]": "sep", "[PAD]": "pad", "[MASK]": "mask", "[UNK]": "unk"}
    text = engine.to_str()
    for old, new in zip(("<s>", "</s>", "<|endoftext|>", "[gMASK]", "<|user|>"), names, strict=True):
        text = text.replace(json.dumps(old), json.dumps(new))
    engine = Tokenizer.from_str(text)
    ends = [(name, engine.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    engine.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    engine.save(str(folder / "tokenizer.json"))
    given = {f"{role}_token": name for name, role in names.items()}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **given})
    )
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("modern")
    for name, changes in MODELS.items():
        write_modern_bert(root / name, **changes)
    names = [name for name in MODELS if name not in FOLDERS_ALONE]
    convert([Conversion(root / name, root / f"{name}.gguf", "modern-bert") for name in names])
    return root


CASES = [(name, "folder") for name in MODELS] + [
    (name, "gguf") for name in MODELS if name not in FOLDERS_ALONE
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rows_are_those_of_transformers(root: Path, name: str, kind: str) -> None:
    expected = [theirs(root / name, text) for text in TEXTS]
    ids = [each for each, _, _ in expected]
    found = rows(path_of(root, name, kind), ids, ReferenceBackend(keep=True))
    assert max(nmse(ours, wanted) for ours, (_, wanted, _) in zip(found, expected, strict=True)) < 1e-9
    on_cpu = rows(path_of(root, name, kind), ids, CpuBackend(1))
    assert max(map(nmse, on_cpu, found)) < 5e-5


def test_converted_files_are_llama_cpps(root: Path, tmp_path: Path) -> None:
    for name in [name for name in MODELS if name not in FOLDERS_ALONE]:
        convert_folder(root / name, tmp_path / "ours.gguf", "f32", threads=1)
        check_equal(tmp_path / "ours.gguf", root / f"{name}.gguf", splits=False)


def test_a_window_hides_what_is_far(root: Path) -> None:
    """Otherwise the test above would hold for models without one."""
    checkpoint = open_checkpoint(root / "plain")
    assert checkpoint.config.full_attention_layers == (0, 3) and checkpoint.config.sliding_window == 7
    wide = replace(checkpoint.config, sliding_window=512)
    ids = theirs(root / "plain", TEXTS[0])[0]
    found, other = (
        rows(root / "plain", [ids], ReferenceBackend(keep=True), config=config)[0]
        for config in (checkpoint.config, wide)
    )
    assert nmse(other, found) > 1e-4


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_ids_are_those_of_transformers(root: Path, kind: str) -> None:
    tokenizer = open_checkpoint(path_of(root, "plain", kind)).tokenizer()
    assert tokenizer.add_bos and tokenizer.end_of_text == theirs(root / "plain", "a")[0][-1]
    for text in TEXTS:
        assert [*tokenizer.encode(text, bos=True), tokenizer.end_of_text] == theirs(root / "plain", text)[0]


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[0] in ("headed", "mean")])
def test_pairs_are_ranked_by_the_head(root: Path, name: str, kind: str) -> None:
    query, documents = "the cat", ["sat on the mat", "is that caf\u00e9"]
    expected = [theirs(root / name, query, document)[2] for document in documents]
    with LLM(path_of(root, name, kind), device="cpu", threads=1) as llm:
        assert llm.model_config.pooling == "rank"
        found = llm.rank(query, documents)
    assert torch.allclose(torch.tensor(found).double(), torch.cat(expected), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_engine_makes_the_vectors(root: Path, kind: str) -> None:
    expected = torch.stack([theirs(root / "plain", text)[1].mean(0) for text in TEXTS])
    with LLM(path_of(root, "plain", kind), device="cpu", threads=1, parallel=2, chunk_size=4) as llm:
        found = torch.tensor(llm.embed(TEXTS, "mean")).double()
        with pytest.raises(EngineError, match="a modern-bert model makes embeddings, and generates no text"):
            llm.generate("the cat")
    assert nmse(found, torch.nn.functional.normalize(expected, dim=1)) < 5e-5


def test_the_vectors_are_llama_cpps(root: Path) -> None:
    path = root / "period.gguf"
    with LLM(path, device="cpu", threads=1) as llm:
        ours = torch.tensor(llm.embed(TEXTS[:1])).double()
        ids = [*llm.encode(TEXTS[0]), llm.tokenizer.end_of_text]
    unit = torch.nn.functional.normalize(torch.from_numpy(llama_cpp_embedding(path, ids, 64)).double(), dim=0)
    assert nmse(ours, unit[None]) < 1e-4


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation: 'relu' is not implemented, only gelu and silu"),
        ({"norm_bias": True}, "norm_bias: True is not implemented"),
        ({"attention_bias": True}, "attention_bias: biases on the output"),
        ({"mlp_bias": True}, "mlp_bias: biases on the output"),
        ({"local_attention": 1}, "local_attention: 1 is not from 2"),
        ({"global_attn_every_n_layers": 0, "layer_types": None}, "global_attn_every_n_layers: 0 is not from"),
        ({"layer_types": ["full_attention"]}, "is not a list of the kinds of 4 layers"),
        ({"classifier_pooling": "max"}, "classifier_pooling: 'max' is not implemented"),
        ({"classifier_activation": "relu"}, "classifier_activation: 'relu' is not implemented"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
    ],
)
def test_what_is_not_computed_in_a_folder_is_refused(
    root: Path, change: dict[str, Any], problem: str
) -> None:
    config = json.loads((root / "headed" / "config.json").read_text())
    with pytest.raises(EngineError, match=problem):
        read_hf_config({**config, **change})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"attention.causal": True}, "missing, or true"),
        ({"attention.sliding_window": None}, "missing: layers of this model have one"),
        ({"attention.sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"hidden_activation": "relu"}, "'relu' is not implemented, only gelu and silu"),
        ({"classifier.pooling_type": 3}, "3 is not from 1 to 2"),
        ({"rope.scaling.type": "yarn"}, "'yarn' is not implemented"),
    ],
)
def test_what_is_not_computed_in_a_file_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    changes = {f"modern-bert.{key}": value for key, value in change.items()}
    path = model_builder(ModelSizes("modern-bert"), changes=changes).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match=problem):
        read_gguf_config(file)
