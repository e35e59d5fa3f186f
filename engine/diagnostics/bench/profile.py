"""The device time of a benchmark's test, kernel by kernel: torch's profiler, and a table of the trace that it writes.

Times are the device's own, from its activity records; host times of asynchronous launches are never used.
Reference: the Chrome trace event format; categories as torch.profiler writes them ("kernel", "gpu_memcpy", ...).
"""

import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quengine.diagnostics.bench.bench_time import decode_step, decoding
from quengine.diagnostics.harness import greedy
from quengine.errors import CannotRunError
from quengine.llm import LLM, CompletionStream
from quengine.models.gguf.whole_file import beside

TraceEvent = Mapping[str, Any]
"""One entry of a Chrome trace; `ts` and `dur` in microseconds."""

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_NAME_WIDTH = 56


@dataclass(frozen=True)
class KernelTime:
    """All launches of one kernel with one grid, of a step (or of a prompt).

    call_us: from its start to its end, on average. step_us: device time that it adds to a step. Where launches overlap
    (programmatic dependent launch: a kernel starts and waits while the one before still runs) the time counts for
    the earlier one until that ends, so that the kernels of a step add up. share: step_us over the time of the step.
    """

    name: str
    grid: tuple[int, ...]
    calls: float
    call_us: float
    step_us: float
    share: float


@dataclass(frozen=True)
class Profile:
    """Device work of `steps` equal steps.

    what: "decode step" or "prompt". wall_us: of one step, from the first start to the last end on the device. idle_us:
    the part of it in which nothing ran. launches: number of kernels; copies: number of memory copies by direction
    ("HtoD"). These and graph_launches are of all steps together.
    """

    what: str
    steps: int
    wall_us: float
    idle_us: float
    launches: int
    graph_launches: int
    copies: Mapping[str, int]
    kernels: tuple[KernelTime, ...]


def read_profile(events: Iterable[TraceEvent], what: str, steps: int) -> Profile:
    """The table of a trace that holds `steps` equal steps and nothing else.

    Raises:
        CannotRunError: the trace has no device activity.
    """
    listed = list(events)
    work = sorted(
        (e for e in listed if e.get("ph") == "X" and e.get("cat") in _DEVICE_WORK),
        key=lambda e: float(e["ts"]),
    )
    if not work:
        raise CannotRunError("the profiler recorded no device activity; another profiler may hold the device")
    calls: dict[tuple[str, tuple[int, ...]], list[tuple[float, float]]] = defaultdict(list)
    first, reached, idle = float(work[0]["ts"]), float(work[0]["ts"]), 0.0
    for event in work:
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        idle += max(0.0, start - reached)
        added = max(0.0, end - max(start, reached))
        reached = max(reached, end)
        calls[_name(event), _grid(event)].append((end - start, added))
    wall = reached - first
    rows = [_kernel_time(name, grid, times, steps, wall) for (name, grid), times in calls.items()]
    directions = [_direction(e) for e in work if e["cat"] == "gpu_memcpy"]
    return Profile(
        what=what,
        steps=steps,
        wall_us=wall / steps,
        idle_us=idle / steps,
        launches=sum(e["cat"] == "kernel" for e in work),
        graph_launches=sum("GraphLaunch" in str(e.get("name")) for e in listed if e.get("ph") == "X"),
        copies={direction: directions.count(direction) for direction in sorted(set(directions))},
        kernels=tuple(sorted(rows, key=lambda row: -row.step_us)),
    )


def _kernel_time(
    name: str, grid: tuple[int, ...], times: list[tuple[float, float]], steps: int, wall: float
) -> KernelTime:
    durations, added = (sum(column) for column in zip(*times, strict=True))
    return KernelTime(
        name=name,
        grid=grid,
        calls=len(times) / steps,
        call_us=durations / len(times),
        step_us=added / steps,
        share=added / wall if wall else 0.0,
    )


def _name(event: TraceEvent) -> str:
    """A kernel's name without the prefix that all share, cut where C++ templates make it long."""
    name = str(event["name"])
    if event["cat"] != "kernel":
        return name
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::|\(.*\)$", "", name)
    name = name.strip("_").removesuffix("_kernel")
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 3]}..."


def _grid(event: TraceEvent) -> tuple[int, ...]:
    """The grid that was launched, without trailing ones; () for an event that is no kernel."""
    grid = [int(n) for n in event.get("args", {}).get("grid", ())]
    while len(grid) > 1 and grid[-1] == 1:
        grid.pop()
    return tuple(grid)


def _direction(event: TraceEvent) -> str:
    """ "HtoD" of "Memcpy HtoD (Pinned -> Device)"."""
    words = str(event["name"]).split()
    return words[1] if len(words) > 1 else words[0]


