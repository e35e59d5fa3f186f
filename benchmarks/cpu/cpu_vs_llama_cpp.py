"""quengine and llama.cpp on the same file and the same processor, in turns.

    python benchmarks/cpu/cpu_vs_llama_cpp.py [-m MODEL | --synthetic PRESET] [-p 512] [-n 64] [-r 5] [-s SECONDS]
        [-t 2] [-d DEPTH] [--no-mmap] [--llama-bench PATH]

Each engine lives in a process of its own, loaded once, and the parent asks them in turns: a machine whose
speed drifts slows both. Medians, their ratio, and one JSON line at the end. The peer is the package
xllamacpp, which is llama.cpp's server as a library, or any build of llama.cpp given by its llama-bench
program, which alone can time what comes after a depth of tokens in the cache. Which instruction sets the peer
uses is printed (of a program: which ones its code contains): a build without this processor's fastest ones is
not llama.cpp at its best. Beside the medians stand the best samples, the ones that a busy machine disturbed
least.
"""

import argparse
import importlib.util
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from quengine.config import EngineConfig
from quengine.diagnostics.bench.bench_plan import BenchPlan, BenchTest
from quengine.diagnostics.bench.bench_time import batch_positions, time_batch
from quengine.diagnostics.bench.synthetic_files import synthetic_models
from quengine.errors import EngineError
from quengine.models.hub.hub import resolve_model
from quengine.platform.machine import cpu_model, peak_memory, physical_cores, simd_features

INSTALL_PEER = "pip install xllamacpp, or build llama.cpp and give --llama-bench PATH"

# Linux's name of an instruction set that matters to 4-bit products -> llama.cpp's name of it.
PEER_SIMD = {
    "avx2": "AVX2",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
}


class Engine(Protocol):
    """Something that can be timed: seconds for `prompt` tokens, or to generate `count`, after its depth."""

    facts: dict[str, Any]

    def prompt_seconds(self, prompt: int) -> float: ...

    def generate_seconds(self, count: int) -> float: ...


class Quengine:
    """Our side, as `engine bench` times it."""

    def __init__(self, model: Path, threads: int, positions: int, depth: int, mmap: bool) -> None:
        from quengine import LLM, __version__

        self.depth = depth
        self.llm = LLM(model, "cpu", positions, threads, reuse_prefix=True, mmap=mmap)
        self.facts = {"version": __version__, "simd": list(simd_features()), "load_s": self.llm.loaded.load_s}

    def prompt_seconds(self, prompt: int) -> float:
        return self._seconds(prompt, 0)

    def generate_seconds(self, count: int) -> float:
        return self._seconds(0, count)

    def _seconds(self, prompt: int, count: int) -> float:
        (seconds,) = time_batch(self.llm, BenchTest(prompt, count, self.depth), 1, 1, False, lambda _: None)
        return seconds


