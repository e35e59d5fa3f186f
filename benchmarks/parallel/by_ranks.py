"""Tokens a second and step times of models that some numbers of GPUs share, each loaded once for all tests.

    python -m benchmarks.parallel.by_ranks mistral-7b llama-3-70b-8l --ranks 1,2,4 [--batches 1,8,64] [--profile]

Logits after a prompt are compared with those of the first number of GPUs. `--profile` also prints rank 0's kernels: a
decode step of each batch, and one prompt. A kernel that sums over the ranks counts the time that it waits for the
others.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from quengine.config import EngineConfig
from quengine.diagnostics.bench.bench_plan import BenchPlan, BenchTest
from quengine.diagnostics.bench.bench_time import random_prompts, time_batch
from quengine.diagnostics.bench.profile import Profile, format_profile, profile_decode, profile_prompt
from quengine.diagnostics.bench.synthetic_files import synthetic_models
from quengine.diagnostics.harness import loaded, nmse
from quengine.errors import EngineError
from quengine.llm import LLM

GENERATED = 64
"""Tokens of each sequence of a batch that are timed."""

CHECKED = 1300
"""Tokens of the prompt whose logits are compared."""

KERNELS = 14
"""Rows of a profile."""


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def measure(llm: LLM, args: argparse.Namespace, began: float) -> None:
    """All tests of one loaded model."""

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f} s] {what}", flush=True)

    for batch in args.batches:
        seconds = list(
            time_batch(llm, BenchTest(0, GENERATED), batch, args.repetitions, True, lambda _: None)
        )
        took = median(seconds)
        say(
            f"{batch:3d} sequences {batch * GENERATED / took:8,.1f} tok/s, step {took / GENERATED * 1e6:8.1f} us"
        )
        if args.profile:
            show(profile_decode(llm, random_prompts(llm, batch, 8))[0])
    for prompt in (each for each in args.prompts if each < llm.loaded.cache.ctx_size):
        test = BenchTest(prompt, 0)
        took = median(time_batch(llm, test, 1, args.repetitions, True, lambda _: None))
        say(f"pp{prompt} {prompt / took:8,.0f} tok/s, {took * 1e3:.1f} ms")
        if args.profile and prompt == args.profiled_prompt:
            show(profile_prompt(llm, random_prompts(llm, 1, prompt)[0], 0)[0])


def prompt_logits(llm: LLM) -> torch.Tensor:
    """Logits of the last of CHECKED rows of a prompt."""
    (ids,) = random_prompts(llm, 1, CHECKED)
    return llm.runner.logits(ids, 0, "prefill")[-64:].clone()


def show(profile: Profile) -> None:
    print("\n".join(format_profile(profile, KERNELS)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="synthetic models, such as mistral-7b or llama-3-70b-8l")
    parser.add_argument("--folder", type=Path, help="where these are kept")
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64])
    parser.add_argument("--prompts", type=numbers, default=[512, 2048, 16384])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--chunk", type=int, help="most rows of a prompt in a step")
    parser.add_argument("--only-write", action="store_true", help="only write the models' files")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--profiled-prompt", type=int, default=2048)
    args = parser.parse_args()
    began, most = time.perf_counter(), max([CHECKED, *args.prompts]) + 256
    plan = BenchPlan((), (BenchTest(0, GENERATED),), ranks=(max(args.ranks),))
    for name in args.models:
        logits: torch.Tensor | None = None
        with synthetic_models([name], plan, args.folder, print, lambda _: None) as (path,):
            for ranks in [] if args.only_write else args.ranks:
                if ranks > max(torch.cuda.device_count(), 1):
                    continue
                sizes = {"ctx_size": most, "parallel": max([1, *args.batches]), "tensor_parallel": ranks}
                if args.chunk:
                    sizes["chunk_size"] = args.chunk
                try:
                    with loaded(path, EngineConfig(), reuse_prefix=True, **sizes) as llm:
                        print(f"[{time.perf_counter() - began:5.1f} s] {name} on {ranks} GPUs", flush=True)
                        found = prompt_logits(llm)
                        logits = found if logits is None else logits
                        print(f"logits differ by {nmse(found, logits):.1e} NMSE", flush=True)
                        measure(llm, args, began)
                except EngineError as error:
                    print(f"{name} on {ranks} GPUs: {error}", flush=True)


if __name__ == "__main__":
    main()
