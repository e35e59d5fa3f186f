"""BERT as a folder and as GGUF: rows and scores of `transformers`, WordPiece, the engine's vectors, refusals."""

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine import LLM
from quengine import convert as convert_folder
from quengine.errors import EngineError
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.reference import ReferenceBackend
from quengine.models.checkpoint import open_checkpoint
from quengine.models.config import ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.encoder import Encoder
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.each_case import each_case
from tests.gguf_builder import ModelSizes, model_builder
from tests.llama_cpp_convert import Conversion, convert
from tests.llama_cpp_embeddings import llama_cpp_embedding
from tests.models.convert.equal_files import check_equal
from tests.transformers_models import nmse

WORDS = [*"abcdefghijklmnopqrstuvwxyz", ".", ",", "!", "the", "cat", "sat", "on", "mat", "\u4e2d", "\u00e9"]
PIECES = [*(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"), "##ing", "##at", "##s"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *WORDS, *PIECES]
TEXTS = ["the cat sat on the mat.", "Caf\u00e9, matting!", "\u4e2d\u4e2d THE zzz", "q\u0000uick 123"]
SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.12,
    "pad_token_id": 0,
}
KINDS = ("folder", "gguf")


def write_bert(folder: Path, headed: bool, cased: bool = False, pooling: str | None = None) -> Path:
    """A random model with its tokenizer, as `transformers` saves them; with a head of one output."""
    import transformers

    torch.manual_seed(1)
    labels = {"num_labels": 1} if headed else {}
    config = transformers.BertConfig(**SIZES, **labels)
    kind = transformers.BertForSequenceClassification if headed else transformers.BertModel
    model = kind(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "LayerNorm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    transformers.BertTokenizer(vocab=ids, do_lower_case=not cased).save_pretrained(folder)
    if pooling is not None:
        write_pooling(folder, pooling)
    return folder


def write_pooling(folder: Path, pooling: str) -> None:
    """What is made of a text's rows, as sentence-transformers saves it."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("bert")
    write_bert(root / "plain", headed=False, pooling="cls_token")
    write_bert(root / "headed", headed=True)
    write_bert(root / "cased", headed=False, cased=True)
    convert([Conversion(root / name, root / f"{name}.gguf", "jina-v2-en") for name in ("plain", "cased")])
    return root


def path_of(root: Path, name: str, kind: str) -> Path:
    return root / (name if kind == "folder" else f"{name}.gguf")


@lru_cache(maxsize=2)
def _of_transformers(folder: Path) -> tuple[Any, Any, bool]:
    """Its tokenizer, its model in float64, and whether that has a head."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    headed = "Classification" in (folder / "config.json").read_text()
    kind = transformers.AutoModelForSequenceClassification if headed else transformers.AutoModel
    model = kind.from_pretrained(folder, dtype=torch.float64, output_hidden_states=True).eval()
    return tokenizer, model, headed


def theirs(folder: Path, text: str, pair: str | None = None) -> tuple[list[int], Tensor, Tensor | None]:
    """Ids, rows [T, width] and the head's outputs of `transformers`, in float64."""
    tokenizer, model, headed = _of_transformers(folder)
    given = tokenizer(text, pair, return_tensors="pt")
    with torch.no_grad():
        out = model(**given)
    return given["input_ids"][0].tolist(), out.hidden_states[-1][0], out.logits[0] if headed else None


def rows(
    path: Path,
    texts: list[list[int]],
    backend: Any,
    separator: int | None = None,
    config: ModelConfig | None = None,
) -> list[Tensor]:
    """Hidden rows of texts that are computed in one step; `config`: in place of the file's."""
    checkpoint = open_checkpoint(path)
    encoder = Encoder(config or checkpoint.config, checkpoint.tensors, backend, 64, separator)
    tables = [[[0]]] * len(texts)
    with torch.no_grad():
        found = encoder.hidden(prefill_batch(texts, [0] * len(texts), tables, backend.device))
    return list(found.cpu().double().split([len(text) for text in texts]))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_transformers(root: Path, kind: str) -> None:
    expected = [theirs(root / "plain", text) for text in TEXTS]
    found = rows(path_of(root, "plain", kind), [ids for ids, _, _ in expected], ReferenceBackend(keep=True))
    assert max(nmse(ours, wanted) for ours, (_, wanted, _) in zip(found, expected, strict=True)) < 1e-9
    on_cpu = rows(path_of(root, "plain", kind), [ids for ids, _, _ in expected], CpuBackend(1))
    assert max(map(nmse, on_cpu, found)) < 5e-5


def test_converted_files_are_llama_cpps(root: Path, tmp_path: Path) -> None:
    for name in ("plain", "cased"):
        convert_folder(root / name, tmp_path / "ours.gguf", "f32", threads=1)
        check_equal(tmp_path / "ours.gguf", root / f"{name}.gguf")


DAMAGES: list[tuple[str, tuple[str, ...], Any, str]] = [
    ("tokenizer.json", ("model", "vocab"), "x", "tokenizer.json: "),
    ("tokenizer.json", ("model", "vocab", "the"), "x", "tokenizer.json: "),
    ("tokenizer.json", ("added_tokens",), -1, "added_tokens is no array"),
    ("tokenizer.json", ("normalizer", "lowercase"), "x", "tokenizer.json: "),
    ("config.json", ("bos_token_id",), -1, "invalid value for special token type bos: -1"),
    ("config.json", ("architectures",), 5, "architectures: 5 is no array"),
]


@each_case(("file", "path", "value", "problem"), DAMAGES)
def test_damaged_folders_are_not_converted(
    root: Path,
    tmp_path_factory: pytest.TempPathFactory,
    file: str,
    path: tuple[str, ...],
    value: Any,
    problem: str,
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "folder"
    shutil.copytree(root / "plain", folder)
    parts = place = json.loads((folder / file).read_text())
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (folder / file).write_text(json.dumps(parts))
    with pytest.raises(EngineError, match=problem):
        convert_folder(folder, folder.parent / "out.gguf", threads=1)
    assert [each.name for each in folder.parent.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", ["plain", "cased"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(root: Path, name: str, kind: str) -> None:
    tokenizer = open_checkpoint(path_of(root, name, kind)).tokenizer()
    assert tokenizer.add_bos and tokenizer.end_of_text == 3
    for text in TEXTS:
        assert [*tokenizer.encode(text, bos=True), 3] == theirs(root / name, text)[0], text


def test_a_control_token_in_a_text_is_text(root: Path) -> None:
    tokenizer = open_checkpoint(path_of(root, "plain", "gguf")).tokenizer()
    assert 3 not in tokenizer.encode("the [SEP] cat")
    assert tokenizer.encode("the [SEP] cat", special=True)[1] == 3
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_makes_the_vectors(root: Path, kind: str) -> None:
    expected = [theirs(root / "plain", text)[1] for text in TEXTS]
    with LLM(path_of(root, "plain", kind), device="cpu", threads=1, parallel=2, chunk_size=4) as llm:
        assert llm.model_config.pooling == "cls"
        own, mean, last = (torch.tensor(llm.embed(TEXTS, pooling)) for pooling in (None, "mean", "last"))
        every = [torch.tensor(each).view(-1, 64) for each in llm.embed(TEXTS, "none")]
    for found, wanted in (
        (own, [x[0] for x in expected]),
        (mean, [x.mean(0) for x in expected]),
        (last, [x[-1] for x in expected]),
    ):
        unit = torch.nn.functional.normalize(torch.stack(wanted), dim=1)
        assert nmse(found.double(), unit) < 5e-5
    assert max(map(nmse, [each.double() for each in every], expected)) < 5e-5


def test_the_vectors_are_llama_cpps(root: Path) -> None:
    path = path_of(root, "plain", "gguf")
    with LLM(path, device="cpu", threads=1) as llm:
        ours = torch.tensor(llm.embed(TEXTS[:2]))
        prompts = [[*llm.encode(text), 3] for text in TEXTS[:2]]
    for vector, ids in zip(ours, prompts, strict=True):
        theirs = torch.from_numpy(llama_cpp_embedding(path, ids, 64))
        unit = torch.nn.functional.normalize(theirs.double(), dim=0)
        assert nmse(vector.double()[None], unit[None]) < 1e-4


def test_pairs_are_ranked_by_the_head(root: Path) -> None:
    """Segments of a pair differ in kind, as `transformers` numbers them."""
    query, documents = "the cat", ["sat on the mat", "caf\u00e9"]
    expected = [theirs(root / "headed", query, document)[2] for document in documents]
    with LLM(root / "headed", device="cpu", threads=1) as llm:
        found = llm.rank(query, documents)
        with pytest.raises(EngineError, match="to score pairs of texts"):
            llm.embed("the cat")
        assert len(llm.embed("the cat", "mean")[0]) == 64
    assert torch.allclose(torch.tensor(found).double(), torch.cat(expected), rtol=1e-2, atol=1e-3)


def test_it_generates_nothing_and_says_so(root: Path) -> None:
    with LLM(path_of(root, "plain", "gguf"), device="cpu", threads=1) as llm:
        for call in (llm.generate, llm.stream, lambda _: llm.logits([2, 3])):
            with pytest.raises(EngineError, match="a bert model makes embeddings, and generates no text"):
                call("the cat")
        with pytest.raises(EngineError, match="this bert has no trained head"):
            llm.rank("the", ["cat"])
        longest = ["a " * 62, "a " * 63]
        assert len(llm.embed(longest[0])[0]) == 64  # with the special tokens, the whole context
        with pytest.raises(EngineError, match="the prompt has 65 tokens and the context holds 64; shorten"):
            llm.embed(longest[1])
    checkpoint = open_checkpoint(path_of(root, "plain", "gguf"))
    with pytest.raises(EngineError, match="is an encoder: it computes no logits"):
        Decoder(checkpoint.config, checkpoint.tensors, ReferenceBackend(keep=False), 64, 64)


def test_a_text_of_two_steps_is_refused(root: Path) -> None:
    checkpoint, backend = open_checkpoint(path_of(root, "plain", "gguf")), ReferenceBackend(keep=False)
    encoder = Encoder(checkpoint.config, checkpoint.tensors, backend, 64)
    with pytest.raises(EngineError, match="computed in one step"):
        encoder.hidden(prefill_batch([[2, 3]], [1], [[[0]]], backend.device))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act: 'gelu_new' is not implemented, only gelu is"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key'"),
        ({"is_decoder": True}, "is_decoder: True is not implemented"),
        ({"type_vocab_size": 0}, "type_vocab_size: 0 is not a number from 1"),
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
        ({"bert.attention.causal": True}, "missing, or true"),
        ({"bert.attention.causal": None}, "missing from the metadata|missing, or true"),
        ({"bert.attention.max_alibi_bias": 8.0}, "8.0: the decoder does not implement this"),
        ({"bert.attention.head_count_kv": 2}, "other than attention.head_count"),
    ],
)
def test_what_is_not_computed_in_a_file_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    path = model_builder(ModelSizes("bert"), changes=change).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match=problem):
        read_gguf_config(file)