class LlamaServer:
    """llama.cpp through xllamacpp: its server's own timings, without HTTP."""

    def __init__(self, model: Path, threads: int, positions: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx = positions + 8
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_gpu_layers = 0
        params.cache_prompt = False
        params.cache_ram_mib = 0
        params.verbosity = -1
        self.server = xllamacpp.Server(params)
        self.facts = {
            "package": "xllamacpp",
            "version": version("xllamacpp"),
            "simd": reported_simd(xllamacpp.get_system_info()),
        }

    def prompt_seconds(self, prompt: int) -> float:
        timings = self._complete(prompt, 1)
        if timings["prompt_n"] != prompt:
            raise RuntimeError(f"llama.cpp computed {timings['prompt_n']} of {prompt} prompt tokens")
        return float(timings["prompt_ms"]) / 1e3

    def generate_seconds(self, count: int) -> float:
        # The first token comes out of the prompt, so one more is asked for.
        timings = self._complete(1, count + 1)
        if timings["predicted_n"] != count + 1:
            raise RuntimeError(f"llama.cpp generated {timings['predicted_n']} of {count + 1} tokens")
        return float(timings["predicted_ms"]) / 1e3

    def _complete(self, prompt: int, count: int) -> dict[str, Any]:
        request = {
            "prompt": [100 + i % 1000 for i in range(prompt)],
            "n_predict": count,
            "ignore_eos": True,
            "cache_prompt": False,
            "top_k": 1,
        }
        timings: dict[str, Any] = self.server.handle_completions(request)["timings"]
        return timings


class LlamaBench:
    """Any build of llama.cpp through its llama-bench program; it loads the model anew for every sample."""

    def __init__(self, program: Path, model: Path, threads: int, depth: int) -> None:
        self.command = [
            str(program),
            "-m",
            str(model),
            "-t",
            str(threads),
            "-ngl",
            "0",
            "-d",
            str(depth),
            "-r",
            "1",
            "-o",
            "json",
        ]
        self.facts: dict[str, Any] = {
            "package": program.name,
            "version": "",
            "simd": simd_in_program(program),
        }

    def prompt_seconds(self, prompt: int) -> float:
        return prompt / self._tok_s(prompt, 0)

    def generate_seconds(self, count: int) -> float:
        return count / self._tok_s(0, count)

    def _tok_s(self, prompt: int, count: int) -> float:
        done = subprocess.run(
            [*self.command, "-p", str(prompt), "-n", str(count)], capture_output=True, text=True, check=True
        )
        (row,) = json.loads(done.stdout)
        self.facts["version"] = f"{row['build_number']} ({row['build_commit']})"
        return float(row["avg_ts"])


def reported_simd(system_info: str) -> list[str]:
    """The instruction sets a line such as "CPU : AVX = 1 | AVX2 = 1 | OPENMP = 1 |" says are used."""
    words = (part.split("=") for part in system_info.replace(":", "|").split("|") if "=" in part)
    switches = {"OPENMP", "REPACK", "LLAMAFILE", "ACCELERATE"}
    return [name.strip() for name, value in words if value.strip() == "1" and name.strip() not in switches]


def simd_in_program(program: Path) -> list[str]:
    """The instruction sets, under llama.cpp's names, that an x86 program's code uses; empty without objdump."""
    marks = {
        "AVX2": "%ymm",
        "FMA": "vfmadd",
        "AVX512": "%zmm",
        "AVX512_VNNI": "vpdpbusd",
        "AVX512_BF16": "vdpbf16ps",
        "AMX_INT8": "tdpb",
    }
    found: set[str] = set()
    try:
        listing = subprocess.Popen(
            ["objdump", "-d", "--no-show-raw-insn", str(program)], stdout=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        return []
    assert listing.stdout is not None
    with listing:
        for line in listing.stdout:
            found.update(name for name, mark in marks.items() if mark in line)
    return [name for name in marks if name in found]


@dataclass(frozen=True)
class Setup:
    """How a child process makes its engine; `llama_bench` None: the package."""

    ours: bool
    model: Path
    threads: int
    positions: int
    depth: int
    llama_bench: Path | None
    mmap: bool

    def make(self) -> Engine:
        if self.ours:
            return Quengine(self.model, self.threads, self.positions, self.depth, self.mmap)
        if self.llama_bench is not None:
            return LlamaBench(self.llama_bench, self.model, self.threads, self.depth)
        return LlamaServer(self.model, self.threads, self.positions)


def serve(setup: Setup, pipe: Connection) -> None:
    """A child process: make the engine, answer requests ("prompt" | "generate", tokens) until there are
    none.
    """
    engine = setup.make()
    pipe.send(engine.facts)
    while (request := pipe.recv()) is not None:
        kind, count = request
        seconds = engine.prompt_seconds(count) if kind == "prompt" else engine.generate_seconds(count)
        pipe.send((seconds, engine.facts | {"peak_bytes": peak_memory()}))


@contextmanager
def child(setup: Setup) -> Iterator[Connection]:
    """The parent's end of the pipe to a child that has loaded its model."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(setup, theirs))
    process.start()
    theirs.close()
    try:
        yield ours
        ours.send(None)
    finally:
        ours.close()
        process.join(30)
        if process.is_alive():
            process.terminate()


def compare(
    setups: dict[str, Setup], tests: dict[str, tuple[str, int]], rounds: int, seconds: float
) -> dict[str, Any]:
    """Samples in tok/s, by test and engine; every engine warms up on every test first.

    After so many seconds no round is begun, but for the first.
    """
    start = time.monotonic()
    with child(setups["quengine"]) as ours, child(setups["llama_cpp"]) as peer:
        pipes = {"quengine": ours, "llama_cpp": peer}
        facts = {name: pipe.recv() for name, pipe in pipes.items()}
        samples: dict[str, dict[str, list[float]]] = {test: {name: [] for name in pipes} for test in tests}
        for turn in range(rounds + 1):
            if turn > 1 and time.monotonic() - start > seconds:
                break
            for test, request in tests.items():
                for name, pipe in pipes.items():
                    pipe.send(request)
                    took, facts[name] = pipe.recv()
                    if turn > 0:
                        samples[test][name].append(request[1] / took)
                        print(
                            f"{turn}/{rounds}  {test:8} {name:10} {request[1] / took:9.1f} tok/s",
                            file=sys.stderr,
                        )
    return {"facts": facts, "samples": samples}


def report(measured: dict[str, Any], model: Path, threads: int) -> dict[str, Any]:
    """Print the table; the result is the JSON line."""
    facts, tests = measured["facts"], {}
    print(f"{model.name}, {threads} threads, {cpu_model()}")
    columns = f"{'quengine':>10} {'llama.cpp':>10} {'ratio':>6}"
    print(f"{'test':8} {columns}   medians {columns}   best samples, tok/s")
    for test, by_engine in measured["samples"].items():
        ours, peer = median(by_engine["quengine"]), median(by_engine["llama_cpp"])
        best, peer_best = max(by_engine["quengine"]), max(by_engine["llama_cpp"])
        print(
            f"{test:8} {ours:10.1f} {peer:10.1f} {ours / peer:6.2f}           "
            f"{best:10.1f} {peer_best:10.1f} {best / peer_best:6.2f}"
        )
        tests[test] = {
            "quengine": ours,
            "llama_cpp": peer,
            "ratio": ours / peer,
            "ratio_of_best": best / peer_best,
            "samples": by_engine,
        }
    peer_facts = facts["llama_cpp"]
    unused = [
        name for name in simd_features() if name in PEER_SIMD and PEER_SIMD[name] not in peer_facts["simd"]
    ]
    if peer_facts["simd"]:
        print(
            f"llama.cpp ({peer_facts['package']} {peer_facts['version']}) uses {' '.join(peer_facts['simd'])}"
        )
        if unused:
            print(
                f"this processor also has {' '.join(unused)}: this build of llama.cpp is not its fastest here"
            )
    return {
        "benchmark": "cpu_vs_llama_cpp",
        "model": model.name,
        "threads": threads,
        "cpu": cpu_model(),
        "tests": tests,
        "engines": facts,
        "simd_unused_by_llama_cpp": unused if peer_facts["simd"] else None,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="quengine and llama.cpp in turns on one processor.")
    parser.add_argument("-m", "--model", default="smollm2-135m", help="alias, hf: name or GGUF file")
    parser.add_argument(
        "--synthetic", help="a model with random weights, as `engine bench --synthetic` makes it"
    )
    parser.add_argument("-p", type=int, nargs="+", default=[512], help="prompt lengths (0: none)")
    parser.add_argument("-n", type=int, nargs="+", default=[64], help="numbers of generated tokens (0: none)")
    parser.add_argument("-r", type=int, default=5, help="rounds")
    parser.add_argument("-s", type=float, default=1e9, help="seconds after which no round is begun")
    parser.add_argument("-t", type=int, default=physical_cores(), help="threads")
    parser.add_argument("-d", type=int, default=0, help="tokens in the cache before")
    parser.add_argument("--no-mmap", action="store_true", help="our weights in a copy, in huge pages")
    parser.add_argument("--llama-bench", type=Path, help="a build of llama.cpp to use as the peer")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.llama_bench is None and args.d:
        print("-d needs --llama-bench: the package's server has no depth to start from", file=sys.stderr)
        return 2
    if args.llama_bench is None and importlib.util.find_spec("xllamacpp") is None:
        print(f"llama.cpp is not here: {INSTALL_PEER}", file=sys.stderr)
        return 2
    names = [args.synthetic] if args.synthetic else []
    try:
        with synthetic_models(names, BenchPlan(config=EngineConfig(device="cpu")), None, _say, str) as made:
            measure(args, made[0] if made else resolve_model(args.model))
    except EngineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def measure(args: argparse.Namespace, model: Path) -> None:
    """Both engines on a model, in turns, and the report."""
    tests = {f"pp{p}": ("prompt", p) for p in args.p if p} | {f"tg{n}": ("generate", n) for n in args.n if n}
    timed = [BenchTest(p, 0, args.d) for p in args.p if p] + [BenchTest(0, n, args.d) for n in args.n if n]
    positions = max(batch_positions(test, 1, "cpu") for test in timed)
    setups = {
        name: Setup(name == "quengine", model, args.t, positions, args.d, args.llama_bench, not args.no_mmap)
        for name in ("quengine", "llama_cpp")
    }
    print(json.dumps(report(compare(setups, tests, args.r, args.s), model, args.t)))


if __name__ == "__main__":
    sys.exit(main())
