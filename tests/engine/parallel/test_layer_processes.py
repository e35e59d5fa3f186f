"""A model whose layers processes share: the tokens and bits of one process, and clean errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from quengine import LLM, EngineError, SamplingParams
from quengine.cli.main import run
from quengine.config import EngineConfig
from quengine.parallel.cached_rows import read_cached, write_cached
from quengine.parallel.group import RankFailedError
from quengine.request.prompt_scores import PromptScores
from quengine.request.sequence import Sequence
from tests.engine.parallel.test_rank_processes import be_patient
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, seed=7)
PROMPTS = ["the cat", "in the beginning of", "a"]
LAYERS: dict[str, Any] = {"device": "cpu", "split": "layer"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layers")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    sizes = ModelSizes("qwen2moe", blocks=4, context=256)
    return write_tiny(folder / "experts.gguf", kind="Q8_0", sizes=sizes)


@pytest.fixture(scope="module")
def one(path: Path) -> Iterator[LLM]:
    with LLM(path, device="cpu", threads=1, parallel=3) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def shared(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=2, parallel=3, tensor_split="2,1,1", **LAYERS) as loaded:
        yield loaded


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_three_ranks_give_the_tokens_of_one_process(one: LLM, shared: LLM, params: SamplingParams) -> None:
    """Alone, and several sequences at once."""
    assert any("shared by 3 ranks, with 2 + 1 + 1 layers" in note for note in shared.loaded.notes)
    wanted = [completion.tokens for completion in one.generate(PROMPTS, params)]
    assert [completion.tokens for completion in shared.generate(PROMPTS, params)] == wanted
    assert shared.generate(PROMPTS[0], params)[0].tokens == wanted[0]


def test_logits_embeddings_and_scores_have_the_same_bits(one: LLM, shared: LLM) -> None:
    ids = one.encode("the cat sat on the mat")
    for decode in (False, True):
        assert torch.equal(one.logits(ids, decode=decode), shared.logits(ids, decode=decode))
    assert one.embed(PROMPTS) == shared.embed(PROMPTS)

    def scores(llm: LLM) -> PromptScores:
        sequence: Sequence = llm.stream(ids, GREEDY).sequence
        sequence.scores = PromptScores(ids, 2)
        llm.scheduler.add(sequence)
        while not sequence.finished:
            llm.step()
        return sequence.scores

    assert scores(one).logprobs == scores(shared).logprobs


def test_the_cache_of_all_layers_is_read_and_written(one: LLM, shared: LLM) -> None:
    """As parity does, whichever rank has a layer."""
    config = one.model_config
    for llm in (one, shared):
        llm.logits(one.encode("the cat sat"))
    rows = read_cached(one.runner, 0, 3, config)
    assert len(rows) == 8 and all(map(torch.equal, rows, read_cached(shared.runner, 0, 3, config)))
    write_cached(shared.runner, 0, 3, [tensor + 1 for tensor in rows])
    assert all(
        torch.equal(a, b + 1) for a, b in zip(read_cached(shared.runner, 0, 3, config), rows, strict=True)
    )


def test_drafts_leave_the_tokens_as_they_are(folder: Path) -> None:
    path = write_tiny(folder / "drafts.gguf", sizes=ModelSizes(context=128))
    with LLM(path, device="cpu", threads=1) as llm:
        wanted = llm.generate("the cat the cat the", GREEDY)[0].tokens
    with LLM(path, threads=2, tensor_parallel=2, draft_ngram=3, draft_model=path, **LAYERS) as llm:
        completion = llm.generate("the cat the cat the", GREEDY)[0]
    assert completion.tokens == wanted and completion.timings.draft_counts.accepted > 0


def test_a_rank_that_is_killed_ends_the_step_with_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    path = write_tiny(folder / "failing.gguf", sizes=ModelSizes(context=256))
    with LLM(path, threads=2, tensor_parallel=2, **LAYERS) as llm:
        assert llm.loaded.ranks is not None
        (pid,) = llm.loaded.ranks.pids
        stream = llm.stream("a", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        next(iter(stream))
        psutil.Process(pid).kill()
        with pytest.raises(
            RankFailedError, match="rank 1 was ended by signal 9; the model needs all 2 ranks"
        ):
            for _ in stream:
                pass


def test_smollm2_gives_the_tokens_of_one_process() -> None:
    prompt = "The capital of France is"
    with LLM("smollm2-135m", device="cpu", threads=2, ctx_size=128) as llm:
        wanted, logits = llm.generate(prompt, GREEDY)[0].tokens, llm.logits(llm.encode(prompt))
    with LLM("smollm2-135m", threads=2, ctx_size=128, tensor_split="1,1", **LAYERS) as llm:
        assert llm.generate(prompt, GREEDY)[0].tokens == wanted
        assert torch.equal(llm.logits(llm.encode(prompt)), logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_split": "1,1"}, "tensor_split 1,1 shares out whole layers: it goes with --split layer"),
        ({"split": "layer", "expert_parallel": True}, "it does not go with --split layer"),
        ({"split": "row"}, "split 'row': must be tensor or layer"),
        ({"split": "layer", "tensor_split": "3,0"}, "tensor_split '3,0': must be numbers above 0"),
        ({"split": "layer", "tensor_split": "3,x"}, "tensor_split '3,x': must be numbers above 0"),
        (
            {"split": "layer", "tensor_split": "3,1", "tensor_parallel": 3},
            "tensor_split 3,1: 2 shares, and tensor_parallel is 3",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        EngineConfig(**options)


def test_shares_count_the_devices() -> None:
    config = EngineConfig(split="layer", tensor_split="3,1", devices="1,0")
    assert config.tensor_parallel == 2 and config.shares == (3.0, 1.0)
    assert [config.device_of(rank) for rank in range(2)] == ["cuda:1", "cuda:0"]


def test_more_devices_than_layers_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(folder / "short.gguf", sizes=ModelSizes(context=64))
    command = ["generate", "-m", str(path), "--device", "cpu", "-sm", "layer", "-ts", "1,1,1", "hello"]
    assert run(command) == 1
    error = capsys.readouterr().err
    assert "3 devices cannot share 2 layers; take 2 at most" in error and error.count("\n") == 1


def test_parity_and_bench_take_a_model_whose_layers_are_shared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(folder / "compared.gguf", kind="Q8_0", sizes=ModelSizes(context=256, blocks=3))
    sides = ["--a", "cpu", "--b", "cpu:layer2", "--texts", "1", "--prompts", "1", "--tokens", "8"]
    assert run(["parity", "-m", str(path), *sides]) == 0
    assert "cpu:layer2" in capsys.readouterr().out
    flags = ["-sm", "layer", "-ts", "2,1", "-p", "0", "-n", "4", "-r", "1"]
    assert run(["bench", "-m", str(path), "--device", "cpu", *flags]) == 0
    assert "cpu x 2 by layer" in capsys.readouterr().out
