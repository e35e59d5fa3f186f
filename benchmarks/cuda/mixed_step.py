"""What it would save to compute the rows of a decode step within a step of prompts, on a synthetic Mistral-7B Q4_K_M.

    python -m benchmarks.cuda.mixed_step MODEL.gguf [--prompts 512 1024] [--decoding 16 64 128] [--depth 400]

"prompt" is a step of prompts' chunks of 256 tokens, "decode" the captured step of so many sequences with greedy
sampling, "mixed" one prefill step with the rows of both, where every decoding sequence is a chunk of one row. All times
are the device's, of steps launched one behind the other, medians in turns. "saved" is by how much mixed is shorter than
both. In mixed, sampling and the reading of the newest tokens on the device are left out: it would take a little longer.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.cuda.batch_step import decoding, run
from quengine import LLM
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.step_plan import SequenceRows

CHUNK = 256
"""Tokens of each prompt."""
STEPS = 8
ROUNDS = 5


def milliseconds(step: Callable[[int], object]) -> float:
    """Device time of one of STEPS steps; step(n) launches n."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step(2)
    torch.cuda.synchronize()
    began.record()
    step(STEPS)
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / STEPS


def prompt_rows(count: int, first_block: int) -> list[SequenceRows]:
    """Chunks of CHUNK tokens, `count` tokens together, whose blocks begin with number `first_block`."""
    blocks = CHUNK // BLOCK_SIZE
    return [
        SequenceRows(
            [(13 * number + i) % 1000 for i in range(CHUNK)],
            0,
            ([first_block + number * blocks + i for i in range(blocks)],),
        )
        for number in range(count // CHUNK)
    ]


def measure(llm: LLM, prompt: int, streams: int, depth: int) -> None:
    runner = llm.runner
    sequences = decoding(llm, streams, depth)
    last = max(block for sequence in sequences for block in sequence.block_tables[0])
    prompts = prompt_rows(prompt, last + 1)
    tokens = [SequenceRows([each.token_ids[depth]], depth, each.block_tables) for each in sequences]

    def prefill(rows: list[SequenceRows]) -> Callable[[int], None]:
        def launch(count: int) -> None:
            for _ in range(count):
                runner.forward("prefill", rows)

        return launch

    def decode(count: int) -> None:
        run(runner, sequences, count)

    kinds = {"prompt": prefill(prompts), "decode": decode, "mixed": prefill([*tokens, *prompts])}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, launch in kinds.items():
            times[name].append(milliseconds(launch))
    alone, together, mixed = (statistics.median(times[name]) for name in kinds)
    print(
        f"{prompt:5d} prompt tokens, {streams:3d} decoding: prompt {alone:.2f} ms, decode {together:.2f}, mixed "
        f"{mixed:.2f}; saved {alone + together - mixed:.2f} ms, {100 * (1 - mixed / (alone + together)):.0f}%",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--decoding", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--depth", type=int, default=400)
    given = parser.parse_args()
    with LLM(given.model, device="cuda", ctx_size=given.depth + 256, parallel=max(given.decoding) + 8) as llm:
        llm.warm_up()
        for prompt in given.prompts:
            for streams in given.decoding:
                measure(llm, prompt, streams, given.depth)


if __name__ == "__main__":
    main()
