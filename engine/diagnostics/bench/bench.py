"""The speed of a model on this machine: prompt processing and token generation, at depths, repeated.

Requests of random token ids at temperature 0 are timed as a user's are, with sampling and detokenization. The
device's own limits come from `diagnostics/machine.py`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path

import torch

from quengine.diagnostics.bench.bench_plan import BenchPlan, BenchTest
from quengine.diagnostics.bench.bench_row import BenchRow, ModelFacts
from quengine.diagnostics.bench.bench_time import batch_positions, random_prompts, time_batch, time_drafts
from quengine.diagnostics.bench.profile import (
    PROFILED_STEPS,
    Profile,
    TraceFile,
    check_can_profile,
    profile_decode,
    profile_prompt,
)
from quengine.diagnostics.harness import loaded, opened
from quengine.diagnostics.machine import bandwidth, matrix_rate, peak, reset_peak
from quengine.errors import EngineError
from quengine.llm import LLM
from quengine.models.architectures import layers_of
from quengine.models.blocks.attention import Attention
from quengine.models.blocks.latent_attention import LatentAttention
from quengine.models.checkpoint import Checkpoint
from quengine.models.config import ModelConfig
from quengine.models.experts import MixtureOfExperts
from quengine.models.layers import FeedForwardLayer
from quengine.models.parameter_counts import checkpoint_parameters
from quengine.platform.device import choose_device
from quengine.platform.host_experts import host_layers
from quengine.platform.machine import physical_cores
from quengine.platform.weight_loader import Progress


def bytes_per_token(llm: LLM, depth: int, generate: int, batch: int = 1) -> int:
    """Bytes of weights, and of the cache on average, that one of `generate` tokens after `depth` tokens reads.

    `batch` sequences share a pass over the weights. In a mixture of experts the pass reads the experts that `batch`
    rows are expected to choose.
    """
    # Token i of the test reads the rows before it and its own.
    context = depth + (generate + 1) // 2
    return llm.runner.decoder.step_bytes(batch) // batch + llm.cache_bytes(context)


def prompt_operations(llm: LLM, depth: int, prompt: int) -> int:
    """Floating-point operations, a multiply-add counting two, of a prompt after `depth` tokens.

    Counts the layers' matrices for every token (of experts, those that compute it), and the scores and sums of causal
    attention within the window. The output matrix and the last layer's matrices after its attention count once a chunk,
    since only a chunk's last token gets logits.
    """
    decoder = llm.runner.decoder
    config = decoder.config
    chunks = -(-prompt // decoder.chunk_size)
    matrices, rows, positions = 0, prompt, range(depth, depth + prompt)
    for number, block in enumerate(decoder.blk):
        if block.mixer is not None:
            entry, output = block.mixer.entry, block.mixer.output
            matrices += 2 * entry.rows * entry.cols * rows
            rows = chunks if number >= decoder.last_writer else prompt
            matrices += 2 * output.rows * output.cols * rows
        if block.ffn is not None:
            matrices += _feed_forward_operations(config, block.ffn) * rows
        if block.input is not None:
            matrices += (
                sum(2 * each.rows * each.cols for each in (block.input.gate, block.input.project)) * rows
            )
    if decoder.inputs is not None:
        matrices += 2 * decoder.inputs.project.rows * decoder.inputs.project.cols * prompt
    attention = 0
    for layer, mixer in enumerate(block.mixer for block in layers_of(config)):
        if isinstance(mixer, LatentAttention) and layer in config.held_layers:
            sizes = mixer.sizes  # absorbed: queries and values have the elements of a latent
            row = sizes.rank * (sizes.plain + sizes.values) * mixer.heads
            matrices += 2 * row * prompt
            if sizes.query_rank:
                matrices += 2 * mixer.query_rows * sizes.query_rank * prompt
            seen = sum(position + 1 for position in positions)
            attention += 2 * mixer.heads * (mixer.head_dim + sizes.rank) * seen
        if isinstance(mixer, Attention) and layer in config.held_layers:
            ends = range(depth + prompt - 1, depth - 1, -decoder.chunk_size)
            visible = (
                position % mixer.window + 1
                if mixer.chunked and mixer.window
                else min(position + 1, mixer.window or position + 1)
                for position in (ends if mixer.shared else positions)
            )
            attention += 4 * mixer.heads * mixer.head_dim * sum(visible)
    output = decoder.output  # None where another device has it
    logits = 0 if output is None else 2 * output.rows * output.cols * chunks
    return int(matrices + attention + logits)


def _feed_forward_operations(config: ModelConfig, ffn: FeedForwardLayer | MixtureOfExperts) -> int:
    """Floating-point operations of the matrices of one layer's feed-forward, for one row."""
    if isinstance(ffn, FeedForwardLayer):
        return int(sum(2 * weight.rows * weight.cols for weight in (ffn.entry.weight, ffn.ffn_down)))
    experts = ffn.experts
    inner = experts.router.used * experts.feed_forward_length + experts.shared_feed_forward_length
    return (
        2
        * config.embedding_length
        * ((3 if config.block.feed_forward.has_gate else 2) * inner + experts.count)
    )


