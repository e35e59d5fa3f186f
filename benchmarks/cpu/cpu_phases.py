"""Where a step's time goes on the CPU: in kernels, in waits of the thread team, in all the rest.

    python -m benchmarks.cpu.cpu_phases [-m GGUF | --synthetic mistral-7b-2l] [-t 1 2] [-p 256] [-n 16] [-b 1] [-d 0]
        [-r 3]

Runs as they are give the time of whole tests and of their lists of kernels. One more run logs every call of a kernel
(timed_team.py), which costs it some percent. A stage is what lies between two waits of the team; its line has, in ms:

    span    from the end of the stage before to its own end
    work    its calls' time, divided by the number of threads; less than `span` by what threads wait
    alone   kernels that one thread runs after the last task, as norms and the rounding of activations
    start   from the end of the stage before to the first call
    tail    from the begin of the call that began last to the end of the tasks

Page faults are the process's own. Medians; one JSON line a thread count at the end. Threads are pinned to the first
processors when the machine has more of them.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.cpu import timed_team
from quengine import LLM
from quengine.diagnostics.bench.bench_plan import BenchTest
from quengine.diagnostics.bench.bench_time import batch_positions, time_batch
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


@dataclass
class StageTime:
    """Seconds of all runs of a stage; see the module docstring."""

    runs: int = 0
    tasks: int = 0
    span: float = 0.0
    work: float = 0.0
    alone: float = 0.0
    start: float = 0.0
    tail: float = 0.0


class Lists:
    """Seconds and number of lists of kernels while they are watched; with `logged` also their calls."""

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        self.logs: list[tuple[threads.Program, NDArray[np.int64]]] = []
        self._run = threads.Program.run

    def _timed(self, program: threads.Program) -> None:
        timed_team.clear()
        began = time.perf_counter()
        self._run(program)
        self.seconds += time.perf_counter() - began
        self.count += 1

    def _logged(self, program: threads.Program) -> None:
        self._timed(program)
        self.logs.append((program, timed_team.calls()))

    def watch(self, logged: bool) -> None:
        method = self._logged if logged else self._timed
        threads.Program.run = lambda program: method(program)  # type: ignore[method-assign]

    def stop(self) -> None:
        threads.Program.run = self._run  # type: ignore[method-assign]


def chained(launch: threads.Launch) -> tuple[list[tuple[int, int]], int]:
    """The kernels of a stage's launch, each with the address of its arguments, and how many are of a task."""
    entries, size = launch.keep[1], size_of(ChainEntry) // 8
    return [(entries[i], entries[i + 1]) for i in range(0, len(entries), size)], launch.arguments.parts


def described(launch: threads.Launch) -> str:
    """The names of a launch's kernels."""
    if isinstance(launch.arguments, ChainArguments):
        links, parts = chained(launch)
        names = [_NAMES.get(kernel, "?").replace("_kernel", "") for kernel, _ in links]
        after = f" | {' + '.join(names[parts:])}" if names[parts:] else ""
        return " + ".join(names[:parts]) + after
    return _NAMES.get(launch.kernel, "?").replace("_kernel", "")


def stages(program: threads.Program) -> Iterator[tuple[str, list[int], list[int]]]:
    """For each stage its name, the addresses of its launches' arguments, and those of kernels after the last task."""
    table, entry = program._table.buffer_info()[0], threads.LAUNCH_BYTES // 8
    groups: list[list[int]] = []
    for number, launch in enumerate(program._launches):
        if launch.after_previous or not groups:
            groups.append([])
        groups[-1].append(number)
    for numbers in groups:
        launches = [program._launches[number] for number in numbers]
        finals = [
            address
            for launch in launches[:1]
            if isinstance(launch.arguments, ChainArguments)
            for links, parts in [chained(launch)]
            for _, address in links[parts:]
        ]
        names = dict.fromkeys(described(launch) for launch in launches)
        yield " , ".join(names), [table + program._table[entry * n + 1] for n in numbers], finals


def stage_times(logs: list[tuple[threads.Program, NDArray[np.int64]]], count: int) -> dict[str, StageTime]:
    """Times of the stages by name, from logged calls of `count` threads."""
    found: defaultdict[str, StageTime] = defaultdict(StageTime)
    rate = timed_team.cycles_a_second()
    for program, calls in logs:
        ended = int(calls[:, 2].min())
        for name, addresses, finals in stages(program):
            own = calls[np.isin(calls[:, 0], addresses)]
            # A kernel after the last task may stand in other stages too: those of this one begin within its calls.
            within = (calls[:, 2] >= own[:, 2].min()) & (calls[:, 3] <= own[:, 3].max())
            last = calls[np.isin(calls[:, 0], finals) & within]
            alone = int((last[:, 3] - last[:, 2]).sum())
            end, work = int(own[:, 3].max()), int((own[:, 3] - own[:, 2]).sum()) - alone
            of = found[name]
            of.runs, of.tasks = of.runs + 1, of.tasks + len(own)
            of.span += (end - ended) / rate
            of.work += work / count / rate
            of.alone += alone / rate
            of.start += (int(own[:, 2].min()) - ended) / rate
            of.tail += (end - alone - int(own[:, 2].max())) / rate
            ended = end
    return dict(found)


