"""The time that a number of sequences at once take: their prompts, their tokens, or both.

Every sequence has random tokens of its own, so that none shares what another computed.
"""

import random
import time
from collections.abc import Callable, Iterator

from quengine.config import MIXED_CHUNK, MIXED_SECONDS
from quengine.diagnostics.bench.bench_row import BenchTest
from quengine.errors import CannotRunError, EngineError
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.llm import LLM, CompletionStream
from quengine.request.sampling_params import SamplingParams
from quengine.scheduler import LEAST_CHUNK

_WARM_UP_STEPS = 8


def check_depth(test: BenchTest) -> None:
    """Raises EngineError where a prompt cannot be timed behind such a depth."""
    if test.prompt and test.depth % BLOCK_SIZE:
        raise EngineError(f"-d {test.depth}: must be a multiple of {BLOCK_SIZE}, whole blocks of the cache")


def batch_positions(test: BenchTest, batch: int, device: str) -> int:
    """Positions that a sequence of the test needs; the first ones go on while the last prompts are computed."""
    if test.prompt:
        return test.positions
    shortest = MIXED_CHUNK[device] if MIXED_SECONDS[device] is None else LEAST_CHUNK
    chunks = -(-(test.depth + 1) // shortest)
    return test.positions + (batch - 1) * (chunks + 1) + _WARM_UP_STEPS + 1


def time_batch(
    llm: LLM, test: BenchTest, batch: int, repetitions: int, warm_up: bool, tell: Callable[[str], None]
) -> Iterator[float]:
    """Seconds of each repetition of `batch` sequences. The tokens of the depth are computed before, and not timed.

    Prompts: until the last one's first token. Tokens: `test.generate` steps, in each of which every sequence gets
    one. Both: from the first prompt to the last token.

    Raises:
        CannotRunError: the cache, as it fits in memory, does not hold so many sequences.
    """
    cache = llm.loaded.cache
    positions = batch_positions(test, batch, llm.loaded.device.type)
    if batch > cache.most_sequences(positions):
        raise CannotRunError(
            f"-b {batch}: {test.name} takes {positions} positions a sequence, and the cache that fits in memory holds "
            f"{cache.most_sequences(positions)} such sequences; use a smaller -b, or --cache-type q8_0"
        )
    once = _time_prompts if test.prompt else _time_tokens
    if warm_up:
        tell("warming up")
        for _ in range(llm.runner.settles_after):
            once(llm, test, batch)
    for repetition in range(repetitions):
        tell(f"{repetition + 1} of {repetitions}")
        yield once(llm, test, batch)


def _time_prompts(llm: LLM, test: BenchTest, batch: int) -> float:
    prompts = _prompts(llm, batch, test.depth + test.prompt)
    llm.scheduler.reset()
    if test.depth:  # one token more: a prompt's last token is always computed, and these are not to be
        llm.generate([ids[: test.depth + 1] for ids in prompts], _greedy(1))
    began = time.perf_counter()
    completions = llm.generate(prompts, _greedy(test.generate + 1))
    seconds = time.perf_counter() - began
    cached = {completion.timings.cached_tokens for completion in completions}
    if cached != {test.depth}:
        raise RuntimeError(f"timed prompts with {sorted(cached)} tokens in the cache, not {test.depth}")
    return seconds


def _time_tokens(llm: LLM, test: BenchTest, batch: int) -> float:
    streams = [llm.stream(ids, _greedy(None)) for ids in _prompts(llm, batch, test.depth + 1)]
    try:
        for stream in streams:
            stream.start()
        while not all(stream.sequence.generated for stream in streams):
            _step(llm, streams)
        for _ in range(_WARM_UP_STEPS):  # a runner that is a step ahead is so for all of them
            _step(llm, streams)
        before = sum(len(stream.sequence.generated) for stream in streams)
        began = time.perf_counter()
        for _ in range(test.generate):
            _step(llm, streams)
        seconds = time.perf_counter() - began
        count = sum(len(stream.sequence.generated) for stream in streams) - before
    finally:
        for stream in streams:
            stream.close()
    if count != test.generate * batch:
        raise RuntimeError(f"timed {count} tokens, not {test.generate} of each of {batch} sequences")
    return seconds


def _step(llm: LLM, streams: list[CompletionStream]) -> None:
    llm.step()
    for stream in streams:
        if stream.sequence.error is not None:
            raise stream.sequence.error


def _prompts(llm: LLM, batch: int, length: int) -> list[list[int]]:
    vocab = llm.model_config.vocab_size
    numbers = [random.Random(seed) for seed in range(batch)]
    return [[own.randrange(vocab) for _ in range(length)] for own in numbers]


def _greedy(count: int | None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