@dataclass(frozen=True)
class _Limits:
    """The device's limits: bytes per second of its memory, operations per second of its matrix units (None: not
    measured).
    """

    bandwidth: float
    matrix_rate: float | None


def run_bench(plan: BenchPlan, progress: Progress) -> Iterator[BenchRow]:
    """Times every test of the plan, and yields a row for each.

    Raises:
        EngineError: no such model, or a test longer than its context.
        CannotRunError: no such device here, or too little memory.
    """
    device, _ = choose_device(plan.config)
    for model in plan.models:
        _check_fits(model, plan, device.type)
    trace = _checked_trace(plan, device)
    rate = None
    if device.type == "cuda" and any(test.prompt and not test.generate for test in plan.tests):
        progress(f"measuring the matrix rate, {device}")
        rate = matrix_rate(device)
    bandwidths: dict[int, float] = {}
    loads = list(_loads(plan, device.type))
    for name, wanted, ranks, (positions, batches) in product(plan.models, plan.threads, plan.ranks, loads):
        threads = wanted or physical_cores()
        if threads not in bandwidths:
            progress(f"measuring memory bandwidth, {device}, {threads} threads")
            bandwidths[threads] = bandwidth(device, threads)
        progress(f"loading {name}")
        reset_peak(device)
        sizes = {
            "ctx_size": positions,
            "threads": threads,
            "parallel": max(batches),
            "tensor_parallel": ranks,
        }
        with loaded(name, plan.config, progress=progress, reuse_prefix=True, **sizes) as llm:
            if plan.warm_up:
                progress(f"loading {name}, warming up")
                llm.warm_up()
                while llm.warm_up_next():  # else rarer steps would at first be timed in larger ones
                    pass
            for batch, test in product(batches, plan.tests):
                yield _timed(llm, test, batch, plan, _Limits(bandwidths[threads], rate), trace, progress)
    if trace is not None:
        trace.write()


def _loads(plan: BenchPlan, device: str) -> Iterator[tuple[int, list[int]]]:
    """For each load of the model, the positions of a sequence, and the numbers of sequences to time with it."""
    alone = [batch for batch in plan.batches if batch == 1]
    together = [batch for batch in plan.batches if batch > 1]
    for batches in filter(None, (alone, together)):
        yield max(_positions(plan, test, b, device) for test in plan.tests for b in batches), batches


def _positions(plan: BenchPlan, test: BenchTest, batch: int, device: str) -> int:
    """Positions that a sequence needs in the cache for the test and for its profile."""
    timed = test.positions if plan.config.speculates else batch_positions(test, batch, device)
    if not plan.profiled or not test.generate:
        return timed
    tokens = BenchTest(0, PROFILED_STEPS, test.depth + test.prompt)
    return max(timed, batch_positions(tokens, batch, device))


def _timed(
    llm: LLM,
    test: BenchTest,
    batch: int,
    plan: BenchPlan,
    limits: _Limits,
    trace: TraceFile | None,
    progress: Progress,
) -> BenchRow:
    """One row of one test."""
    facts, many = model_facts(llm.loaded.checkpoint), f" x {batch}" if batch > 1 else ""
    label = f"{facts.name}, {llm.loaded.threads} threads: {test.name}{many}"
    spare = _spare_bytes(llm, _positions(plan, test, batch, llm.loaded.device.type), batch)
    time_of = llm, test, batch, plan.repetitions, plan.warm_up, lambda what: progress(f"{label}, {what}")
    if plan.config.speculates:
        seconds, drafts, nbytes = time_drafts(*time_of)
        row = _row(llm, facts, test, batch, seconds, limits, spare)
        return replace(row, bytes_per_token=0 if test.prompt or batch > 1 else nbytes, drafts=drafts)
    row = _row(llm, facts, test, batch, tuple(time_batch(*time_of)), limits, spare)
    if not plan.profiled:
        return row
    progress(f"{label}, profiling")
    return replace(row, profile=_profiles(llm, test, batch, label, trace))


