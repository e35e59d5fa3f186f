"""The CUDA runner's bookkeeping, with a graph that computes on the host: one step ahead, never a wrong token."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quengine.constraint_spec import ConstraintSpec
from quengine.cuda_runner import CudaRunner, GraphKey
from quengine.kernels import cuda_backend
from quengine.kernels.cuda.compile_ahead import marker
from quengine.kernels.cuda_backend import CudaBackend
from quengine.sampler import Sample
from quengine.sampling_params import SamplingParams
from quengine.scheduler import Batch

CTX = 32


@dataclass
class FakeToken:
    value: int
    log: list[str]

    def wait(self) -> int:
        self.log.append(f"wait {self.value}")
        return self.value


@dataclass
class FakeGraph:
    """Chooses 10 * position + 1 at every step."""

    log: list[str] = field(default_factory=list)
    position: int = 0

    def begin(self, sequence: Any) -> None:
        self.position = len(sequence.token_ids) - 1
        self.log.append(f"begin {self.position}")

    def launch(self) -> FakeToken:
        token = FakeToken(10 * self.position + 1, self.log)
        self.log.append(f"launch {self.position}")
        self.position += 1
        return token


@dataclass
class FakeSequence:
    token_ids: list[int]
    params: SamplingParams
    generated: list[int] = field(default_factory=list)


@dataclass
class FakeCache:
    ctx_size: int = CTX


def decode(runner: CudaRunner, sequence: Any, steps: int) -> list[int]:
    tokens = []
    for _ in range(steps):
        start = len(sequence.token_ids) - 1
        sample = runner.step(Batch(sequence, sequence.token_ids[start:], start))
        assert isinstance(sample, Sample)
        sequence.token_ids.append(sample.token)
        sequence.generated.append(sample.token)
        tokens.append(sample.token)
    return tokens


@pytest.fixture
def graph() -> FakeGraph:
    return FakeGraph()


@pytest.fixture
def runner(graph: FakeGraph) -> CudaRunner:
    made = CudaRunner(SimpleNamespace(backend=None), FakeCache())  # type: ignore[arg-type]
    made.graphs[GraphKey(1, bias=False, penalties=False)] = graph
    return made


GREEDY = SamplingParams(temperature=0)


def test_the_next_step_is_launched_before_the_token_is_read(runner: CudaRunner, graph: FakeGraph) -> None:
    assert decode(runner, FakeSequence([1, 2, 3], GREEDY), 3) == [21, 31, 41]
    assert graph.log == [
        *("begin 2", "launch 2", "launch 3", "wait 21"),
        *("launch 4", "wait 31", "launch 5", "wait 41"),
    ]


def test_no_step_is_launched_beyond_max_tokens(runner: CudaRunner, graph: FakeGraph) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    decode(runner, FakeSequence([1, 2, 3], params), 2)
    assert [entry for entry in graph.log if entry.startswith("launch")] == ["launch 2", "launch 3"]


def test_no_step_is_launched_beyond_the_context(runner: CudaRunner, graph: FakeGraph) -> None:
    decode(runner, FakeSequence(list(range(CTX - 2)), GREEDY), 2)
    launches = [int(entry.split()[1]) for entry in graph.log if entry.startswith("launch")]
    assert max(launches) <= CTX - 1


def test_another_sequence_begins_anew(runner: CudaRunner, graph: FakeGraph) -> None:
    decode(runner, FakeSequence([1, 2, 3], GREEDY), 2)
    assert decode(runner, FakeSequence([1, 2, 3, 4, 5, 6], GREEDY), 2) == [51, 61]
    assert [entry for entry in graph.log if entry.startswith("begin")] == ["begin 2", "begin 5"]


@pytest.mark.parametrize(
    ("params", "key"),
    [
        (SamplingParams(temperature=0), GraphKey(1, False, False)),
        (SamplingParams(), GraphKey(64, False, False)),
        (SamplingParams(top_k=100, presence_penalty=0.5), GraphKey(128, False, True)),
        (SamplingParams(temperature=0, logit_bias={3: 1.0}), GraphKey(1, True, False)),
        (SamplingParams(top_k=0), GraphKey(0, False, False)),
        (SamplingParams(top_k=500, repeat_penalty=1.1), GraphKey(0, False, True)),
        (SamplingParams(temperature=0, logprobs=1), None),
    ],
)
def test_a_graph_is_chosen_by_what_sampling_needs_room_for(
    params: SamplingParams, key: GraphKey | None
) -> None:
    assert GraphKey.of(params) == key


def test_kernels_are_not_looked_for_again_where_the_marker_says_they_were_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shape:
        """What the marker is made of; computing anything would fail."""

        config, bytes_per_token, chunk_size = "model", 10, 8
        backend = SimpleNamespace(device=torch.device("cuda"))

        def forward(self, *_: object) -> None:
            raise AssertionError("computed")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU X")
    cache = SimpleNamespace(ctx_size=4, layers=[], num_blocks=0)
    marker("GPU X", "model", 10, 1, []).touch()
    CudaRunner(Shape(), cache).compile_kernels()  # type: ignore[arg-type]


class Eager:
    """Stands for a decoder and a sampler: notes what is computed eagerly, and whether as part of a prompt."""

    def __init__(self, fixed_kernels: bool) -> None:
        self.backend = CudaBackend(torch.device("cpu"), fixed_kernels)
        self.log: list[tuple[int, bool]] = []

    def forward(self, _ids: torch.Tensor, _layers: object, start: int, *_: object) -> torch.Tensor:
        self.log.append((start, self.backend.in_prompt))
        return torch.zeros(1, 8)

    def sample(self, *_: object) -> Sample:
        return Sample(5)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("length", [1, 3])
def test_with_fixed_kernels_a_prompts_last_token_is_no_decode_step(
    fixed: bool, length: int, graph: FakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where it is the prompt's only token."""
    monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _: False)
    eager = Eager(fixed)
    cache = SimpleNamespace(ctx_size=CTX, layers=[], num_blocks=0)
    runner = CudaRunner(eager, cache)  # type: ignore[arg-type]
    runner.graphs[GraphKey(1, bias=False, penalties=False)] = graph
    sequence: Any = FakeSequence(list(range(length)), GREEDY)
    sequence.num_prompt_tokens, sequence.sampler = length, eager
    decode(runner, sequence, 2)
    apart = fixed and length > 1
    assert eager.log == ([(length - 1, True)] if apart else [])
    assert graph.log[0] == f"begin {length if apart else length - 1}"
    assert not eager.backend.in_prompt


def test_the_tokens_of_a_chunk_are_a_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose kernels round weights once, as a batch's do not. A single one is a decode step."""
    monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _: False)
    eager = Eager(fixed_kernels=False)
    runner = CudaRunner(eager, SimpleNamespace(ctx_size=CTX, layers=[], num_blocks=0))  # type: ignore[arg-type]
    runner.forward([1, 2, 3], 0)
    runner.forward([4], 3)
    assert eager.log == [(0, True), (3, False)]


def test_a_constraint_takes_the_eager_path() -> None:
    free = SamplingParams(temperature=0)
    assert GraphKey.of(free) is not None
    assert GraphKey.of(replace(free, constraint=ConstraintSpec.regex("a"))) is None
