"""How fast a model runs here: prompt processing and token generation, at depths, repeated.

Times what serves a user: requests of random token ids at temperature 0, choosing tokens and decoding text included.
Prints nothing; a row carries every sample. What the machine is and can do comes from `bench_machine`.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from quengine.bench_machine import bandwidth, forget_peak, peak
from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.llm import LLM
from quengine.load import choose_device
from quengine.machine import physical_cores
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.hub import resolve_model
from quengine.models.synthetic import PRESETS, write_synthetic
from quengine.sampling_params import SamplingParams

Progress = Callable[[str], None]

WARM_UP_TOKENS = 16
_SEED = 1


@dataclass(frozen=True)
class BenchTest:
    """What is timed: `prompt` tokens computed in chunks, then `generate` tokens one by one, after `depth`
    tokens.

    One of the first two may be 0.
    """

    prompt: int
    generate: int
    depth: int = 0

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg128, pp512+tg128, with "@ d4096" at a depth."""
        parts = [f"pp{self.prompt}"] if self.prompt else []
        parts += [f"tg{self.generate}"] if self.generate else []
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def positions(self) -> int:
        """Positions of the cache that the test needs; a token more than it counts (see time_test)."""
        return self.depth + self.prompt + self.generate + 1


def expand_tests(
    prompts: Seq[int], generates: Seq[int], pairs: Seq[tuple[int, int]], depths: Seq[int]
) -> list[BenchTest]:
    """At every depth: the prompt tests, the generation tests, the pairs of both. Zeros are left out.

    Raises:
        EngineError: nothing is left, or a number is negative.
    """
    shapes = [*((p, 0) for p in prompts), *((0, n) for n in generates), *pairs]
    if any(number < 0 for number in (*depths, *(n for shape in shapes for n in shape))):
        raise EngineError("-p, -n, -pg and -d take numbers of tokens, 0 or more")
    tests = [BenchTest(p, n, depth) for depth in depths for p, n in shapes if p or n]
    if not tests:
        raise EngineError("nothing to time: -p, -n and -pg are all 0")
    return list(dict.fromkeys(tests))


@dataclass(frozen=True)
class ModelFacts:
    """A model in numbers: `nbytes` of tensors, `params` weights, and the types they are stored in."""

    name: str
    path: str
    nbytes: int
    params: int
    types: str


