"""The table of kernels out of a Chrome trace: sums, overlap, idle time, names; and the trace file.

Which steps are profiled: steady ones, counted, and nothing left behind. On the CPU, under a fake profiler.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM
from quengine.diagnostics.bench import profile as module
from quengine.diagnostics.bench.profile import (
    TraceFile,
    check_can_profile,
    format_profile,
    profile_decode,
    profile_prompt,
    read_profile,
)
from quengine.errors import CannotRunError
from quengine.step_plan import StepPlan
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny


def event(name: str, start: float, duration: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "args": args}


STEP = [
    event("cudaGraphLaunch", 0.0, 3.0, "cuda_runtime"),
    event("_matvec_kernel", 10.0, 4.0, grid=[256, 1, 1]),
    # Starts while the one before runs, as programmatic dependent launch does.
    event("_swiglu_kernel", 12.0, 6.0, grid=[448, 1, 1]),
    event("_matvec_kernel", 19.0, 2.0, grid=[64, 2, 1]),
]


def two_steps() -> list[dict[str, Any]]:
    return STEP + [{**e, "ts": e["ts"] + 20.0} for e in STEP]


def test_launches_are_grouped_by_name_and_grid_and_counted_per_step() -> None:
    profile = read_profile(two_steps(), "decode step", 2)
    rows = {(k.name, k.grid): k.calls for k in profile.kernels}
    assert rows == {("matvec", (256,)): 1, ("swiglu", (448,)): 1, ("matvec", (64, 2)): 1}
    assert (profile.launches, profile.graph_launches, profile.copies) == (6, 2, {})


def test_overlapping_kernels_and_idle_time_add_up_to_the_time_of_a_step() -> None:
    profile = read_profile(two_steps(), "decode step", 2)
    added = {(k.name, k.grid): (k.call_us, k.step_us) for k in profile.kernels}
    assert added == {("matvec", (256,)): (4, 4), ("swiglu", (448,)): (6, 4), ("matvec", (64, 2)): (2, 2)}
    # 10 to 41 in all; nothing runs from 18 to 19, 21 to 30 and 38 to 39.
    assert profile.wall_us == pytest.approx(15.5)
    assert profile.idle_us == pytest.approx(5.5)
    assert sum(k.step_us for k in profile.kernels) + profile.idle_us == pytest.approx(profile.wall_us)
    assert [k.name for k in profile.kernels] == ["matvec", "swiglu", "matvec"]
    assert sum(k.share for k in profile.kernels) == pytest.approx(10 / 15.5)


def test_a_kernel_inside_another_adds_no_time() -> None:
    profile = read_profile([event("long", 0.0, 10.0), event("short", 2.0, 3.0)], "prompt", 1)
    assert {k.name: k.step_us for k in profile.kernels} == {"long": 10.0, "short": 0.0}


def test_copies_are_counted_by_direction_and_are_no_kernels() -> None:
    copies = [
        event("Memcpy HtoD (Pinned -> Device)", 5.0, 1.0, "gpu_memcpy", bytes=8),
        event("Memcpy DtoH (Device -> Pinned)", 7.0, 1.0, "gpu_memcpy", bytes=8),
        event("Memcpy HtoD (Pageable -> Device)", 9.0, 1.0, "gpu_memcpy", bytes=8),
        event("Memset (Device)", 11.0, 1.0, "gpu_memset", bytes=8),
    ]
    profile = read_profile([*STEP, *copies], "prompt", 1)
    assert profile.copies == {"DtoH": 1, "HtoD": 2}
    assert profile.launches == 3


def test_long_names_of_templates_are_cut_and_host_calls_left_out() -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, long>(int, float)"
    profile = read_profile([event(name, 0.0, 1.0), event("aten::add", 0.0, 9.0, "cpu_op")], "prompt", 1)
    (row,) = profile.kernels
    assert row.name.startswith("vectorized_elementwise_kernel<4, CUDAFunctor_add<")
    assert len(row.name) <= 56


def test_a_trace_without_device_activity_is_refused() -> None:
    with pytest.raises(CannotRunError, match="no device activity"):
        read_profile([event("cudaGraphLaunch", 0.0, 3.0, "cuda_runtime")], "decode step", 1)


def test_the_table_ends_with_idle_time_and_the_sum_and_its_lines_are_equally_long() -> None:
    many = [event(f"kernel {i}", 10.0 * i, 5.0, grid=[i + 1, 1, 1]) for i in range(30)]
    lines = format_profile(read_profile(many, "prompt", 1), rows=5)
    assert {len(line) for line in lines} == {len(lines[0])}
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["kernel", "grid", "calls per prompt", "us per call", "us per prompt", "share"]
    assert cells[7][0] == "25 more"
    assert cells[8][0] == "nothing runs"
    assert cells[9] == ["all, kernels launched", "", "30", "", "295.0", "100.0%"]
    assert sum(float(row[4]) for row in cells[2:9]) == pytest.approx(295.0)


def test_traces_of_several_runs_share_one_clock_and_carry_their_labels(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.check()
    file.add("tg4", {"baseTimeNanoseconds": 1_000_000, "traceEvents": STEP})
    file.add("pp8", {"baseTimeNanoseconds": 1_500_000, "traceEvents": STEP})
    file.write()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    written = json.loads(file.path.read_text())["traceEvents"]
    bars = {e["name"]: (e["ts"], e["dur"]) for e in written if e["cat"] == "test"}
    assert bars == {"tg4": (10.0, 11.0), "pp8": (510.0, 11.0)}


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "trace.json"):
        with pytest.raises(CannotRunError, match="--trace"):
            TraceFile(path).check()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=128)
    return write_tiny(tmp_path_factory.mktemp("profile") / "tiny.gguf", kind="Q8_0", sizes=sizes)


class Counter:
    """Notes every batch, and which of them were computed under the profiler; a step is one kernel of 10 us."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[tuple[int, int]] = []
        self.traced: list[tuple[int, int]] = []
        launch = llm.runner.launch

        def counted(plan: StepPlan) -> Any:
            if plan.phase == "decode":
                self.batches.append((1, plan.sequences[0].num_cached_tokens))
            self.batches += [(len(chunk.ids), chunk.start) for chunk in plan.chunks]
            return launch(plan)

        def trace(work: Callable[[], object]) -> dict[str, Any]:
            before = len(self.batches)
            work()
            self.traced = self.batches[before:]
            event = {"ph": "X", "cat": "kernel", "name": "step", "dur": 10.0, "args": {"grid": [1, 1, 1]}}
            return {"traceEvents": [{**event, "ts": 10.0 * i} for i in range(len(self.traced))]}

        monkeypatch.setattr(llm.runner, "launch", counted)
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
