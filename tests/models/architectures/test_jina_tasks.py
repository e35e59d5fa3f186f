"""Adapters for the tasks of Jina Embeddings v3, as llama.cpp's converter writes them: changed weights in `transformers`
give the same rows, llama.cpp with the adapter the same vectors; files that are refused; the server's field."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quengine import LLM
from quengine import convert as convert_folder
from quengine.errors import EngineError
from quengine.models.checkpoint import open_checkpoint
from quengine.models.gguf import GGUFError, open_gguf
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve.serving import serving
from tests.gguf_builder import GGUFBuilder
from tests.llama_cpp_convert import Conversion, convert
from tests.llama_cpp_embeddings import llama_cpp_embedding
from tests.models.architectures.test_bert import theirs, write_pooling
from tests.models.architectures.test_xlm_roberta import SIZES, write_xlm_roberta
from tests.models.convert.equal_files import check_equal
from tests.transformers_models import edit, nmse

TASKS = {"retrieval.query": "the query: ", "text-matching": ""}
"""Task -> what its texts begin with. The adapter of the second changes no kinds of segments, as llama.cpp's do not."""
ALPHA, RANK = 3.0, 4
TEXTS = ["the cat sat on the mat.", "caf\u00e9"]
MATRICES = ("Wqkv.weight", "out_proj.weight", "fc1.weight", "fc2.weight", "embeddings.weight")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.gguf with its adapters in `files`, and for each task a folder of the changed weights."""
    import transformers

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("tasks")
    tokenizer = write_xlm_roberta(root / "tokenizer")
    torch.manual_seed(1)
    model = transformers.JinaEmbeddingsV3Model(transformers.JinaEmbeddingsV3Config(**SIZES))
    for name in ("released", *TASKS):
        model.save_pretrained(root / name)
        write_pooling(root / name, "mean_tokens")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / file, root / name)
    _write_changes(root)
    edit(
        root / "released", architectures=["XLMRobertaModel"], model_type="xlm-roberta", lora_adaptations=[*TASKS],
        lora_alpha=ALPHA, task_instructions=TASKS, position_embedding_type="rotary", rotary_emb_base=20000.0,
    )  # fmt: skip
    (root / "files").mkdir()
    convert([Conversion(root / "released", root / "files" / "model.gguf", "default")])
    return root


def _write_changes(root: Path) -> None:
    """The released folder's tensors with adapters, in the names of the model's own code, and each task's sums."""
    released = root / "released" / "model.safetensors"
    weights, stored = load_file(released), dict[str, torch.Tensor]()
    changed = {task: dict(weights) for task in TASKS}
    for name, weight in weights.items():
        if not name.endswith(MATRICES):
            stored[name] = weight
            continue
        rows, columns = weight.shape
        embeds = "embeddings." in name
        a = 0.3 * torch.randn(len(TASKS), *((rows, RANK) if embeds else (RANK, columns)))
        b = 0.3 * torch.randn(len(TASKS), *((RANK, columns) if embeds else (rows, RANK)))
        if "token_type" in name:
            a[1] = 0.0
        place = f"{name.removesuffix('weight')}parametrizations.weight"
        stored |= {f"{place}.original": weight, f"{place}.0.lora_A": a, f"{place}.0.lora_B": b}
        for number, task in enumerate(TASKS):
            product = a[number] @ b[number] if embeds else b[number] @ a[number]
            changed[task][name] = weight + ALPHA / RANK * product
    save_file(stored, released, {"format": "pt"})
    for task, tensors in changed.items():
        save_file(tensors, root / task / "model.safetensors", {"format": "pt"})


def unit_mean(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows.double().mean(0), dim=0)


