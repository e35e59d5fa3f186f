"""A model that processes share: the same tokens as one process, and a clean end whatever becomes of a rank."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from quengine import LLM, EngineError, SamplingParams
from quengine.config import EngineConfig
from quengine.errors import CannotRunError
from quengine.parallel.communicator import join
from quengine.parallel.group import RankFailedError, RankGroup
from quengine.request.prompt_scores import PromptScores
from quengine.request.sequence import Sequence
from quengine.serve.processes.server_engine import EngineFailedError, ProcessEngine
from tests.gguf_builder import ModelSizes
from tests.quick_python import QuickPopen
from tests.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, seed=7)
PROMPTS = ["the cat", "in the beginning of", "a"]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
END_SECONDS = 60.0
"""What would never end fails in this time; nothing here takes a second of an idle machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module", params=["llama", "qwen2moe"])
def path(folder: Path, request: pytest.FixtureRequest) -> Path:
    """Dense, and with experts, a shared one among them."""
    sizes = ModelSizes(
        request.param,
        context=256,
        feed_forward=160,
        expert_feed_forward=128,
        shared_feed_forward=160,
        head_dim=32,
    )
    return write_tiny(folder / f"{request.param}.gguf", kind="Q8_0", sizes=sizes)


@pytest.fixture(scope="module")
def one(path: Path) -> Iterator[LLM]:
    with LLM(path, device="cpu", threads=1, parallel=3) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def shared(path: Path) -> Iterator[LLM]:
    with LLM(path, device="cpu", threads=2, parallel=3, tensor_parallel=2) as loaded:
        yield loaded


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is told of a lost rank waited for as long as a busy machine takes, before this process is ended."""
    monkeypatch.setattr("quengine.parallel.group.END_SECONDS", END_SECONDS)


@pytest.fixture
def failing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """A shared model of a test that ends one of its ranks."""
    be_patient(monkeypatch)
    path = write_tiny(folder / "failing.gguf", sizes=ModelSizes(context=256))
    with LLM(path, device="cpu", threads=2, tensor_parallel=2) as loaded:
        yield loaded


def ranks_of(pid: int) -> list[psutil.Process]:
    """Those below a process, which may have others that compile kernels, and go on after its end."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended
            if "quengine.parallel.rank_main" in child.cmdline():
                found.append(child)
    return found


