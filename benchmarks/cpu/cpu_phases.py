"""Where a step's time goes on the CPU: the seconds of every kernel, of the waits between them, of all the rest.

    python -m benchmarks.cpu.cpu_phases [-m GGUF | --synthetic mistral-7b-2l] [-t 1 2] [-p 256] [-n 16] [-d 0] [-r 3]

A run first as it is, then once more with every kernel as a list of its own, which gives each one's seconds: those of
the whole run less their sum are waits, wake-ups and Python. Page faults are the process's own. Medians; one JSON line
a thread count at the end. Threads are pinned to the first processors when the machine has more of them.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from quengine import LLM
from quengine.diagnostics.bench.bench_plan import BenchTest
from quengine.diagnostics.bench.bench_time import time_batch
from quengine.kernels.cpu.runtime import kernel_table, threads
from quengine.kernels.cpu.runtime.arguments import size_of
from quengine.kernels.cpu.runtime.stage import ChainArguments, ChainEntry
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.platform.machine import cpu_model, physical_cores

_NAMES: dict[int, str] = {}


def name_kernels() -> None:
    """From now on `_NAMES` has the name of every kernel by its address."""
    load = kernel_table.kernel

    def named(module: str, function: str, *variant: str | bool) -> int:
        address = load(module, function, *variant)
        _NAMES[address] = kernel_table.file_name((function, *variant))
        return address

    kernel_table.kernel = named  # type: ignore[assignment]


class Times:
    """Seconds and runs of kernels, of whole lists of them, and of the latter alone."""

    def __init__(self) -> None:
        self.kernels: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.lists, self.list_count = 0.0, 0
        self._run = threads.Program.run

    def whole(self, program: threads.Program) -> None:
        began = time.perf_counter()
        self._run(program)
        self.lists += time.perf_counter() - began
        self.list_count += 1

    def apart(self, program: threads.Program) -> None:
        """Each kernel of the list as a list of its own; those that may overlap run one after another."""
        for number, launch in enumerate(program._launches):
            tasks = program._table[number * threads.LAUNCH_BYTES // 8 + 2]
            one = threads.Program([launch._replace(after_previous=True)])
            one.set_tasks(0, tasks)
            name = described(launch)
            began = time.perf_counter()
            self._run(one)
            self.kernels[name] += time.perf_counter() - began
            self.counts[name] += 1

    def watch(self, apart: bool) -> None:
        method = self.apart if apart else self.whole
        threads.Program.run = lambda program: method(program)  # type: ignore[method-assign]

    def stop(self) -> None:
        threads.Program.run = self._run  # type: ignore[method-assign]


def described(launch: threads.Launch) -> str:
    """A kernel's name, with the size of its matrix if it has one."""
    name = _NAMES.get(launch.kernel, "?")
    arguments = launch.arguments
    arguments = getattr(arguments, "matmul", arguments)
    if isinstance(arguments, ChainArguments):  # a stage: the kernels of a task, then those after the last one
        entries, size = launch.keep[1], size_of(ChainEntry) // 8
        links = [_NAMES.get(entries[i], "?").partition("_kernel") for i in range(0, len(entries), size)]
        return " + ".join(base + variant for base, _, variant in links)
    rows, cols = getattr(arguments, "rows", None), getattr(arguments, "cols", None)
    return f"{name} {rows}x{cols}" if "matmul" in name else name


def profile(llm: LLM, test: BenchTest, rounds: int) -> dict[str, object]:
    """Medians of whole runs, and the kernels' seconds of one more."""
    wholes, insides, faults, lists = [], [], [], 0
    for turn in range(rounds + 1):
        times = Times()
        times.watch(apart=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        (seconds,) = time_batch(llm, test, 1, 1, False, lambda _: None)
        times.stop()
        if turn:
            wholes.append(seconds)
            # Of generation a first step, which is not timed, makes a list too.
            insides.append(times.lists if test.prompt else times.lists / times.list_count * test.generate)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            lists = times.list_count
    times = Times()
    times.watch(apart=True)
    (apart,) = time_batch(llm, test, 1, 1, False, lambda _: None)
    times.stop()
    return {
        "seconds": statistics.median(wholes),
        "in_lists": statistics.median(insides),
        "lists": lists,
        "faults": int(statistics.median(faults)),
        "apart": apart,
        "kernels": {
            name: [times.counts[name], seconds]
            for name, seconds in sorted(times.kernels.items(), key=lambda item: -item[1])
        },
    }


def report(name: str, tokens: int, found: dict[str, object], most: int) -> None:
    seconds, inside, kernels = found["seconds"], found["in_lists"], found["kernels"]
    assert isinstance(seconds, float) and isinstance(inside, float) and isinstance(kernels, dict)
    alone = sum(spent for _, spent in kernels.values())
    print(
        f"{name}: {1e3 * seconds:.1f} ms, {tokens / seconds:.1f} tok/s; in {found['lists']} lists {1e3 * inside:.1f}, "
        f"outside {1e3 * (seconds - inside):.1f}; kernels one by one {1e3 * alone:.1f}; {found['faults']} page faults"
    )
    for kernel, (count, spent) in list(kernels.items())[:most]:
        print(f"    {1e3 * spent:9.2f} ms  {count:5}  {kernel}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, help="a GGUF file")
    parser.add_argument("--synthetic", default="mistral-7b-2l", help="a preset, written first")
    parser.add_argument("-t", type=int, nargs="+", default=[physical_cores()], help="threads")
    parser.add_argument("-p", type=int, default=256, help="prompt (0: none)")
    parser.add_argument("-n", type=int, default=16, help="generated tokens (0: none)")
    parser.add_argument("-d", type=int, default=0, help="depth")
    parser.add_argument("-r", type=int, default=3, help="rounds")
    parser.add_argument("-k", type=int, default=14, help="kernels that are listed")
    parser.add_argument("--no-mmap", action="store_true", help="weights in a copy")
    args = parser.parse_args()
    name_kernels()
    model = args.model
    if model is None:
        model = Path(tempfile.gettempdir()) / f"{args.synthetic}.gguf"
        if not model.exists():
            write_synthetic(model, args.synthetic)
    cpus = sorted(os.sched_getaffinity(0))
    tests = [BenchTest(args.p, 0, args.d)] * bool(args.p) + [BenchTest(0, args.n, args.d)] * bool(args.n)
    for count in args.t:
        os.sched_setaffinity(0, cpus[:count])
        positions = args.d + max(args.p, args.n) + 2
        with LLM(model, "cpu", positions, count, mmap=not args.no_mmap, reuse_prefix=True) as llm:
            print(f"== {count} threads, {cpu_model()}, {model.name}", flush=True)
            found = {test.name: profile(llm, test, args.r) for test in tests}
        for test in tests:
            report(test.name, test.prompt or test.generate, found[test.name], args.k)
        print(json.dumps({"benchmark": "cpu_phases", "threads": count, "tests": found}), file=sys.stderr)
        os.sched_setaffinity(0, cpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
