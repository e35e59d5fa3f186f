"""Experts in host memory: tokens a second by the share of experts that the GPU holds, with a router that prefers some.

    python -m benchmarks.cuda.hot_experts [-m qwen3-30b-a3b-8l] [--skew 30] [--shares 0 10 20 40] [--batch 1 8]
        [--prompt 512] [--rounds 3] [--copies] [--folder DIR]

Writes a synthetic model whose routers prefer every tenth expert: with a skew of 30 these have some 80% of the uses,
with 1 a tenth. For each share it is loaded with --cpu-moe, generates until the experts on the GPU have settled and
steps take as long as before, and then in rounds; at last with all experts on the GPU. Answers are as long as a third of
a second takes. Printed are milliseconds of a step and of a prompt, and the share of uses whose experts the GPU had.
--copies also measures experts that exchange rows with the GPU by copies of the host, launch by launch.
"""

import argparse
import gc
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.moe.expert_counts import ExpertCounts
from quengine.kernels.moe.host_experts import HostExperts
from quengine.llm import LLM
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.platform.host_experts import ExpertPlacement
from quengine.request.sampling_params import SamplingParams

SETTLING = 256
"""Tokens that are generated before anything is timed."""
LEAST_SECONDS, MOST_TOKENS = 0.33, 1024
"""Limits of a timed answer: a step with all experts on the GPU takes 0.3 ms, and the time before the first step is only
known to some milliseconds."""
ALIKE, MOST_TURNS = 0.05, 12
"""If two timings of a step differ by less than this share, nothing is compiled any more."""


def sampled(tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=seed)


def prompts(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    made = torch.Generator().manual_seed(seed)
    vocab = llm.loaded.checkpoint.config.vocab_size
    return torch.randint(10, vocab - 10, (count, length), generator=made).tolist()


def step_ms(llm: LLM, batch: int, seed: int) -> float:
    """Milliseconds of a decode step of `batch` sequences: the difference of a long and a short answer, a step."""

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        llm.generate(prompts(llm, batch, 8, seed), sampled(tokens, seed))
        return time.perf_counter() - began

    tokens = 32
    while (whole := seconds(tokens)) < LEAST_SECONDS and tokens < MOST_TOKENS:
        tokens *= 2
    return 1e3 * (whole - seconds(tokens // 4)) / (tokens - tokens // 4)


def settle(llm: LLM, batch: int) -> None:
    """Generates until the experts on the GPU have settled, and steps take as long as the time before."""
    llm.generate(prompts(llm, batch, 8, 1), sampled(SETTLING // batch, 1))
    before = step_ms(llm, batch, 1)
    for _ in range(MOST_TURNS):
        before, last = step_ms(llm, batch, 1), before
        if abs(before - last) < ALIKE * last:
            return


def prompt_ms(llm: LLM, length: int, seed: int) -> float:
    began = time.perf_counter()
    llm.generate(prompts(llm, 1, length, seed), sampled(1, seed))
    return 1e3 * (time.perf_counter() - began)


def counts_of(llm: LLM) -> ExpertCounts:
    experts = llm.runner.decoder.host_experts
    return (None if experts is None else experts.counts) or ExpertCounts()


def measure(llm: LLM, options: argparse.Namespace, label: str) -> None:
    """Prints a row of the table."""
    batches, lengths = options.batch, options.prompt
    for batch in batches:
        settle(llm, batch)
    for length in lengths:
        prompt_ms(llm, length, 1)
    before = counts_of(llm)
    figures = [median(step_ms(llm, batch, 2 + n) for n in range(options.rounds)) for batch in batches]
    figures += [median(prompt_ms(llm, length, 2 + n) for n in range(options.rounds)) for length in lengths]
    after = counts_of(llm)
    uses = after.device_uses - before.device_uses, after.host_uses - before.host_uses
    share = f"{100 * uses[0] / sum(uses):5.1f}%" if sum(uses) else ""
    print(
        f"{label:>10} " + " ".join(f"{each:9.3f}" for each in figures) + f" {share:>7} {after.replaced:8d}",
        flush=True,
    )


def copied(placement: ExpertPlacement, device: object, threads: int, *_: object) -> HostExperts:
    """In place of `ExpertPlacement.operations`: rows are copied by the host."""
    return HostExperts(device, CpuBackend(threads), placement.layers)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="qwen3-30b-a3b-8l")
    parser.add_argument("--skew", type=float, default=30.0)
    parser.add_argument("--shares", type=int, nargs="+", default=[0, 10, 20, 40])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, nargs="*", default=[512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    spec = synthetic_preset(options.model)
    if spec is None or not spec.experts:
        raise SystemExit(f"{options.model} is no synthetic model with experts")
    with TemporaryDirectory() as folder:
        path = (options.folder or Path(folder)) / f"{options.model}-skew{options.skew:g}.gguf"
        if not path.exists():
            write_synthetic(path, replace(spec, router_skew=options.skew))
        titles = [f"{batch} seq." for batch in options.batch] + [f"pp{length}" for length in options.prompt]
        print(
            f"{'on the GPU':>10} " + " ".join(f"{title:>9}" for title in titles) + "    hits replaced   (ms)"
        )
        common = {"device": options.device, "cpu_moe": True, "parallel": max(options.batch), "ctx_size": 2048}
        if options.copies:
            with (
                patch.object(ExpertPlacement, "operations", copied),
                LLM(path, **common, gpu_experts=0) as llm,
            ):
                measure(llm, options, "copies")
            release(llm)
        for share in options.shares:
            with LLM(path, **common, gpu_experts=-(-spec.experts * share // 100)) as llm:
                measure(llm, options, f"{share}%")
            release(llm)
        with LLM(path, **common | {"cpu_moe": False}) as llm:
            measure(llm, options, "all")
        release(llm)


def release(llm: LLM) -> None:
    """Frees what a closed model held."""
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
