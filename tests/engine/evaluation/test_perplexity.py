"""Perplexity: llama-perplexity's values on a released model, the definition on a tiny one, and what is refused."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quengine import LLM, EngineError, imatrix, perplexity
from quengine.evaluation.tasks import answer, read_tasks
from quengine.models.hub.hub import resolve_model
from quengine.scoring.perplexity import Estimate, Mean, chunks_of, measure, text_chunks, windows_of
from quengine.scoring.prompt_logits import PromptLogits, compute
from tests.engine.evaluation import task_files
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

ROOT = Path(__file__).parents[3]
THEIRS = json.loads((Path(__file__).parent / "llama_perplexity.json").read_text())
SIZES = ModelSizes(embedding=64, feed_forward=64, heads=2, kv_heads=1, head_dim=32, context=256)


@pytest.fixture(scope="module")
def license_text() -> str:
    return (ROOT / "LICENSE").read_text().removesuffix("\n")


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with LLM(str(resolve_model("smollm2-135m")), device="cpu", ctx_size=256, parallel=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("perplexity") / "tiny.gguf", kind="Q8_0", sizes=SIZES)


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), device="cpu", ctx_size=96, parallel=3) as llm:
        yield llm


def test_chunks_have_llama_perplexitys_values(smollm2: LLM, license_text: str) -> None:
    """Its file is in F32: what is left is the rounding of activations here."""
    theirs = THEIRS["-c 64 -b 64 --chunks 2"]
    found = list(measure(smollm2, text_chunks(smollm2, license_text, 64)[:2], 64))
    assert found[-1].running == pytest.approx(theirs, rel=1e-3)
    assert found[-1].scored_tokens == 2 * 31 and found[-1].computed_tokens == 128


def test_strides_have_llama_perplexitys_values(smollm2: LLM, license_text: str) -> None:
    theirs = THEIRS["-c 192 -b 192 --ppl-stride 128 --chunks 1"]
    found = list(measure(smollm2, text_chunks(smollm2, license_text, 192, 128)[:1], 192, 128))
    assert found[-1].running == pytest.approx(theirs, rel=1e-3)
    assert found[-1].scored_tokens == 128 and found[-1].computed_tokens == 256


@pytest.mark.parametrize("adds", [True, False])
def test_chunks_begin_as_llama_perplexitys(adds: bool, tmp_path: Path) -> None:
    """With the beginning-of-text token in place of their first one, where the model has it."""
    changes = {"tokenizer.ggml.add_bos_token": adds, "tokenizer.ggml.bos_token_id": 260}
    sizes = ModelSizes(embedding=32, feed_forward=64, heads=2, kv_heads=1, head_dim=16)
    path = write_tiny(tmp_path / "tiny.gguf", kind="F32", sizes=sizes, changes=changes)
    text = ("Nine wolves watched, and a tenth one slept. " * 12).rstrip()
    found = perplexity(path, text, 64, chunks=7, device="cpu")
    assert found.running == pytest.approx(THEIRS["tiny, -c 64 -b 64, add_bos"][str(adds).lower()], rel=1e-4)


def test_tasks_have_llama_perplexitys_answers(smollm2: LLM) -> None:
    tasks = read_tasks("hellaswag", task_files.hellaswag())
    found = [each.accuracy for each in answer(smollm2, "hellaswag", tasks)]
    assert found == pytest.approx(THEIRS["--hellaswag"])
    tasks = read_tasks("multiple-choice", task_files.multiple_choice())
    found = [each.accuracy for each in answer(smollm2, "multiple-choice", tasks)]
    assert found == pytest.approx(THEIRS["--multiple-choice"])


def test_winogrande_has_llama_perplexitys_scores(smollm2: LLM) -> None:
    tasks = read_tasks("winogrande", task_files.winogrande())
    found = list(answer(smollm2, "winogrande", tasks))
    assert torch.tensor([each.scores for each in found]).allclose(
        torch.tensor(THEIRS["--winogrande"]), atol=5e-3
    )
    assert found[-1].accuracy == 0.6 and found[-1].chance == 0.5


def test_tasks_are_drawn_as_llama_perplexity_draws_them() -> None:
    """3 of 5, whose recorded scores tell which they are. HellaSwag: the test above, by which answer is wrong."""
    every, drawn = THEIRS["--winogrande"], THEIRS["--winogrande --winogrande-tasks 3"]
    places = [task.place - 1 for task in read_tasks("winogrande", task_files.winogrande(), 3)]
    assert [every[place] for place in places] == drawn
    places = [task.place for task in read_tasks("hellaswag", task_files.hellaswag())]
    assert sorted(places) == list(range(1, 7)) != places
    assert [task.place for task in read_tasks("hellaswag", task_files.hellaswag(), 2)] == places[:2]


def test_values_are_those_of_all_logits(tiny: LLM) -> None:
    """The definition: log-softmax in fp64 of the logits that `LLM.logits` gives."""
    ids = [(7 * n + 3) % 250 for n in range(330)]
    chunks = chunks_of(ids, 96, bos=5)
    assert [chunk.ids[0] for chunk in chunks] == [5, 5, 5] and chunks[1].ids[1:] == ids[97:192]
    *_, found = measure(tiny, chunks, 96)
    wanted = Mean()
    for chunk in chunks:
        rows = tiny.logits(chunk.ids[:-1]).double().log_softmax(-1)
        wanted.add([-float(rows[at - 1, chunk.ids[at]]) for at in range(49, 96)])
    assert found.nll.value == pytest.approx(wanted.estimate.value, abs=1e-6)
    assert found.nll.error == pytest.approx(wanted.estimate.error, rel=1e-6)
    assert found.perplexity.value == math.exp(found.nll.value)
    assert found.perplexity.error == found.perplexity.value * found.nll.error
    assert found.running[-1] == found.perplexity.value and found.chunks == found.total_chunks == 3


def test_slices_of_logits_are_bounded(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a prompt is, what is given at a time is a few rows, each once and in order."""
    from quengine.request import prompt_scores

    monkeypatch.setattr(prompt_scores, "MAX_LOGITS_BYTES", 4 * 5 * tiny.model_config.vocab_size)
    taken = list[int]()

    def take(logits: torch.Tensor, position: int) -> None:
        assert len(logits) <= 5 and logits.dtype == torch.float32
        taken.extend(range(position, position + len(logits)))

    list(compute(tiny, [PromptLogits([n % 250 for n in range(80)], 33, take)]))
    assert taken == list(range(33, 80))


