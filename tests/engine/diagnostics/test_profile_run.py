"""Which steps are profiled: steady ones, counted, and nothing left behind. On the CPU, under a fake profiler."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM, CannotRunError
from quengine.batch import Batch
from quengine.diagnostics.bench import profile_run as module
from quengine.diagnostics.bench.profile_run import (
    check_can_profile,
    profile_decode,
    profile_prompt,
)
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=128)
    return write_tiny(tmp_path_factory.mktemp("profile") / "tiny.gguf", kind="Q8_0", sizes=sizes)


class Counter:
    """Notes every batch, and which of them were computed under the profiler; a step is one kernel of 10 us."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[tuple[int, int]] = []
        self.traced: list[tuple[int, int]] = []
        run = llm.runner.run

        def counted(batch: Batch) -> Any:
            if batch.phase == "decode":
                self.batches.append((1, batch.sequences[0].num_cached_tokens))
            self.batches += [(len(chunk.ids), chunk.start) for chunk in batch.chunks]
            return run(batch)

        def trace(work: Callable[[], object]) -> dict[str, Any]:
            before = len(self.batches)
            work()
            self.traced = self.batches[before:]
            event = {"ph": "X", "cat": "kernel", "name": "step", "dur": 10.0, "args": {"grid": [1, 1, 1]}}
            return {"traceEvents": [{**event, "ts": 10.0 * i} for i in range(len(self.traced))]}

        monkeypatch.setattr(llm.runner, "run", counted)
        monkeypatch.setattr(module, "_traced", trace)


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, "cpu", 128, 1, chunk_size=8, reuse_prefix=True) as llm:
        yield llm


def test_decode_steps_are_profiled_after_those_that_prepare_a_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter(llm, monkeypatch)
    profile, trace = profile_decode(llm, [[1, 2, 3, 4, 5]], 10)
    assert counter.batches[0] == (5, 0)
    assert counter.traced == [(1, position) for position in range(13, 23)]
    assert (profile.what, profile.steps, profile.launches, profile.wall_us) == ("decode step", 10, 10, 10.0)
    assert len(trace["traceEvents"]) == 10


def test_a_prompt_is_profiled_whole_and_only_beyond_what_is_cached(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(range(1, 49))
    counter = Counter(llm, monkeypatch)
    profile, _ = profile_prompt(llm, ids, 32)
    assert counter.traced == [(8, 32), (8, 40)]
    assert counter.batches == [(8, 0), (8, 8), (8, 16), (8, 24), (1, 32), *counter.traced]
    assert (profile.what, profile.steps, profile.launches) == ("prompt", 1, 2)


def test_several_sequences_decode_together_and_no_request_stays_behind(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(model, "cpu", 128, parallel=3, reuse_prefix=True) as llm:
        counter = Counter(llm, monkeypatch)
        profile_decode(llm, [[1, 2], [3, 4], [5, 6]], 10)
        assert len(counter.traced) == 10
        assert not llm.scheduler.waiting and llm.scheduler.cache_used == 0


def test_what_cannot_be_profiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotRunError, match="this run is on the CPU"):
        check_can_profile(torch.device("cpu"))
    monkeypatch.setattr(torch.profiler, "supported_activities", set)
    with pytest.raises(CannotRunError, match="no CUDA profiler"):
        check_can_profile(torch.device("cuda"))
