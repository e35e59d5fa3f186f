"""What launching kernels directly saves: eager prompts with `DirectLaunch` and with Triton's own launcher, in turns.

    python benchmarks/cuda/launch_cost.py MODEL [--tokens 1200 2048 4096] [--rounds 9]

"host" is the time until all launches of the step are made, "step" until the GPU has finished: medians, in ms. Where
"step" is the same both ways, direct launches save nothing but the host's time. In use, prompts of up to 1024 tokens are
captured graphs; here they run eagerly too.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from quengine import LLM
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE

DIRECT = DirectLaunch._launch


def by_triton(
    kernel: DirectLaunch,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
    _key: object,
) -> None:
    kernel.kernel[grid](*kernel._described(arguments), **named)


@torch.no_grad()
def step(llm: LLM, tokens: int) -> tuple[float, float]:
    """Seconds of the host, and of the step, of a prompt in chunks as long as the decoder takes."""
    runner = llm.runner
    table = list(range(-(-tokens // BLOCK_SIZE)))
    ids = [(7 * i) % 1000 for i in range(tokens)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for start in range(0, tokens, runner.decoder.chunk_size):
        chunk = ids[start : start + runner.decoder.chunk_size]
        batch = prefill_batch([chunk], [start], [[table]], runner.decoder.backend.device)
        runner.decoder.forward(batch, runner.cache.layers)
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return launched - began, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1200, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    ways = {"direct": DIRECT, "by Triton": by_triton}
    with LLM(args.model, device="cuda", ctx_size=max(args.tokens) + BLOCK_SIZE) as llm:
        for tokens in args.tokens:
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for turn in range(args.rounds + 2):  # the first two compile
                for name, way in ways.items():
                    DirectLaunch._launch = way  # type: ignore[method-assign]
                    measured = step(llm, tokens)
                    if turn >= 2:
                        times[name].append(measured)
            for name, measured_times in times.items():
                host, whole = (
                    1e3 * statistics.median(column) for column in zip(*measured_times, strict=True)
                )
                print(f"{tokens} tokens, {name}: host {host:.2f} ms, step {whole:.2f} ms", flush=True)
    DirectLaunch._launch = DIRECT  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
