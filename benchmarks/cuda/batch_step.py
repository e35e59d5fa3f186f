"""A batched decode step in its graph, on a synthetic Mistral-7B Q4_K_M: time a step, and where it goes.

    python benchmarks/cuda/batch_step.py MODEL.gguf [--batches 1,8,32,64] [--depth 256] [--json FILE]

Sequences of one length decode greedily. "step" is the graph with the copy of its tokens, launched one behind the other;
"call" is one `ModelRunner.decode`, a step ahead. Kernels are the profiler's, per step.
"""

import argparse
import json
import time
from collections import deque
from pathlib import Path

import torch

from quengine import LLM, SamplingParams
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.model_runner import ModelRunner
from quengine.request.sequence import Sequence
from quengine.request.text_stream import TextStream
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.graph_keys import GREEDY
from quengine.sampler import Sample, Sampler
from quengine.slot import Slot
from quengine.step_plan import StepPlan

STEPS = 20


def decoding(llm: LLM, batch: int, depth: int) -> list[Sequence]:
    """Sequences whose cache holds `depth` tokens; what they are does not matter to the time."""
    params = SamplingParams(temperature=0, ignore_eos=True, seed=1)
    blocks = (depth + 4 * STEPS) // BLOCK_SIZE + 2
    made = []
    for number in range(batch):
        sequence = Sequence(
            [(7 * number + i) % 1000 for i in range(depth + 1)],
            params,
            Sampler(params, llm.model_config.vocab_size),
            TextStream(lambda _: b""),
            frozenset(),
            llm.ctx_size,
        )
        sequence.num_cached_tokens = depth
        sequence.slot = Slot(number)
        sequence.block_tables = (list(range(1 + number * blocks, 1 + (number + 1) * blocks)),)
        made.append(sequence)
    return made


def run(runner: ModelRunner, sequences: list[Sequence], count: int) -> None:
    """Runs `count` steps, each launched before the tokens of the one before it are read."""
    in_flight = deque[StepPlan]()
    for number in range(count + 1):
        if number < count:
            in_flight.append(runner.launch(StepPlan.decode(sequences)))
        if number:
            take(sequences, in_flight.popleft())


def take(sequences: list[Sequence], step: StepPlan) -> None:
    for sequence, result in zip(sequences, step.results(), strict=True):
        assert isinstance(result, Sample), result
        sequence.slot.launched -= 1
        sequence.num_cached_tokens += 1
        sequence.token_ids.append(result.token)


def measure(llm: LLM, batch: int, depth: int) -> dict[str, object]:
    runner, graphs = llm.runner, llm.runner.graphs
    assert isinstance(graphs, CudaGraphs)
    sequences = decoding(llm, batch, depth)
    run(runner, sequences, 4)
    torch.cuda.synchronize()
    began = time.perf_counter()
    run(runner, sequences, STEPS)
    torch.cuda.synchronize()
    call_ms = (time.perf_counter() - began) / STEPS * 1e3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(runner, sequences, STEPS)
        torch.cuda.synchronize()
    kernels: dict[str, float] = {}
    for event in profile.key_averages():
        kernels[event.key] = event.self_device_time_total / STEPS / 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    slots = [sequence.slot for sequence in sequences]
    start.record()
    for _ in range(STEPS):  # the rows go on by themselves
        graphs.launch(slots, {}, GREEDY)
    end.record()
    end.synchronize()
    step_ms = start.elapsed_time(end) / STEPS
    shares = sorted(kernels.items(), key=lambda item: -item[1])[:12]
    return {"batch": batch, "depth": depth, "step_ms": step_ms, "call_ms": call_ms, "kernels": dict(shares)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--depth", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(part) for part in args.batches.split(",")]
    results = []
    with LLM(args.model, "cuda", 512, parallel=max(2, *batches)) as llm:
        for batch in batches:
            row = measure(llm, batch, args.depth)
            results.append(row)
            print(f"batch {batch}: step {row['step_ms']:.3f} ms, call {row['call_ms']:.3f} ms", flush=True)
            for name, ms in row["kernels"].items():  # type: ignore[attr-defined]
                print(f"    {ms:8.3f} ms  {name[:70]}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({"benchmark": "batch_step", "batches": batches}))


if __name__ == "__main__":
    main()
