"""Runs a benchmark's test under torch's profiler, on a CUDA device: steady decode steps, or a whole prompt."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quengine.diagnostics.bench.bench_time import greedy
from quengine.diagnostics.bench.profile import Profile, read_profile
from quengine.errors import CannotRunError
from quengine.llm import LLM

Traced = tuple[Profile, dict[str, Any]]
"""A table, and the Chrome trace that it was read from."""

PROFILED_STEPS = 32
_WARM_STEPS = 4
PROFILED_TOKENS = _WARM_STEPS + PROFILED_STEPS + 2
"""Tokens of the request that `profile_decode` makes: two steps more, as a runner may work ahead."""


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


def profile_decode(llm: LLM, ids: list[int], cached: int, steps: int = PROFILED_STEPS) -> Traced:
    """The table and the trace of `steps` decode steps after prompt `ids`, of which `cached` are in the cache.

    The first steps of the request, which prepare its sampling, are not in it.
    """
    with _request(llm, ids, cached, PROFILED_TOKENS - PROFILED_STEPS + steps) as step:
        for _ in range(_WARM_STEPS):
            step()
        trace = _traced(lambda: [step() for _ in range(steps)])
    return read_profile(trace["traceEvents"], "decode step", steps), trace


def profile_prompt(llm: LLM, ids: list[int], cached: int) -> Traced:
    """The table and the trace of prompt `ids` up to its first token; the first `cached` are in the cache."""
    with _request(llm, ids, cached, 1) as step:
        trace = _traced(lambda: [None for _ in iter(step, True)])
    return read_profile(trace["traceEvents"], "prompt", 1), trace


@contextmanager
def _request(llm: LLM, ids: list[int], cached: int, count: int) -> Iterator[Callable[[], bool]]:
    """A greedy request of `count` tokens; each call computes one batch and says whether it was the last."""
    llm.scheduler.reset()  # else the blocks of a prompt that was timed before would be found
    if cached:  # whole blocks of it; the rest is computed in front of what is traced
        llm.generate([ids[: cached + 1]], greedy(1))
    stream = llm.stream(ids, greedy(count))
    llm.scheduler.add(stream.sequence)

    def step() -> bool:
        llm.step()
        if stream.sequence.error is not None:
            raise stream.sequence.error
        return stream.sequence.finished

    try:
        yield step
    finally:
        llm.scheduler.cancel(stream.sequence)


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