def _spare_bytes(llm: LLM, positions: int, batch: int) -> int:
    """Bytes of the cache that only other tests, of more or longer sequences, need. 0 on the CPU, where unused parts of
    the cache take no memory."""
    return 0 if llm.loaded.device.type == "cpu" else llm.loaded.cache.spare_bytes(batch, positions)


def _checked_trace(plan: BenchPlan, device: torch.device) -> TraceFile | None:
    """The file of the timeline. Raises CannotRunError where nothing can be profiled here, or the file written."""
    if plan.profiled:
        check_can_profile(device)
    if plan.trace is None:
        return None
    trace = TraceFile(plan.trace)
    trace.check()
    return trace


def _profiles(
    llm: LLM, test: BenchTest, batch: int, label: str, trace: TraceFile | None
) -> tuple[Profile, ...]:
    """The kernels of a test's prompt, and those of a decode step after it."""
    prompts, found = random_prompts(llm, batch, test.depth + max(test.prompt, 1)), []
    if test.prompt:
        found.append(profile_prompt(llm, prompts[0], test.depth))
    if test.generate:
        found.append(profile_decode(llm, prompts))
    for profile, events in found:
        if trace is not None:
            trace.add(f"{label}, {profile.what}", events)
    return tuple(profile for profile, _ in found)


def _check_fits(model: str | Path, plan: BenchPlan, device: str) -> None:
    """Check before anything is timed that the model is here, that its context holds the longest test, and that it has
    experts if they are to be placed."""
    with opened(model) as checkpoint:
        config, name = checkpoint.config, checkpoint.path.name
    host_layers(plan.config, config)
    for test, batch in product(plan.tests, plan.batches):
        positions = _positions(plan, test, batch, device)
        if positions > config.context_length:
            many = f" with -b {batch}" if batch > 1 else ""
            raise EngineError(
                f"{test.name}{many} takes {positions} positions and {name} was made for "
                f"{config.context_length}; use smaller -p, -n, -pg or -d"
            )


def _row(
    llm: LLM,
    facts: ModelFacts,
    test: BenchTest,
    batch: int,
    seconds: tuple[float, ...],
    limits: _Limits,
    spare: int,
) -> BenchRow:
    """The row of a test. spare: bytes of the cache that it does not need."""
    host, weights = llm.loaded.experts.host, facts.nbytes
    return BenchRow(
        model=facts,
        test=test,
        device=str(llm.loaded.device),
        backend=llm.runner.decoder.backend.name,
        threads=llm.loaded.threads,
        seconds=seconds,
        bytes_per_token=0 if test.prompt else bytes_per_token(llm, test.depth, test.generate, batch),
        bandwidth=limits.bandwidth,
        load_s=llm.loaded.load_s,
        peak_bytes=peak(llm.loaded.device) - spare,
        held_bytes=(weights - sum(host.values())) // llm.config.ranks + llm.loaded.cache.nbytes - spare,
        operations=0 if test.generate else prompt_operations(llm, test.depth, test.prompt),
        matrix_rate=limits.matrix_rate,
        kernels_per_step=llm.runner.kernels_per_step if test.generate else None,
        batch=batch,
        cache_type=llm.config.cache_type,
        deterministic=llm.config.deterministic,
        ranks=llm.config.ranks,
        split=llm.config.split,
        host_layers=len(host),
        host_bytes=sum(host.values()),
        placement=llm.loaded.experts.note() if llm.config.places_experts else "",
    )


def model_facts(checkpoint: Checkpoint) -> ModelFacts:
    """The facts of a model, counted from its tensors; nothing is taken from the file's name."""
    weights: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        weights[tensor.format.name] += prod(tensor.shape)
    total = weights.total()
    # Norms are always F32, and are not named.
    named = [kind for kind, count in weights.most_common() if count >= total / 1000]
    facts = ModelFacts(checkpoint.path.stem, str(checkpoint.path), checkpoint.nbytes, total, "+".join(named))
    experts = checkpoint.config.experts
    if experts is None:
        return facts
    counts = checkpoint_parameters(checkpoint)
    return replace(
        facts, active_params=counts.active_parameters, active_bytes=counts.active_bytes, experts=experts
    )
