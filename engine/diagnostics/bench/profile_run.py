"""Runs a benchmark's test under torch's profiler, on a CUDA device: steady decode steps, or a whole prompt."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quengine.diagnostics.bench.bench_time import decode_step, decoding, greedy
from quengine.diagnostics.bench.profile import Profile, read_profile
from quengine.errors import CannotRunError
from quengine.llm import LLM, CompletionStream

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
    """The table and the trace of `steps` decode steps of as many sequences as there are prompts, after these.

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