@dataclass(frozen=True)
class BenchRow:
    """One test on one model with one thread count.

    seconds: what each repetition took. bytes_per_token: weights, and the cache read on average, for one
    generated token; 0 where a prompt is part of the test, since a chunk's tokens share one pass over the
    weights.
    bandwidth: bytes per second that the device's memory gives (see bench_machine). peak_bytes: the most memory the
    device, or on the CPU the process, held since this model was loaded.
    """

    model: ModelFacts
    test: BenchTest
    device: str
    backend: str
    threads: int
    seconds: tuple[float, ...]
    bytes_per_token: int
    bandwidth: float
    load_s: float
    peak_bytes: int
    batch: int = 1

    @property
    def samples(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        return tuple((self.test.prompt + self.test.generate) / s for s in self.seconds)

    @property
    def tok_s(self) -> float:
        return mean(self.samples)

    @property
    def deviation(self) -> float:
        """The samples' standard deviation; 0 for one sample."""
        return stdev(self.samples) if len(self.seconds) > 1 else 0.0

    @property
    def gb_s(self) -> float | None:
        """1e9 bytes read per second; None where that is not what limits the test."""
        return self.bytes_per_token * self.tok_s / 1e9 if self.bytes_per_token else None

    @property
    def bandwidth_percent(self) -> float | None:
        return None if self.gb_s is None else 100 * self.gb_s / (self.bandwidth / 1e9)

    def as_dict(self, machine: dict[str, Any] | None = None) -> dict[str, Any]:
        """Flat and complete, for machines."""
        fields: dict[str, Any] = {
            "model": self.model.name,
            "model_path": self.model.path,
            "model_bytes": self.model.nbytes,
            "model_params": self.model.params,
            "model_types": self.model.types,
            "device": self.device,
            "backend": self.backend,
            "threads": self.threads,
            "batch": self.batch,
            "test": self.test.name,
            "n_prompt": self.test.prompt,
            "n_gen": self.test.generate,
            "n_depth": self.test.depth,
            "tok_s": self.tok_s,
            "tok_s_stddev": self.deviation,
            "samples_tok_s": list(self.samples),
            "samples_s": list(self.seconds),
            "bytes_per_token": self.bytes_per_token,
            "gb_s": self.gb_s,
            "bandwidth_gb_s": self.bandwidth / 1e9,
            "bandwidth_percent": self.bandwidth_percent,
            "load_s": self.load_s,
            "peak_bytes": self.peak_bytes,
        }
        return fields if machine is None else {**fields, **machine}


@dataclass(frozen=True)
class BenchPlan:
    """Everything to be timed: each model, with each thread count (None: the physical cores), in each test."""

    models: Seq[str | Path]
    tests: Seq[BenchTest]
    threads: Seq[int | None]
    batches: Seq[int] = (1,)
    repetitions: int = 5
    device: str = "auto"
    backend: str = "auto"
    warm_up: bool = True

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise EngineError(f"-r {self.repetitions}: must be at least 1")
        unsupported = [batch for batch in self.batches if batch != 1]
        if unsupported:
            raise EngineError(
                f"-b {unsupported[0]}: this version runs one sequence at a time; only -b 1 can be timed"
            )


def run_bench(plan: BenchPlan, progress: Progress) -> Iterator[BenchRow]:
    """Time everything of the plan, row by row.

    Raises:
        EngineError: no such model, or a test longer than its context.
        CannotRunError: no such device here, or too little memory.
    """
    for model in plan.models:
        _check_fits(model, plan.tests)
    device, _ = choose_device(EngineConfig(plan.device, backend=plan.backend))
    bandwidths: dict[int, float] = {}
    positions = max(test.positions for test in plan.tests)
    for name, wanted in product(plan.models, plan.threads):
        threads = wanted or physical_cores()
        if threads not in bandwidths:
            progress(f"measuring memory bandwidth, {device}, {threads} threads")
            bandwidths[threads] = bandwidth(device, threads)
        progress(f"loading {name}")
        forget_peak(device)
        with LLM(name, str(device), positions, threads, plan.backend, reuse_prefix=True) as llm:
            facts = model_facts(llm.loaded.checkpoint)
            for test in plan.tests:
                label = f"{facts.name}, {threads} threads: {test.name}"
                seconds = tuple(time_test(llm, test, plan.repetitions, plan.warm_up, label, progress))
                yield _row(llm, facts, test, seconds, bandwidths[threads])


def _check_fits(model: str | Path, tests: Seq[BenchTest]) -> None:
    """Before the first minute is spent: every model is here and holds the longest test."""
    checkpoint = open_checkpoint(resolve_model(str(model)))
    context = checkpoint.config.context_length
    checkpoint.close()
    longest = max(tests, key=lambda test: test.positions)
    if longest.positions > context:
        raise EngineError(
            f"{longest.name} takes {longest.positions} positions and {checkpoint.path.name} was made for "
            f"{context}; use smaller -p, -n, -pg or -d"
        )


def time_test(
    llm: LLM, test: BenchTest, repetitions: int, warm_up: bool, label: str, progress: Progress
) -> Iterator[float]:
    """Seconds of each repetition. The tokens of the depth are computed once, before, and not timed.

    `llm` must reuse prefixes. The first generated token comes out of the last prompt token, so a test without a
    prompt gives it one token, which is computed as the generated ones are, and a test with one asks for one more.
    """
    numbers = random.Random(_SEED)
    vocab = llm.model_config.vocab_size
    ids = [numbers.randrange(vocab) for _ in range(test.depth + max(test.prompt, 1))]
    count = test.generate + (1 if test.prompt else 0)
    llm.runner.cache.tokens.clear()
    progress(f"{label}, preparing")
    _complete(llm, ids[: test.depth + 1], 1, 0)
    if warm_up:
        progress(f"{label}, warming up")
        _complete(llm, ids, min(count, WARM_UP_TOKENS), test.depth)
    for repetition in range(repetitions):
        progress(f"{label}, {repetition + 1} of {repetitions}")
        began = time.perf_counter()
        _complete(llm, ids, count, test.depth)
        yield time.perf_counter() - began


def _complete(llm: LLM, ids: list[int], count: int, cached: int) -> None:
    """Compute a request whose first `cached` tokens are in the cache, and no more of them."""
    del llm.runner.cache.tokens[cached:]
    greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    timings = llm.stream(ids, greedy).finish().timings
    if (timings.cached_tokens, timings.generated_tokens) != (cached, count):
        raise RuntimeError(
            f"timed {timings.generated_tokens} tokens after {timings.cached_tokens}, not {count} after {cached}"
        )


def _row(
    llm: LLM, facts: ModelFacts, test: BenchTest, seconds: tuple[float, ...], bandwidth: float
) -> BenchRow:
    per_token = 0
    if not test.prompt:
        # Token i of the test reads the rows before it and its own.
        context = test.depth + (test.generate + 1) // 2
        per_token = llm.runner.decoder.bytes_per_token + llm.model_config.kv_cache_bytes(context)
    return BenchRow(
        model=facts,
        test=test,
        device=str(llm.loaded.device),
        backend=llm.runner.decoder.backend.name,
        threads=llm.loaded.threads,
        seconds=seconds,
        bytes_per_token=per_token,
        bandwidth=bandwidth,
        load_s=llm.loaded.load_s,
        peak_bytes=peak(llm.loaded.device),
    )


def model_facts(checkpoint: Checkpoint) -> ModelFacts:
    """Counted from the tensors, not taken from the file's name."""
    weights: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        weights[tensor.format.name] += prod(tensor.shape)
    total = weights.total()
    # Norms are always F32 and no news.
    named = [kind for kind, count in weights.most_common() if count >= total / 1000]
    return ModelFacts(checkpoint.path.stem, str(checkpoint.path), checkpoint.nbytes, total, "+".join(named))


def synthetic_model(preset: str, progress: Progress) -> Path:
    """A model of the preset's shape with random weights, written to the user's cache unless it is there
    already.

    Raises:
        EngineError: no such preset.
        CannotRunError: the cache cannot be written, or the disk is too full.
    """
    if preset not in PRESETS:
        raise EngineError(f"--synthetic {preset}: must be one of {', '.join(PRESETS)}")
    from quengine import __version__

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quengine" / "synthetic"
    # Another version may draw other weights.
    path = folder / f"{preset}-{__version__}.gguf"
    if path.is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        progress(f"writing {path}")
        return write_synthetic(path, preset)
    except OSError as error:
        raise CannotRunError(f"cannot write the synthetic model to {path}: {error}") from error
