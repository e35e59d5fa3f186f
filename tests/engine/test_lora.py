"""LoRA adapters beside a model: as llama.cpp applies them, by request, in one batch, and apart in the prefix cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.kernels.cpu.lora import AdaptedCpu
from quengine.kernels.lora.low_rank import Changes
from quengine.loading.open_adapters import open_adapters
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from tests.gguf_builder import ModelSizes
from tests.llama_cpp_logits import LlamaCpp
from tests.models.adapters import random_adapters, write_adapter
from tests.tiny_models import write_tiny

STEMS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
PROMPT = [5, 17, 250, 3, 99, 42, 42, 8, 120, 77, 1] * 6
CHOICES: list[dict[int, float] | None] = [{}, {0: 1.0}, {1: 1.5}, {0: 0.5, 1: -1.0}, None]


class Files:
    def __init__(self, folder: Path, kind: str = "F32", **sizes: int) -> None:
        self.model = write_tiny(folder / "m.gguf", kind=kind, sizes=ModelSizes(context=256, **sizes))
        adapters = random_adapters(GGUFCheckpoint(self.model).tensors, STEMS, (4, 20))
        self.lora = [
            write_adapter(folder / f"{name}.gguf", "llama", adapters, number, alpha)
            for number, (name, alpha) in enumerate((("first", 2.0), ("second", 14.0)))
        ]

    def load(self, **options: Any) -> LLM:
        options = {"device": "cpu", "threads": 1, **options}
        return LLM(self.model, lora=[self.lora[0], f"{self.lora[1]}:0.5"], **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def llm(files: Files) -> Iterator[LLM]:
    with files.load(parallel=len(CHOICES), ctx_size=256) as loaded:
        yield loaded


def greedy(lora: dict[int, float] | None, tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, lora=lora)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_logits_are_llama_cpps(files: Files, backend: str) -> None:
    with files.load(backend=backend) as llm, LlamaCpp(files.model, llm.model_config.vocab_size) as other:
        plain = other.step(PROMPT[:11])
        other.clear()
        other.adapt([(files.lora[0], 1.0), (files.lora[1], 0.5)])
        wanted = other.step(PROMPT[:11])
        assert np.linalg.norm(wanted - plain) > 0.2 * np.linalg.norm(plain)
        for decode in (False, True):
            ours = llm.logits(PROMPT[:11], decode=decode).double().numpy()
            assert np.linalg.norm(ours - wanted) < 2e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_an_embedding_with_adapters_is_llama_cpps(tmp_path: Path, kind: str) -> None:
    sizes = ModelSizes(context=256, embedding=64, feed_forward=128)
    model = write_tiny(tmp_path / "m.gguf", kind=kind, sizes=sizes)
    adapters = random_adapters(GGUFCheckpoint(model).tensors, ("token_embd", "output", "attn_q"), (4,))
    path = write_adapter(tmp_path / "a.gguf", "llama", adapters, 0, 2.0)
    options = {"device": "cpu", "threads": 1, "lora": [path]}
    with LLM(model, **options) as llm, LlamaCpp(model, llm.model_config.vocab_size) as other:
        plain = other.step(PROMPT[:11])
        other.clear()
        other.adapt([(path, 1.0)])
        wanted = other.step(PROMPT[:11])
        assert np.linalg.norm(wanted - plain) > 0.2 * np.linalg.norm(plain)
        for decode in (False, True):
            ours = llm.logits(PROMPT[:11], decode=decode).double().numpy()
            most = 2e-3 if kind == "F32" else 3e-2  # its activations have 8 bits
            assert np.linalg.norm(ours - wanted) < most * np.linalg.norm(wanted)


def test_a_batch_of_different_adapters_is_each_alone(llm: LLM) -> None:
    together = llm.generate([PROMPT] * len(CHOICES), [greedy(lora) for lora in CHOICES])
    alone = [llm.generate([PROMPT], greedy(lora))[0] for lora in CHOICES]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert len({tuple(each.tokens) for each in together}) == len(CHOICES)
    assert [(each.id, each.name, each.scale) for each in llm.adapters] == [
        (0, "first", 1.0),
        (1, "second", 0.5),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_steps_of_different_adapters_on_a_gpu(tmp_path: Path) -> None:
    """Each sequence of a batch as alone, bit by bit, and near the definition."""
    sizes = {"embedding": 256, "feed_forward": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
    files = Files(tmp_path, "Q8_0", **sizes)
    with files.load(device="cuda", parallel=len(CHOICES), ctx_size=256, deterministic=True) as llm:
        together = llm.generate([PROMPT] * len(CHOICES), [greedy(lora) for lora in CHOICES])
        alone = [llm.generate([PROMPT], greedy(lora))[0] for lora in CHOICES]
        assert [each.tokens for each in together] == [each.tokens for each in alone]
    with files.load(device="cuda") as llm, files.load(backend="reference") as definition:
        for decode in (False, True):
            ours, wanted = (each.logits(PROMPT[:11], decode=decode).double() for each in (llm, definition))
            assert (ours - wanted).norm() < 2e-2 * wanted.norm()


def test_blocks_are_shared_only_under_the_same_scales(files: Files) -> None:
    """Each request finds the blocks of those with its own scales, and computes what a fresh engine does."""
    with files.load(parallel=2, ctx_size=256) as llm:
        fresh = [llm.generate([PROMPT], greedy(lora))[0] for lora in CHOICES]
        again = [llm.generate([PROMPT], greedy(lora))[0] for lora in CHOICES]
    assert not any(each.timings.cached_tokens for each in fresh)
    assert all(each.timings.cached_tokens >= 32 for each in again)
    assert [each.tokens for each in again] == [each.tokens for each in fresh]
    with LLM(files.model, device="cpu", threads=1) as plain:
        assert plain.generate([PROMPT], greedy(None))[0].tokens == fresh[0].tokens


def test_memory_is_planned_for_padded_ranks(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = list[int]()

    def noted(_backend: AdaptedCpu, changes: Changes) -> Changes:
        placed.append(changes.nbytes)
        return changes

    monkeypatch.setattr(AdaptedCpu, "placed", noted)
    with files.load() as llm:
        assert len(llm.adapters) == 2
        assert llm.loaded.nbytes == llm.loaded.checkpoint.nbytes + llm.loaded.cache.nbytes + sum(placed)
    checkpoint = GGUFCheckpoint(files.model)
    opened = open_adapters(EngineConfig(lora=tuple(map(str, files.lora))), checkpoint)
    assert opened.nbytes(0) == sum(placed) > sum(path.stat().st_size for path in files.lora)
    widest = max(checkpoint.tensors[f"blk.0.{stem}.weight"].rows for stem in STEMS[:-1])
    assert opened.nbytes(8) - opened.nbytes(0) == 4 * 3 * 8 * (widest + 2 * 32)


def test_drafts_are_of_the_adapted_model(files: Files) -> None:
    with files.load(draft_ngram=3, parallel=2, ctx_size=256) as drafting, files.load(ctx_size=256) as plain:
        for lora in ({}, {0: 1.0}):
            wanted = plain.generate([PROMPT], greedy(lora, 24))[0].tokens
            assert drafting.generate([PROMPT], greedy(lora, 24))[0].tokens == wanted


def test_scores_and_embeddings_have_the_adapters(files: Files, llm: LLM) -> None:
    with LLM(files.model, device="cpu", threads=1, ctx_size=256) as plain:
        ours, theirs = (model.logits(PROMPT[:5]) for model in (llm, plain))
        assert (ours - theirs).abs().max() > 0.1
        scored = llm.generate([PROMPT[:5]], SamplingParams(temperature=0, max_tokens=1, logprobs=1))[0]
        assert scored.logprobs is not None
        first = torch.log_softmax(ours[-1].double(), 0)[scored.tokens[0]]
        assert scored.logprobs[0].logprob == pytest.approx(float(first), abs=0.05)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({2: 1.0}, "lora: no adapter 2; there are 0 (first), 1 (second)"),
        ({0: "x"}, "sampling parameter lora[0] = 'x': must be a finite number"),
        ([1], "sampling parameter lora = [1]: must map numbers of adapters to scales"),
    ],
)
def test_requests_for_what_there_is_not(llm: LLM, lora: Any, message: str) -> None:
    with pytest.raises(EngineError) as error:
        llm.generate([PROMPT], SamplingParams(lora=lora))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_an_engine_without_adapters_takes_none(files: Files) -> None:
    with LLM(files.model, device="cpu", threads=1) as plain:
        with pytest.raises(
            EngineError, match=r"lora: no adapter 0; the model was loaded without any \(--lora\)"
        ):
            plain.generate([PROMPT], greedy({0: 1.0}))
        assert plain.generate([PROMPT], greedy({}, 1))[0].tokens


def test_what_is_not_computed_is_refused_by_name(files: Files, tmp_path: Path) -> None:
    tensors = GGUFCheckpoint(files.model).tensors
    nan = write_adapter(
        tmp_path / "nan.gguf", "llama", random_adapters(tensors, ("attn_q",), (4,)), 0, np.nan
    )
    with pytest.raises(
        EngineError, match=r"nan.gguf: tensor .* a scale \(alpha / r\) of nan is not from -1e9"
    ):
        LLM(files.model, device="cpu", threads=1, lora=[nan])
    with pytest.raises(EngineError, match="must be FILE or FILE:SCALE"):
        LLM(files.model, device="cpu", threads=1, lora=f"{files.lora[0]}:x")
    with pytest.raises(EngineError, match=r"lora 5: must be files or folders, each as 'FILE' or"):
        LLM(files.model, device="cpu", threads=1, lora=5)