def nmse(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float((wanted - found).double().square().sum() / wanted.double().square().sum())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_two_ranks_give_the_tokens_of_one_process(one: LLM, shared: LLM, params: SamplingParams) -> None:
    """Alone, and several sequences at once."""
    wanted = [completion.tokens for completion in one.generate(PROMPTS, params)]
    assert [completion.tokens for completion in shared.generate(PROMPTS, params)] == wanted
    assert shared.generate(PROMPTS[0], params)[0].tokens == wanted[0]


def test_ranks_that_have_some_experts_each_give_the_tokens_of_one_process(folder: Path) -> None:
    sizes = ModelSizes("qwen3moe", context=64, head_dim=32, expert_feed_forward=32)  # too narrow to be cut
    path = write_tiny(folder / "experts.gguf", kind="Q8_0", sizes=sizes)
    with LLM(path, device="cpu", threads=1) as one:
        wanted = one.generate(PROMPTS, GREEDY)
    with LLM(path, device="cpu", threads=2, tensor_parallel=2, expert_parallel=True) as shared:
        found = shared.generate(PROMPTS, GREEDY)
    assert [completion.tokens for completion in found] == [completion.tokens for completion in wanted]
    with pytest.raises(
        EngineError, match="1 pieces of 32 for 2 ranks, or --expert-parallel; this model takes 1"
    ):
        LLM(path, device="cpu", threads=2, tensor_parallel=2)


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_logits_are_within_the_budgets(one: LLM, shared: LLM, decode: bool) -> None:
    ids = one.encode("the cat sat on the mat")
    assert nmse(one.logits(ids, decode=decode), shared.logits(ids, decode=decode)) < 1e-6


def test_a_sequence_has_the_same_bits_alone_and_beside_others(shared: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    alone = shared.generate(PROMPTS[0], params)[0]
    beside = shared.generate(PROMPTS, params)[0]
    assert alone.logprobs == beside.logprobs


def test_embeddings_and_scores_of_prompts(one: LLM, shared: LLM) -> None:
    wanted, found = (torch.tensor(llm.embed(PROMPTS)) for llm in (one, shared))
    assert nmse(wanted, found) < 1e-6

    def scores(llm: LLM) -> Sequence:
        ids = llm.encode("the cat sat")
        sequence = llm.stream(ids, GREEDY).sequence
        sequence.scores = PromptScores(ids, 2)
        llm.scheduler.add(sequence)
        while not sequence.finished:
            llm.step()
        return sequence

    a, b = scores(one), scores(shared)
    assert a.scores is not None and b.scores is not None and a.generated == b.generated
    for wanted_score, found_score in zip(a.scores.logprobs, b.scores.logprobs, strict=True):
        assert found_score.logprob == pytest.approx(wanted_score.logprob, abs=1e-3)


def test_drafts_leave_the_text_as_it_is(folder: Path) -> None:
    """Of the look-up, and of a draft model, which rank 0 computes alone."""
    path = write_tiny(folder / "drafts.gguf", sizes=ModelSizes(context=128))
    drafts: dict[str, Any] = {"draft_ngram": 3, "draft_model": path}
    with LLM(path, device="cpu", threads=1) as one:
        wanted = one.generate("the cat the cat the", GREEDY)[0].tokens
    with LLM(path, device="cpu", threads=2, tensor_parallel=2, **drafts) as drafting:
        completion = drafting.generate("the cat the cat the", GREEDY)[0]
    assert completion.tokens == wanted and completion.timings.draft_counts.accepted > 0


def test_a_rank_that_is_killed_ends_the_step_with_one_line(failing: LLM) -> None:
    assert failing.loaded.ranks is not None
    (pid,) = failing.loaded.ranks.pids
    stream = failing.stream("a", LONG)
    next(iter(stream))
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 was ended by signal 9; the model needs all 2 ranks"):
        for _ in stream:
            pass
    assert time.monotonic() - began < END_SECONDS
    with pytest.raises(RankFailedError, match="ended by signal 9"):
        failing.generate("a", GREEDY)
    assert not psutil.pid_exists(pid)


def test_a_rank_that_is_slow_is_waited_for_and_ends_with_the_model(failing: LLM) -> None:
    assert failing.loaded.ranks is not None
    wanted = failing.generate("a", GREEDY)[0].tokens
    (pid,) = failing.loaded.ranks.pids
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
    assert failing.generate("a", GREEDY)[0].tokens == wanted
    began = time.monotonic()
    failing.close()
    assert not psutil.pid_exists(pid) and time.monotonic() - began < END_SECONDS
    with pytest.raises(EngineError, match="this LLM is closed"):
        failing.generate("a", GREEDY)


def test_a_step_that_fails_here_ends_the_group(failing: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait in the middle of that step, and could not take the next."""
    assert failing.loaded.ranks is not None
    (pid,) = failing.loaded.ranks.pids

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(failing.runner.decoder.backend, "attention", fail)
    with pytest.raises(CannotRunError, match="not enough memory") as raised:
        failing.generate("a", GREEDY)
    assert str(raised.value.__cause__) == "no room"
    with pytest.raises(RankFailedError, match="out of step, since a step failed: no room"):
        failing.generate("a", GREEDY)
    assert not psutil.pid_exists(pid)


def test_ranks_end_with_the_process(folder: Path) -> None:
    """Killed, or interrupted by Ctrl-C in the middle of an answer."""
    path = write_tiny(folder / "ended.gguf", sizes=ModelSizes(context=8192))
    program = [sys.executable, "-m", "quengine.cli", "generate", "-m", str(path), "--device", "cpu"]
    flags = ["-tp", "2", "-t", "2", "-n", "8000", "--ignore-eos", "hello"]
    # Its answer fills the pipe long before its end, so it has not ended however late the signal is.
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pipesize": 4096}
    started = {number: QuickPopen([*program, *flags], **pipes) for number in (signal.SIGKILL, signal.SIGINT)}
    for number, process in started.items():
        assert process.stdout is not None
        process.stdout.read(1)
        ranks = ranks_of(process.pid)
        process.send_signal(number)
        _, errors = process.communicate(timeout=END_SECONDS)
        assert b"Traceback" not in errors
        gone, alive = psutil.wait_procs(ranks, END_SECONDS)
        assert gone and not alive


@pytest.mark.parametrize("left", ["", "alone", "alone, as it is looked for ranks"])
def test_what_a_rank_cannot_load_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """Also where the rank leaves the meeting before rank 0 has come to its end, as on a busy machine."""
    be_patient(monkeypatch)
    path = write_tiny(folder / "unloadable.gguf", sizes=ModelSizes(context=64))
    load, groups, met = RankGroup.load, list[RankGroup](), list[Any]()

    def without_file(self: RankGroup, plan, *others: Any) -> Any:  # type: ignore[no-untyped-def]
        def other(number: int, meeting: str) -> Any:
            return msgspec.structs.replace(plan(number, meeting), model=str(folder / "none.gguf"))

        groups.append(self)
        return load(self, other, *others)

    def left_alone(*arguments: Any) -> Any:
        met.append(
            join(*arguments)
        )  # kept: once it is closed, a rank that is still meeting tells of that alone
        if left != "alone":
            groups[0]._followers[0].wait(END_SECONDS)
            time.sleep(0.2)  # it is looked for ended ranks ten times and more
        raise RuntimeError("Gloo connectFullMesh failed: connection closed by peer")

    monkeypatch.setattr(RankGroup, "load", without_file)
    monkeypatch.setattr("quengine.parallel.group._LOOK_SECONDS", 0.01 if left else END_SECONDS)
    if left:
        monkeypatch.setattr("quengine.parallel.group.join", left_alone)
    with pytest.raises(EngineError, match=r"rank 1: .*none\.gguf"):
        LLM(path, device="cpu", threads=2, tensor_parallel=2)


def test_a_rank_that_does_not_begin_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny(folder / "unstarted.gguf", sizes=ModelSizes(context=64))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 has ended \(1\)"):
        LLM(path, device="cpu", threads=2, tensor_parallel=2)
    assert time.monotonic() - began < END_SECONDS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 65}, "tensor_parallel 65: must be from 1 to 64"),
        ({"device": "cuda:1", "tensor_parallel": 2}, "device cuda:1 is one device"),
        ({"devices": "0,1", "tensor_parallel": 1}, "devices 0,1: tensor_parallel is 1"),
        ({"devices": "0,0", "tensor_parallel": 2}, "must be different numbers"),
        ({"devices": "0,1", "tensor_parallel": 2, "device": "cpu"}, "they go with"),
    ],
)
def test_options_that_do_not_go_together(options: dict, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        EngineConfig(**options)


def test_a_named_device_is_each_ranks_own() -> None:
    config = EngineConfig(device="cuda", tensor_parallel=2, devices="3,1")
    assert [config.device_of(rank) for rank in range(2)] == ["cuda:3", "cuda:1"]
    assert EngineConfig(devices="3,1").ranks == 2


def test_a_server_starts_an_engine_again_that_lost_a_rank(folder: Path) -> None:
    """Though nothing was computed that could have noticed it."""
    path = write_tiny(folder / "served.gguf", sizes=ModelSizes(context=64))
    engine = ProcessEngine(str(path), {"device": "cpu", "threads": 2, "tensor_parallel": 2})
    try:
        (rank,) = ranks_of(engine.pid)
        rank.kill()
        began = time.monotonic()
        with pytest.raises(EngineFailedError, match=r"the engine's process has ended \(2\)"):
            while time.monotonic() - began < END_SECONDS:
                engine.stats()
                time.sleep(0.05)
    finally:
        engine.close()