def profile(llm: LLM, test: BenchTest, batch: int, rounds: int, count: int) -> dict[str, object]:
    """Medians of whole runs of `batch` sequences, and the stages' seconds of one more."""
    wholes, insides, faults, lists = [], [], [], 0
    for turn in range(rounds + 1):
        times = Lists()
        times.watch(logged=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        (seconds,) = time_batch(llm, test, batch, 1, False, lambda _: None)
        times.stop()
        if turn:
            wholes.append(seconds)
            # Of generation a first step, which is not timed, makes a list too.
            insides.append(times.seconds if test.prompt else times.seconds / times.count * test.generate)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            lists = times.count
    times = Lists()
    times.watch(logged=True)
    time_batch(llm, test, batch, 1, False, lambda _: None).__next__()
    times.stop()
    return {
        "seconds": statistics.median(wholes),
        "in_lists": statistics.median(insides),
        "lists": lists,
        "faults": int(statistics.median(faults)),
        "logged_in_lists": times.seconds,
        "stages": {name: asdict(of) for name, of in stage_times(times.logs, count).items()},
    }


def report(name: str, tokens: int, found: dict[str, object], most: int) -> None:
    seconds, inside, by_stage = found["seconds"], found["in_lists"], found["stages"]
    assert isinstance(seconds, float) and isinstance(inside, float) and isinstance(by_stage, dict)
    span, work, alone = (sum(of[key] for of in by_stage.values()) for key in ("span", "work", "alone"))
    print(
        f"{name}: {1e3 * seconds:.1f} ms, {tokens / seconds:.1f} tok/s; in {found['lists']} lists {1e3 * inside:.1f}, "
        f"outside {1e3 * (seconds - inside):.1f}; {found['faults']} page faults; logged: {1e3 * span:.1f} ms, "
        f"{sum(of['runs'] for of in by_stage.values())} stages, all threads work {work / span:.0%}, "
        f"one alone {alone / span:.1%}"
    )
    print(f"    {'span':>8} {'work':>8} {'alone':>7} {'start':>7} {'tail':>7}  runs  tasks")
    for stage, of in sorted(by_stage.items(), key=lambda item: -item[1]["span"])[:most]:
        columns = " ".join(f"{1e3 * of[key]:{8 if key in ('span', 'work') else 7}.2f}" for key in _COLUMNS)
        print(f"    {columns} {of['runs']:5} {of['tasks'] // of['runs']:6}  {stage}")


_COLUMNS = ("span", "work", "alone", "start", "tail")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, help="a GGUF file")
    parser.add_argument("--synthetic", default="mistral-7b-2l", help="a preset, written first")
    parser.add_argument("-t", type=int, nargs="+", default=[physical_cores()], help="threads")
    parser.add_argument("-p", type=int, default=256, help="prompt (0: none)")
    parser.add_argument("-n", type=int, default=16, help="generated tokens (0: none)")
    parser.add_argument("-b", type=int, nargs="+", default=[1], help="sequences at once")
    parser.add_argument("-d", type=int, default=0, help="depth")
    parser.add_argument("-r", type=int, default=3, help="rounds")
    parser.add_argument("-k", type=int, default=14, help="stages that are listed")
    parser.add_argument("--no-mmap", action="store_true", help="weights in a copy")
    args = parser.parse_args()
    name_kernels()
    timed_team.log_calls()
    model = args.model
    if model is None:
        model = Path(tempfile.gettempdir()) / f"{args.synthetic}.gguf"
        if not model.exists():
            write_synthetic(model, args.synthetic)
    cpus = sorted(os.sched_getaffinity(0))
    tests = [BenchTest(args.p, 0, args.d)] * bool(args.p) + [BenchTest(0, args.n, args.d)] * bool(args.n)
    for count in args.t:
        os.sched_setaffinity(0, cpus[:count])
        cases = {
            f"{test.name}{f', {batch} sequences' * (batch > 1)}": (test, batch)
            for test in tests
            for batch in args.b
        }
        positions, most = max(batch_positions(*case, "cpu") for case in cases.values()), max(args.b)
        mapped = not args.no_mmap
        with LLM(model, "cpu", positions, count, mmap=mapped, reuse_prefix=True, parallel=most) as llm:
            print(f"== {count} threads, {cpu_model()}, {model.name}", flush=True)
            found = {name: profile(llm, *case, args.r, count) for name, case in cases.items()}
        for name, (test, batch) in cases.items():
            report(name, batch * (test.prompt or test.generate), found[name], args.k)
        print(json.dumps({"benchmark": "cpu_phases", "threads": count, "tests": found}), file=sys.stderr)
        os.sched_setaffinity(0, cpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
