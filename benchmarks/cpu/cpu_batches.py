"""Tokens per second of several texts at once on the CPU, by how many there are, beside llama.cpp's batched-bench.

    python benchmarks/cpu/cpu_batches.py [-m MODEL] [-b 1 4 8 16] [-p 128] [-n 32] [-r 3] [-t 2]
        [--llama-batched-bench PATH]

Generation only: every text has its prompt in the cache and one token; then `-n` steps of all of them are timed, with
the sampling (greedy) and the scheduling. The peer, which samples nothing, is asked for the same numbers in turns, so
that a machine whose speed drifts slows both. Medians and best samples; one JSON line at the end.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from quengine import LLM, SamplingParams
from quengine.errors import EngineError
from quengine.models.hub.hub import resolve_model
from quengine.platform.machine import cpu_model, physical_cores


def our_tok_s(llm: LLM, batch: int, prompt: int, steps: int) -> float:
    """Tokens a second in `steps` steps of `batch` texts of `prompt` tokens."""
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    prompts = [[100 + (7 * i + 31 * text) % 1000 for i in range(prompt)] for text in range(batch)]
    streams = [llm.stream(ids, params) for ids in prompts]
    try:
        for stream in streams:
            stream.start()
        while not all(stream.sequence.generated for stream in streams):
            llm.step()
        started = time.perf_counter()
        for _ in range(steps):
            assert len(llm.step()) == batch
        return batch * steps / (time.perf_counter() - started)
    finally:
        for stream in streams:
            stream.close()


def peer_tok_s(program: Path, model: Path, threads: int, batch: int, prompt: int, steps: int) -> float:
    sizes = {
        "-npp": prompt,
        "-ntg": steps,
        "-npl": batch,
        "-c": 256 + batch * (prompt + steps),
        "-t": threads,
    }
    words = [str(word) for pair in sizes.items() for word in pair]
    command = [str(program), "-m", str(model), *words, "-ngl", "0", "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    row = json.loads(line)
    return batch * steps / float(row["t_tg"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Texts at once on one processor.")
    parser.add_argument("-m", "--model", default="smollm2-135m", help="alias, hf: name or GGUF file")
    parser.add_argument("-b", type=int, nargs="+", default=[1, 4, 8, 16], help="numbers of texts")
    parser.add_argument("-p", type=int, default=128, help="prompt length")
    parser.add_argument("-n", type=int, default=32, help="steps that are timed")
    parser.add_argument("-r", type=int, default=3, help="rounds")
    parser.add_argument("-t", type=int, default=physical_cores(), help="threads")
    parser.add_argument("--llama-batched-bench", type=Path, help="the peer's program")
    return parser.parse_args()


def measure(args: argparse.Namespace, model: Path) -> dict[str, dict[int, list[float]]]:
    """Samples in tok/s by engine and number of texts; the first round warms up."""
    samples: dict[str, dict[int, list[float]]] = {"quengine": {b: [] for b in args.b}}
    if args.llama_batched_bench is not None:
        samples["llama_cpp"] = {b: [] for b in args.b}
    # Chunks of prompts take turns with steps: the texts that begin first are further when the last one has begun.
    positions = args.p + args.n + 4 * max(args.b)
    with LLM(model, "cpu", positions, args.t, parallel=max(*args.b, 2)) as llm:
        for turn in range(args.r + 1):
            for batch in args.b:
                for engine, held in samples.items():
                    if engine == "quengine":
                        speed = our_tok_s(llm, batch, args.p, args.n)
                    else:
                        speed = peer_tok_s(args.llama_batched_bench, model, args.t, batch, args.p, args.n)
                    if turn > 0:
                        held[batch].append(speed)
                        print(
                            f"{turn}/{args.r}  {batch:3} texts  {engine:10} {speed:9.1f} tok/s",
                            file=sys.stderr,
                        )
    return samples


def main() -> int:
    args = arguments()
    try:
        model = resolve_model(args.model)
        samples = measure(args, model)
    except EngineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{model.name}, {args.t} threads, {cpu_model()}; tok/s, medians (best)")
    single = {engine: median(held[args.b[0]]) for engine, held in samples.items()}
    for batch in args.b:
        cells = []
        for engine, held in samples.items():
            speed, best = median(held[batch]), max(held[batch])
            cells.append(f"{engine} {speed:7.1f} ({best:7.1f}), {speed / single[engine]:4.1f}x")
        print(f"{batch:3} texts   " + "   ".join(cells))
    facts = {"model": model.name, "threads": args.t, "cpu": cpu_model(), "prompt": args.p, "steps": args.n}
    print(json.dumps({"benchmark": "cpu_batches", **facts, "tok_s": samples}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
