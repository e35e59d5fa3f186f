"""How fast a model runs here: prompt processing and token generation, at depths, repeated.

Times what serves a user: requests of random token ids at temperature 0, choosing tokens and decoding text included.
Prints nothing; a row carries every sample. What the machine is and can do comes from `bench_machine`.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path

import torch

from quengine.config import EngineConfig
from quengine.diagnostics.bench.bench_batch import batch_positions, check_depth, time_batch
from quengine.diagnostics.bench.bench_drafts import time_drafts
from quengine.diagnostics.bench.bench_machine import bandwidth, forget_peak, matrix_rate, peak
from quengine.diagnostics.bench.bench_row import BenchRow, BenchTest, ModelFacts
from quengine.diagnostics.bench.bench_work import bytes_per_token, prompt_operations
from quengine.diagnostics.bench.profile import Profile, TraceFile
from quengine.diagnostics.bench.profile_run import (
    PROFILED_TOKENS,
    check_can_profile,
    profile_decode,
    profile_prompt,
)
from quengine.errors import CannotRunError, EngineError
from quengine.kernels.kv.cache_types import CacheType
from quengine.llm import LLM
from quengine.load import choose_device
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.hub.hub import resolve_model
from quengine.models.synthetic.synthetic import PRESETS, write_synthetic
from quengine.platform.machine import physical_cores

Progress = Callable[[str], None]

_SEED = 1


@dataclass(frozen=True)
class BenchPlan:
    """Everything to be timed: each model, with each thread count (None: the physical cores), in each test.

    batches: numbers of sequences computed at once.

    profile: also time each kernel of every test. trace: the file for those times as a timeline. draft_model,
    draft_ngram, draft_tokens, deterministic, mmap: as `LLM` has them.
    """

    models: Seq[str | Path]
    tests: Seq[BenchTest]
    threads: Seq[int | None]
    batches: Seq[int] = (1,)
    repetitions: int = 5
    device: str = "auto"
    backend: str = "auto"
    warm_up: bool = True
    profile: bool = False
    trace: Path | None = None
    cache_type: CacheType = "f16"
    draft_model: str | Path | None = None
    draft_ngram: int = 0
    draft_tokens: int | None = None
    deterministic: bool = False
    mmap: bool = True

    @property
    def drafts(self) -> bool:
        return self.draft_model is not None or self.draft_ngram > 0

    @property
    def profiled(self) -> bool:
        return self.profile or self.trace is not None

    def positions(self, test: BenchTest, batch: int, device: str) -> int:
        """Positions that a sequence of the test needs in the cache, and its profile."""
        timed = test.positions if self.drafts else batch_positions(test, batch, device)
        profiled = test.depth + test.prompt + 1 + PROFILED_TOKENS
        return max(timed, profiled if self.profiled and test.generate else 0)

    def loads(self, device: str) -> Iterator[tuple[int, list[int]]]:
        """How the model is loaded, and for what: positions of a sequence, numbers of sequences."""
        alone = [batch for batch in self.batches if batch == 1]
        together = [batch for batch in self.batches if batch > 1]
        for batches in (alone, together):
            if batches:
                yield max(self.positions(test, b, device) for test in self.tests for b in batches), batches

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise EngineError(f"-r {self.repetitions}: must be at least 1")
        if min(self.batches) < 1:
            raise EngineError(f"-b {min(self.batches)}: must be at least 1")
        if self.drafts and self.profiled:
            raise EngineError("--profile and --trace time steps without drafts; leave out the --draft flags")
        if max(self.batches) > 1 and self.profiled:
            raise EngineError("--profile and --trace time the kernels of one sequence; leave out -b")
        for test in self.tests:
            check_depth(test)


def run_bench(plan: BenchPlan, progress: Progress) -> Iterator[BenchRow]:
    """Time everything of the plan, row by row.

    Raises:
        EngineError: no such model, or a test longer than its context.
        CannotRunError: no such device here, or too little memory.
    """
    device, _ = choose_device(EngineConfig(plan.device, backend=plan.backend))
    for model in plan.models:
        _check_fits(model, plan, device.type)
    trace = _checked_trace(plan, device)
    rate = None
    if device.type == "cuda" and any(test.prompt and not test.generate for test in plan.tests):
        progress(f"measuring the matrix rate, {device}")
        rate = matrix_rate(device)
    bandwidths: dict[int, float] = {}
    loads = list(plan.loads(device.type))
    for name, wanted, (positions, batches) in product(plan.models, plan.threads, loads):
        threads = wanted or physical_cores()
        if threads not in bandwidths:
            progress(f"measuring memory bandwidth, {device}, {threads} threads")
            bandwidths[threads] = bandwidth(device, threads)
        progress(f"loading {name}")
        forget_peak(device)
        with LLM(
            name,
            str(device),
            positions,
            threads,
            plan.backend,
            reuse_prefix=True,
            cache_type=plan.cache_type,
            deterministic=plan.deterministic,
            parallel=max(batches),
            draft_model=plan.draft_model,
            draft_ngram=plan.draft_ngram,
            draft_tokens=plan.draft_tokens,
            mmap=plan.mmap,
            progress=progress,
        ) as llm:
            if plan.warm_up:
                progress(f"loading {name}, warming up")
                llm.warm_up()
            for batch, test in product(batches, plan.tests):
                yield _timed(llm, test, batch, plan, bandwidths[threads], rate, trace, progress)
    if trace is not None:
        trace.write()


def _timed(
    llm: LLM,
    test: BenchTest,
    batch: int,
    plan: BenchPlan,
    bandwidth: float,
    rate: float | None,
    trace: TraceFile | None,
    progress: Progress,
) -> BenchRow:
    """One row of one test."""
    facts = model_facts(llm.loaded.checkpoint)
    label = f"{facts.name}, {llm.loaded.threads} threads: {test.name}"
    if batch > 1:
        label += f" x {batch}"

    def tell(what: str) -> None:
        progress(f"{label}, {what}")

    if plan.drafts:
        seconds, drafts = time_drafts(llm, test, batch, plan.repetitions, plan.warm_up, tell)
        return replace(
            _row(llm, facts, test, batch, seconds, bandwidth, rate), bytes_per_token=0, drafts=drafts
        )
    times = time_batch(llm, test, batch, plan.repetitions, plan.warm_up, tell)
    row = _row(llm, facts, test, batch, tuple(times), bandwidth, rate)
    if not plan.profiled:
        return row
    progress(f"{label}, profiling")
    return replace(row, profile=_profiles(llm, test, label, trace))


def _checked_trace(plan: BenchPlan, device: torch.device) -> TraceFile | None:
    """Where the timeline goes; refuses now what cannot be profiled or written after minutes."""
    if plan.profiled:
        check_can_profile(device)
    if plan.trace is None:
        return None
    trace = TraceFile(plan.trace)
    trace.check()
    return trace


def _profiles(llm: LLM, test: BenchTest, label: str, trace: TraceFile | None) -> tuple[Profile, ...]:
    """The kernels of a test: of its prompt, and of a decode step after it."""
    ids, found = test_ids(llm, test), []
    if test.prompt:
        found.append(profile_prompt(llm, ids, test.depth))
    if test.generate:
        found.append(profile_decode(llm, ids, len(ids) - 1))
    for profile, events in found:
        if trace is not None:
            trace.add(f"{label}, {profile.what}", events)
    return tuple(profile for profile, _ in found)


def _check_fits(model: str | Path, plan: BenchPlan, device: str) -> None:
    """Before the first minute is spent: every model is here and holds the longest test."""
    checkpoint = open_checkpoint(resolve_model(str(model)))
    context = checkpoint.config.context_length
    checkpoint.close()
    for test, batch in product(plan.tests, plan.batches):
        positions = plan.positions(test, batch, device)
        if positions > context:
            many = f" with -b {batch}" if batch > 1 else ""
            raise EngineError(
                f"{test.name}{many} takes {positions} positions and {checkpoint.path.name} was made for "
                f"{context}; use smaller -p, -n, -pg or -d"
            )


def test_ids(llm: LLM, test: BenchTest) -> list[int]:
    """The random tokens of a test: its depth, then its prompt or the one token that generation starts from."""
    numbers = random.Random(_SEED)
    vocab = llm.model_config.vocab_size
    return [numbers.randrange(vocab) for _ in range(test.depth + max(test.prompt, 1))]


def _row(
    llm: LLM,
    facts: ModelFacts,
    test: BenchTest,
    batch: int,
    seconds: tuple[float, ...],
    bandwidth: float,
    rate: float | None,
) -> BenchRow:
    return BenchRow(
        model=facts,
        test=test,
        device=str(llm.loaded.device),
        backend=llm.runner.decoder.backend.name,
        threads=llm.loaded.threads,
        seconds=seconds,
        bytes_per_token=0 if test.prompt else bytes_per_token(llm, test.depth, test.generate, batch),
        bandwidth=bandwidth,
        load_s=llm.loaded.load_s,
        peak_bytes=peak(llm.loaded.device),
        cache_type=llm.config.cache_type,
        deterministic=llm.config.deterministic,
        held_bytes=facts.nbytes + llm.loaded.cache.nbytes,
        operations=0 if test.generate else prompt_operations(llm, test.depth, test.prompt),
        matrix_rate=rate,
        kernels_per_step=llm.runner.kernels_per_step if test.generate else None,
        batch=batch,
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
