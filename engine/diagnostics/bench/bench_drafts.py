"""The time that texts take with drafts, and how many of the drafted tokens they took.

A step gives each text as many tokens as its draft was right, so whole requests are timed, one or many at once. Their
random prompts hold little to look up; what a model says to them often repeats itself. Real texts are timed by
benchmarks/speculative.py. Does not know: rows and tables (`bench_row`).
"""

import random
import time
from collections.abc import Callable

from quengine.diagnostics.bench.bench_row import BenchTest
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.llm import LLM
from quengine.request.output import Completion, DraftCounts
from quengine.request.sampling_params import SamplingParams


def time_drafts(
    llm: LLM, test: BenchTest, batch: int, repetitions: int, warm_up: bool, tell: Callable[[str], None]
) -> tuple[tuple[float, ...], DraftCounts]:
    """Seconds of each repetition of `batch` requests, and their drafts.

    Whole blocks of the depth are computed before, and not timed. A test without a prompt gives each text one token.
    """
    if warm_up:
        tell("warming up")
        for _ in range(llm.runner.settles_after):
            _once(llm, test, batch)
    seconds, drafts = [], DraftCounts()
    for repetition in range(repetitions):
        tell(f"{repetition + 1} of {repetitions}")
        taken, completions = _once(llm, test, batch)
        seconds.append(taken)
        for completion in completions:
            drafts += completion.timings.draft_counts
    return tuple(seconds), drafts


def _once(llm: LLM, test: BenchTest, batch: int) -> tuple[float, list[Completion]]:
    vocab, count = llm.model_config.vocab_size, test.generate + (1 if test.prompt else 0)
    numbers = [random.Random(seed) for seed in range(batch)]
    prompts = [[own.randrange(vocab) for _ in range(test.depth + max(1, test.prompt))] for own in numbers]
    llm.scheduler.reset()
    if test.depth:
        llm.generate([ids[: test.depth + 1] for ids in prompts], _greedy(1))
    began = time.perf_counter()
    completions = llm.generate(prompts, _greedy(count))
    seconds = time.perf_counter() - began
    for timings in [completion.timings for completion in completions]:
        whole = test.depth // BLOCK_SIZE * BLOCK_SIZE
        if (timings.cached_tokens, timings.generated_tokens) != (whole, count):
            raise RuntimeError(
                f"timed {timings.generated_tokens} tokens after {timings.cached_tokens}, not {count} after {whole}"
            )
    return seconds, completions


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