@pytest.mark.parametrize(
    ("model", "backend"),
    [("files/model.gguf", "auto"), ("files/model.gguf", "reference"), ("released", "auto")],
)
def test_vectors_are_those_of_the_changed_weights(root: Path, model: str, backend: str) -> None:
    with LLM(root / model, device="cpu", threads=1, backend=backend) as llm:
        found = {task: llm.embed(TEXTS, task=task) for task in TASKS}
        plain, again = llm.embed(TEXTS), llm.embed(TEXTS, task=next(iter(TASKS)))
    for task, prefix in TASKS.items():
        expected = torch.stack([unit_mean(theirs(root / task, prefix + text)[1]) for text in TEXTS])
        assert nmse(torch.tensor(found[task]).double(), expected) < 1e-6
        assert nmse(torch.tensor(plain).double(), expected) > 1e-2
    assert again == found[next(iter(TASKS))]


def test_vectors_are_llama_cpps(root: Path) -> None:
    path, task = root / "files" / "model.gguf", "text-matching"
    with LLM(path, device="cpu", threads=1) as llm:
        ours = torch.tensor(llm.embed(TEXTS[:1], task=task)).double()
        ids = [*llm.encode(TEXTS[0]), llm.tokenizer.end_of_text]
    found = llama_cpp_embedding(path, ids, 64, path.with_name(f"lora-{task}-model.gguf"))
    unit = torch.nn.functional.normalize(torch.from_numpy(found).double(), dim=0)
    assert nmse(ours, unit[None]) < 1e-4


def test_converted_files_are_llama_cpps(root: Path, tmp_path: Path) -> None:
    convert_folder(root / "released", tmp_path / "model.gguf", "f32", threads=1)
    assert len(list(tmp_path.iterdir())) == 1 + len(TASKS)
    for path in tmp_path.iterdir():
        check_equal(path, root / "files" / path.name)


def test_a_task_without_an_adapter_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    path = root / "files" / "model.gguf"
    with (
        LLM(path, device="cpu", threads=1) as llm,
        pytest.raises(
            EngineError, match=r"task separation: .* no adapter for it; it has retrieval.query, text-m"
        ),
    ):
        llm.embed("the", task="separation")
    alone = shutil.copy(path, tmp_path / "model.gguf")
    with (
        LLM(alone, device="cpu", threads=1) as llm,
        pytest.raises(EngineError, match="task text-matching: this model has no adapter for it; it has none"),
    ):
        llm.embed("the", task="text-matching")


@pytest.mark.parametrize(
    ("tensors", "keys", "problem"),
    [
        ({"blk.0.ffn_up.weight.lora_a": (4, 64)}, {}, "no half of a change"),
        ({"blk.9.ffn_up.weight.lora_a": (4, 64), "blk.9.ffn_up.weight.lora_b": (96, 4)}, {}, "no half of a change"),
        ({"blk.0.ffn_up.weight.lora_a": (4, 32), "blk.0.ffn_up.weight.lora_b": (96, 4)}, {}, r"shape \[4, 32\]"),
        ({"blk.0.ffn_up.weight.lora_a": (4, 64), "blk.0.ffn_up.weight.lora_b": (96,)}, {}, r"shape \[96\]"),
        ({"blk.0.ffn_up.weight.lora_a": (4, 64), "blk.0.ffn_up.weight.lora_b": (96, 5)}, {}, "rank 5, and the other"),
        ({"token_embd.weight.lora_a": (4, 64), "token_embd.weight.lora_b": (3000, 4)}, {}, r"shape \[4, 64\]"),
        (
            {"token_embd_norm.weight.lora_a": (4, 64), "token_embd_norm.weight.lora_b": (64, 4)}, {},
            "of this tensor is not implemented",
        ),
        ({}, {"adapter.type": "control"}, "control, not lora"),
        ({}, {"adapter.lora.task_name": "retrieval.query"}, "is of the same task"),
    ],
)  # fmt: skip
def test_adapters_that_are_not_computed_are_refused(
    root: Path, tmp_path: Path, tensors: dict[str, tuple[int, ...]], keys: dict[str, Any], problem: str
) -> None:
    path = shutil.copy(root / "files" / "model.gguf", tmp_path / "model.gguf")
    shutil.copy(root / "files" / "lora-retrieval.query-model.gguf", tmp_path)
    builder = GGUFBuilder()
    own = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.task_name": "own"}
    for key, value in {"general.architecture": "jina-bert-v3", **own, **keys}.items():
        builder.kv(key, value)
    for name, shape in tensors.items():
        builder.tensor(name, shape, "F32", np.zeros(shape, np.float32))
    builder.write(tmp_path / "lora-xown.gguf")
    with pytest.raises(GGUFError, match=problem):
        open_checkpoint(Path(path))