@dataclass
class TraceFile:
    """Traces of several runs collected for one file that chrome://tracing and Perfetto open."""

    path: Path

    def __post_init__(self) -> None:
        self._events: list[TraceEvent] = []
        self._base_ns: int | None = None

    def check(self) -> None:
        """Check before the benchmark runs that `write` will be able to write. Raises CannotRunError."""
        folder = self.path.parent
        if self.path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise CannotRunError(f"--trace {self.path}: cannot be written; name a file in a folder that can")

    def add(self, label: str, trace: Mapping[str, Any]) -> None:
        """Append one run, under a bar called `label`; `trace` is a Chrome trace as torch.profiler writes it."""
        # Times are relative to a moment that each run's trace names, in nanoseconds.
        base = int(trace.get("baseTimeNanoseconds", 0))
        if self._base_ns is None:
            self._base_ns = base
        shift = (base - self._base_ns) / 1e3
        moved = [{**e, "ts": float(e["ts"]) + shift} if "ts" in e else dict(e) for e in trace["traceEvents"]]
        work = [e for e in moved if e.get("cat") in _DEVICE_WORK]
        if work:
            start = min(e["ts"] for e in work)
            end = max(e["ts"] + float(e["dur"]) for e in work)
            bar = {"ph": "X", "cat": "test", "name": label, "pid": "tests", "tid": "tests"}
            moved.append({**bar, "ts": start, "dur": end - start})
        self._events += moved

    def write(self) -> None:
        """Write the file beside its place and rename it. Raises CannotRunError where that fails."""
        try:
            with beside(self.path) as file:
                file.write(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}).encode())
        except OSError as error:
            raise CannotRunError(f"--trace {self.path}: cannot be written: {error}") from error


def format_profile(profile: Profile, rows: int = 24) -> Seq[str]:
    """The lines of a Markdown table: the kernels that take the most time, the sum of the others, idle time, and the
    total."""
    step = profile.what
    lines = [
        f"| {'kernel':56} | {'grid':>12} | calls per {step} | us per call | us per {step} |  share |",
        f"|{'-' * 58}|{'-' * 13}:|{'-' * (11 + len(step))}:|{'-' * 12}:|{'-' * (8 + len(step))}:|-------:|",
    ]
    width = len(step)

    def line(name: str, grid: str, calls: str, call: str, us: float) -> str:
        share = us / profile.wall_us if profile.wall_us else 0.0
        return f"| {name:56} | {grid:>12} | {calls:>{10 + width}} | {call:>11} | {us:>{7 + width}.1f} | {share:6.1%} |"

    shown, rest = profile.kernels[:rows], profile.kernels[rows:]
    for k in shown:
        grid = " x ".join(map(str, k.grid))
        lines.append(line(k.name, grid, f"{k.calls:.4g}", f"{k.call_us:.2f}", k.step_us))
    if rest:
        lines.append(
            line(
                f"{len(rest)} more", "", f"{sum(k.calls for k in rest):.4g}", "", sum(k.step_us for k in rest)
            )
        )
    lines.append(line("nothing runs", "", "", "", profile.idle_us))
    launches = f"{profile.launches / profile.steps:.4g}"
    lines.append(line("all, kernels launched", "", launches, "", profile.wall_us))
    return lines


Traced = tuple[Profile, dict[str, Any]]
"""A table, and the Chrome trace that it was read from."""

PROFILED_STEPS = 32


def check_can_profile(device: torch.device) -> None:
    """Raises CannotRunError, with the reason, where kernels of the device cannot be timed."""
    if device.type != "cuda":
        raise CannotRunError(
            f"--profile and --trace time the kernels of a CUDA device, and this run is on the {device.type.upper()}; "
            "leave them out, or use --device cuda"
        )
    activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    if torch.profiler.ProfilerActivity.CUDA not in activities:
        raise CannotRunError(
            f"this torch ({torch.__version__}) has no CUDA profiler; leave --profile and --trace out"
        )


def profile_decode(llm: LLM, prompts: list[list[int]], steps: int = PROFILED_STEPS) -> Traced:
    """The table and the trace of `steps` decode steps, of one sequence after each of the prompts.

    The first steps of the requests, which prepare their sampling, are not in it.
    """
    with decoding(llm, prompts) as streams:

        def several() -> None:
            for _ in range(steps):
                decode_step(llm, streams)

        trace = _traced(several)
    return read_profile(trace["traceEvents"], "decode step", steps), trace


def profile_prompt(llm: LLM, ids: list[int], cached: int) -> Traced:
    """The table and the trace of prompt `ids` up to its first token; the first `cached` are in the cache."""
    llm.scheduler.reset()  # else the blocks of a prompt that was timed before would be found
    if cached:  # whole blocks of it; the rest is computed in front of what is traced
        llm.generate([ids[: cached + 1]], greedy(1))
    stream = llm.stream(ids, greedy(1))
    llm.scheduler.add(stream.sequence)
    try:
        trace = _traced(lambda: _until_finished(llm, stream))
    finally:
        llm.scheduler.cancel(stream.sequence)
    return read_profile(trace["traceEvents"], "prompt", 1), trace


def _until_finished(llm: LLM, stream: CompletionStream) -> None:
    while not stream.sequence.finished:
        decode_step(llm, [stream])


def _traced(work: Callable[[], object]) -> dict[str, Any]:
    """The Chrome trace of what `work` does on the device, from idle to idle."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return dict(json.loads(path.read_text()))
