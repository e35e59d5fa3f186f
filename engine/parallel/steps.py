"""Runs a message on a rank other than rank 0: makes the same call of its runner that rank 0 makes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from quengine.model_runner import ModelRunner
from quengine.models.experts import MixtureOfExperts
from quengine.parallel.cached_rows import send_cached, write_rank_rows
from quengine.parallel.wire import (
    Capture,
    ChooseExperts,
    Configure,
    CopyBlocks,
    Graphs,
    LaunchDecode,
    Message,
    ObserveInputs,
    PlannedStep,
    Prompts,
    ReadCache,
    SetAdapters,
    WriteCache,
    WriteSums,
)

if TYPE_CHECKING:
    from quengine.parallel.observed_inputs import ObservedInputs
    from quengine.runners.cuda_graphs import CudaGraphs


def run(runner: ModelRunner, message: Message) -> None:
    """Compute this rank's part of a step."""
    match message:
        case PlannedStep():
            _compute(runner, message)
        case ReadCache(start, end):
            send_cached(runner, start, end)
        case WriteCache(start, end):
            write_rank_rows(runner, start, end, None)
        case CopyBlocks(copies):
            runner.copy_blocks(copies)
        case ChooseExperts(experts):
            _choose(runner, experts)
        case ObserveInputs(number, on):
            _observed(runner).observe(number, on)
        case WriteSums(folder):
            _observed(runner).write(folder)
        case _:
            _run_graphs(runner, message)


def _compute(runner: ModelRunner, step: PlannedStep) -> None:
    """Compute the rows of a plan as rank 0 does."""
    match step.output:
        case "hidden rows":
            runner.hidden(step.rows, step.given)
        case "logits of parts":
            for _ in runner.logits_of_parts(step.rows, step.parts, step.given):
                pass
        case "tokens":
            assert step.kind is not None
            _graphs(runner).prefill(step.rows, step.slots, step.kind, (), step.given)
        case _:
            all_logits = step.output == "all logits"
            runner.forward(step.phase, step.rows, all_logits, step.eager, step.given)
            _choose(runner, {})


def _observed(runner: ModelRunner) -> "ObservedInputs":
    assert runner.observed is not None
    return runner.observed


def _graphs(runner: ModelRunner) -> "CudaGraphs":
    """The captured steps of a CUDA device."""
    from quengine.runners.cuda_graphs import CudaGraphs

    assert isinstance(runner.graphs, CudaGraphs)
    return runner.graphs


def _run_graphs(runner: ModelRunner, message: Graphs) -> None:
    """Run what concerns the captured steps; each rank samples the same tokens by itself, from the same logits."""
    from quengine.kernels.cuda.sampling.sampling import SamplingSettings

    graphs = _graphs(runner)
    match message:
        case LaunchDecode(key, changes):
            graphs.inputs.changes.update(changes)
            step = graphs.decode_step(key)
            graphs.inputs.send()
            step.graph.replay()
        case Configure(slot, kind, settings, bias, ids, total):
            made = SamplingSettings(**settings)  # type: ignore[arg-type]
            graphs.set_sampling(slot, kind, made, dict(bias), list(ids), total)
        case SetAdapters(slot, scales):
            graphs.inputs.set_adapters(slot, None if scales is None else tuple(scales))
        case Capture(key):
            graphs.capture(key)
        case Prompts(lengths):
            graphs.run_prompts(lengths)


def _choose(runner: ModelRunner, experts: Mapping[int, Sequence[Sequence[int]]]) -> None:
    """Gives the named layers the experts of their rows; in all others the routers choose."""
    device, first = runner.decoder.backend.device, runner.decoder.config.held_layers.start
    for layer, block in enumerate(runner.decoder.blk, first):
        if isinstance(block.ffn, MixtureOfExperts):
            rows = experts.get(layer)
            given = None if rows is None else torch.tensor(rows, dtype=torch.int32, device=device)
            block.ffn.chosen = given