def test_the_function_loads_a_model(tiny_path: Path, tiny: LLM) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 4
    lines = []
    found = perplexity(tiny_path, text, 24, device="cpu", chunks=2, progress=lines.append)
    assert found.chunks == len(lines) == 2 and lines[-1] == found
    again = perplexity(tiny, text, 24, chunks=2)
    assert again.running == found.running  # the CPU's bits do not depend on what is computed beside


def test_ranks_have_the_values_of_one(tmp_path: Path) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=64, heads=4, kv_heads=2, head_dim=32, context=256)
    path = write_tiny(tmp_path / "tiny.gguf", kind="Q8_0", sizes=sizes)
    text = "The quick brown fox jumps over the lazy dog. " * 4
    alone = perplexity(path, text, 24, chunks=2, device="cpu")
    with LLM(str(path), device="cpu", ctx_size=24, threads=2, tensor_parallel=2) as shared:
        assert perplexity(shared, text, 24, chunks=2).running == pytest.approx(alone.running, rel=1e-4)
        with pytest.raises(EngineError, match="give them whole layers with --split layer"):
            imatrix(shared, text, tmp_path / "out.gguf", 24)


def test_a_mean_has_its_error() -> None:
    mean = Mean()
    mean.add([1.0, 2.0])
    mean.add([6.0])
    assert mean.estimate.value == 3 and mean.estimate.error == pytest.approx(math.sqrt(14 / 3 / 2))
    assert Estimate(0.0, 0.5).exponential == Estimate(1.0, 0.5)
    assert Estimate(1000.0, 0.5).exponential == Estimate(math.inf, math.inf)


