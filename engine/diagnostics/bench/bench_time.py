"""The time that a number of sequences at once take: their prompts, their tokens, or both.

Every sequence has random tokens of its own, so that none shares what another computed.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from quengine.config import MIXED_CHUNK, MIXED_SECONDS
from quengine.diagnostics.bench.bench_plan import BenchTest
from quengine.diagnostics.harness import greedy
from quengine.errors import CannotRunError
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.llm import LLM, CompletionStream
from quengine.platform import collector
from quengine.request.output import Completion, DraftCounts
from quengine.scheduler import LEAST_CHUNK

_Timed = TypeVar("_Timed")

_WARM_UP_STEPS = 8


def batch_positions(test: BenchTest, batch: int, device: str) -> int:
    """Positions that a sequence of the test needs; the first sequences generate while the last prompts are computed."""
    if test.prompt:
        return test.positions
    shortest = MIXED_CHUNK[device] if MIXED_SECONDS[device] is None else LEAST_CHUNK
    chunks = -(-(test.depth + 1) // shortest)
    return test.positions + (batch - 1) * (chunks + 1) + _WARM_UP_STEPS + 1


def time_batch(
    llm: LLM, test: BenchTest, batch: int, repetitions: int, warm_up: bool, progress: Callable[[str], None]
) -> Iterator[float]:
    """Seconds of each repetition of `batch` sequences. The tokens of the depth are computed before, and not timed.

    Prompts are timed until the last one's first token; tokens over `test.generate` steps, each of which gives every
    sequence one; both from the first prompt to the last token.

    Raises:
        CannotRunError: the cache that fits in memory does not hold `batch` sequences.
    """
    cache = llm.loaded.cache
    positions = batch_positions(test, batch, llm.loaded.device.type)
    if batch > cache.most_sequences(positions):
        raise CannotRunError(
            f"-b {batch}: {test.name} takes {positions} positions a sequence, and the cache that fits in memory holds "
            f"{cache.most_sequences(positions)} such sequences; use a smaller -b, or --cache-type q8_0 or q4_0"
        )

    def once() -> float:
        return _time_requests(llm, test, batch)[0] if test.prompt else _time_tokens(llm, test, batch)

    return _repeated(once, llm, repetitions, warm_up, progress)


def time_drafts(
    llm: LLM, test: BenchTest, batch: int, repetitions: int, warm_up: bool, progress: Callable[[str], None]
) -> tuple[tuple[float, ...], DraftCounts, int]:
    """Seconds of each repetition of `batch` requests, what was drafted and accepted in all of them, and the bytes that
    a token would have read on average without the rows of other requests in its steps.

    A step gives each sequence the tokens that were accepted, so whole requests are timed. Their random prompts hold
    little to look up; what a model generates after them often repeats itself. benchmarks/speculative.py times prompts
    of natural language. Whole blocks of the depth are computed before, and not timed. In a test without a prompt each
    sequence still has a prompt of one token after the depth.
    """
    seconds, drafts, nbytes = [], DraftCounts(), list[int]()
    for taken, completions in _repeated(
        lambda: _time_requests(llm, test, batch), llm, repetitions, warm_up, progress
    ):
        seconds.append(taken)
        for completion in completions:
            drafts += completion.timings.draft_counts
            nbytes.append(completion.timings.bytes_per_token)
    return tuple(seconds), drafts, sum(nbytes) // len(nbytes)


def _repeated(
    once: Callable[[], _Timed], llm: LLM, repetitions: int, warm_up: bool, progress: Callable[[str], None]
) -> Iterator[_Timed]:
    if warm_up:
        progress("warming up")
        for _ in range(llm.runner.settles_after):
            once()
    for repetition in range(repetitions):
        progress(f"{repetition + 1} of {repetitions}")
        # A collection through all that was loaded takes as long as a hundred steps of a small model.
        with collector.paused():
            taken = once()
        yield taken


def _time_requests(llm: LLM, test: BenchTest, batch: int) -> tuple[float, list[Completion]]:
    """Seconds of `batch` whole requests, after their depth. With a prompt, each generates one token more than the test
    counts: the one that the prompt gives."""
    prompts = random_prompts(llm, batch, test.depth + max(1, test.prompt))
    count = test.generate + (1 if test.prompt else 0)
    llm.scheduler.reset()
    if test.depth:  # one token more: a prompt's last token is always computed, and these are not to be
        llm.generate([ids[: test.depth + 1] for ids in prompts], greedy(1))
    began = time.perf_counter()
    completions = llm.generate(prompts, greedy(count))
    seconds = time.perf_counter() - began
    whole = test.depth // BLOCK_SIZE * BLOCK_SIZE
    for timings in (completion.timings for completion in completions):
        if (timings.cached_tokens, timings.generated_tokens) != (whole, count):
            raise RuntimeError(
                f"timed {timings.generated_tokens} tokens after {timings.cached_tokens}, not {count} after {whole}"
            )
    return seconds, completions


def _time_tokens(llm: LLM, test: BenchTest, batch: int) -> float:
    with decoding(llm, random_prompts(llm, batch, test.depth + 1)) as streams:
        before = sum(len(stream.sequence.generated) for stream in streams)
        began = time.perf_counter()
        for _ in range(test.generate):
            decode_step(llm, streams)
        seconds = time.perf_counter() - began
        count = sum(len(stream.sequence.generated) for stream in streams) - before
    if count != test.generate * batch:
        raise RuntimeError(f"timed {count} tokens, not {test.generate} of each of {batch} sequences")
    return seconds


@contextmanager
def decoding(llm: LLM, prompts: list[list[int]]) -> Iterator[list[CompletionStream]]:
    """A block with a greedy request for each prompt. All of them generate: each batch has a token of every one."""
    streams = [llm.stream(ids, greedy(None)) for ids in prompts]
    try:
        for stream in streams:
            stream.start()
        while not all(stream.sequence.generated for stream in streams):
            decode_step(llm, streams)
        for _ in range(_WARM_UP_STEPS):  # a runner that is a step ahead is so for all of them
            decode_step(llm, streams)
        yield streams
    finally:
        for stream in streams:
            stream.close()


def decode_step(llm: LLM, streams: list[CompletionStream]) -> None:
    """Computes one batch; raises the error that ended a request."""
    llm.step()
    for stream in streams:
        if stream.sequence.error is not None:
            raise stream.sequence.error


def random_prompts(llm: LLM, batch: int, length: int) -> list[list[int]]:
    """Random token ids: the same in every run, and different for each of `batch` sequences."""
    vocab = llm.model_config.vocab_size
    numbers = [random.Random(seed) for seed in range(batch)]
    return [[own.randrange(vocab) for _ in range(length)] for own in numbers]
