"""What a rank other than rank 0 does with a message: the call of its runner that rank 0 makes of its own."""

from collections.abc import Mapping, Sequence

import torch

from quengine.model_runner import ModelRunner
from quengine.models.experts import MixtureOfExperts
from quengine.parallel.cached_rows import read_rank_rows, write_rank_rows
from quengine.parallel.wire import (
    Capture,
    ChooseExperts,
    Configure,
    CopyBlocks,
    Forward,
    Graphs,
    Hidden,
    LaunchDecode,
    Message,
    Parts,
    Prefill,
    Prompts,
    ReadCache,
    WriteCache,
)
from quengine.step_plan import GivenRows


def run(runner: ModelRunner, message: Message) -> None:
    """Compute this rank's part of a step."""
    match message:
        case Forward(phase, rows, all_logits, eager, embedded, spans):
            runner.forward(phase, rows, all_logits, eager, GivenRows(embedded, None, spans))
            _choose(runner, {})
        case Hidden(rows, embedded, spans):
            runner.hidden(rows, GivenRows(embedded, None, spans))
        case Parts(rows, parts, embedded, spans):
            for _ in runner.logits_of_parts(rows, parts, GivenRows(embedded, None, spans)):
                pass
        case ReadCache(start, end):
            read_rank_rows(runner, start, end)
        case WriteCache(start, end):
            write_rank_rows(runner, start, end, None)
        case CopyBlocks(copies):
            runner.copy_blocks(copies)
        case ChooseExperts(experts):
            _choose(runner, experts)
        case _:
            _run_graphs(runner, message)


def _run_graphs(runner: ModelRunner, message: Graphs) -> None:
    """On a CUDA device: what is captured, with the tokens chosen by every rank for itself, from the same logits."""
    from quengine.kernels.cuda.sampling.sampling import SamplingSettings
    from quengine.runners.cuda_graphs import CudaGraphs

    graphs = runner.graphs
    assert isinstance(graphs, CudaGraphs)
    match message:
        case LaunchDecode(key, changes):
            graphs.inputs.changes.update(changes)
            graphs.launch(key)
        case Prefill(rows, slots, kind):
            graphs.prefill(rows, slots, kind)
        case Configure(slot, kind, settings, bias, ids, total):
            made = SamplingSettings(**settings)  # type: ignore[arg-type]
            graphs.set_sampling(slot, kind, made, dict(bias), list(ids), total)
        case Capture(key):
            graphs.capture(key)
        case Prompts(lengths):
            graphs.run_prompts(lengths)


def _choose(runner: ModelRunner, experts: Mapping[int, Sequence[Sequence[int]]]) -> None:
    """Give the layers the experts of their rows; those that are not named let their routers choose."""
    device, first = runner.decoder.backend.device, runner.decoder.config.held_layers.start
    for layer, block in enumerate(runner.decoder.blk, first):
        if isinstance(block.ffn, MixtureOfExperts):
            rows = experts.get(layer)
            given = None if rows is None else torch.tensor(rows, dtype=torch.int32, device=device)
            block.ffn.chosen = given