def test_what_cannot_be_computed_is_refused(tiny: LLM) -> None:
    with pytest.raises(EngineError, match="19 tokens, and must have at least 20, two chunks of 10"):
        chunks_of(range(19), 10, None)
    with pytest.raises(EngineError, match="a context of 3 tokens: must be at least 4"):
        chunks_of(range(19), 3, None)
    with pytest.raises(EngineError, match="stride of 20 tokens: must be less than 20, twice the context"):
        windows_of(range(100), 10, 20)
    with pytest.raises(EngineError, match="15 tokens, and must have at least 20"):
        windows_of(range(15), 10, 8)
    with pytest.raises(EngineError, match="chunks must be at least 1"):
        perplexity(tiny, "a" * 100, 10, chunks=0)
    with pytest.raises(EngineError, match="the context holds 96"):
        perplexity(tiny, "a b c " * 100, 120)


def test_logits_that_are_not_finite_are_named(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from quengine.scoring import prompt_logits

    def poisoned(logits: torch.Tensor, targets: list[int]) -> torch.Tensor:
        assert len(logits) == len(targets)
        return torch.full((len(logits),), math.nan)

    monkeypatch.setattr(prompt_logits, "target_logprobs", poisoned)
    with pytest.raises(EngineError, match="log-probability of token 13 is nan"):
        perplexity(tiny, "a b c " * 20, 24)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("hellaswag", b"", "has no tasks"),
        ("hellaswag", b"a\n0\nb\nc\nd\n", "5 lines, and a task has 6"),
        ("hellaswag", b"a\n4\nb\nc\nd\ne\n", "line 2: '4': must be 0, 1, 2 or 3"),
        ("winogrande", b"0,a _ b,c,d\n", "line 1: must be number,sentence"),
        ("winogrande", b"0,a b,c,d,1\n", "line 1: the sentence has no gap"),
        ("winogrande", b"0,a _,c,d,3\n", "answer '3': must be 1 or 2"),
        ("winogrande", b"\xff", "not UTF-8, byte 0xff at 0"),
        ("multiple-choice", b"\x01\x00", "cut short in the header"),
        ("multiple-choice", task_files.multiple_choice()[:-3], "cut short in task 6"),
        ("multiple-choice", b"\1\0\0\0\0\0\0\0" + b"\1\0\0\0a" + b"\xff\0\0\0", "255 answers"),
    ],
)
def test_a_file_of_tasks_is_checked(kind: str, data: bytes, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_tasks(kind, data)  # type: ignore[arg-type]


def test_tasks_that_cannot_be_answered_are_named(tiny: LLM) -> None:
    long = b"0,a _ " + b"b " * 200 + b",c,d,1\n"
    with pytest.raises(EngineError, match=r"--winogrande: task 1 has \d+ tokens, the context 96: raise -c"):
        list(answer(tiny, "winogrande", read_tasks("winogrande", long)))
    with pytest.raises(EngineError, match="has no choices that differ"):
        list(answer(tiny, "winogrande", read_tasks("winogrande", b"0,a _ b,c,c,1\n")))


@pytest.mark.gpu
def test_a_gpu_has_the_cpus_values(tiny_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 8
    for stride in (0, 16):
        on_gpu = perplexity(tiny_path, text, 24, stride=stride, device="cuda")
        on_cpu = perplexity(tiny_path, text, 24, stride=stride, device="cpu")
        assert on_gpu.running == pytest.approx(on_cpu.running, rel=2e-3)