@pytest.mark.parametrize(
    ("change", "keys", "problem"),
    [
        (
            {"mlp.fc1.parametrizations.weight.0.lora_B": None},
            {},
            "fc1.parametrizations.weight.0.lora_B' is missing",
        ),
        (
            {"mlp.fc1.parametrizations.weight.0.lora_A": None},
            {},
            "fc1.parametrizations.weight.0.lora_A' is missing, and ",
        ),
        ({"mlp.fc1.parametrizations.weight.0.lora_A": (2, 4, 32)}, {}, r"shape \[2, 4, 32\]"),
        (
            {"norm1.parametrizations.weight.0.lora_A": (2, 4, 32)},
            {},
            "tensors that this decoder does not apply",
        ),
        ({}, {"lora_adaptations": ["a", "b", "c"]}, r"shape \[2, .* needs \[3, "),
        ({}, {"lora_adaptations": None}, "tensors that this decoder does not apply"),
        ({}, {"lora_adaptations": ["a", "a"]}, "has a name twice"),
        ({}, {"lora_adaptations": "a"}, "is not a list of names"),
        ({}, {"lora_alpha": 0.0}, "lora_alpha: 0 is not positive"),
        ({}, {"task_instructions": {"a": 1}}, "task_instructions"),
        ({}, {"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key'"),
    ],
)
def test_a_folder_whose_adapters_are_not_computed_is_refused(
    root: Path, tmp_path: Path, change: dict[str, tuple[int, ...] | None], keys: dict[str, Any], problem: str
) -> None:
    folder = Path(shutil.copytree(root / "released", tmp_path / "released"))
    tensors = load_file(folder / "model.safetensors")
    for name, shape in change.items():
        whole = f"encoder.layers.0.{name}"
        assert shape is not None or whole in tensors
        tensors.pop(whole, None)
        if shape is not None:
            tensors[whole] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, **keys)
    with pytest.raises(EngineError, match=problem):
        open_checkpoint(folder)


def test_an_adapter_of_another_model_is_passed_over(root: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(root / "files" / "model.gguf", tmp_path / "model.gguf"))
    GGUFBuilder().kv("general.architecture", "llama").write(tmp_path / "lora-llama.gguf")
    sizes = open_checkpoint(path).config.encoder
    assert sizes is not None and sizes.tasks == ()
    with open_gguf(root / "files" / "lora-text-matching-model.gguf") as file:
        assert len(file.tensors) == 2 * (2 * 4 + 2)


def test_the_server_embeds_for_a_task(root: Path) -> None:
    def make_engine() -> LLMEngine:
        return LLMEngine(LLM(root / "files" / "model.gguf", device="cpu", threads=1))

    with serving(make_engine, settings={"model_names": ("jina",)}) as served, served.http() as client:
        answer = client.post("/v1/embeddings", json={"input": TEXTS, "task": "retrieval.query"})
        one = client.post("/v1/embeddings", json={"input": TEXTS[0], "task": "retrieval.query"})
        refused = client.post("/v1/embeddings", json={"input": TEXTS, "task": "classification"})
    prefix = TASKS["retrieval.query"]
    expected = [unit_mean(theirs(root / "retrieval.query", prefix + text)[1]).tolist() for text in TEXTS]
    assert answer.status_code == 200, answer.text
    assert [each["embedding"] for each in answer.json()["data"]] == [
        pytest.approx(each, abs=2e-3) for each in expected
    ]
    assert one.json()["data"][0]["embedding"] == pytest.approx(
        answer.json()["data"][0]["embedding"], abs=1e-6
    )
    assert refused.status_code == 400 and "no adapter for it; it has retrieval.query" in refused.text
