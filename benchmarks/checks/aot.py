"""Ahead-of-time compilation of every kernel, without a GPU: registers, spills and shared memory per GPU.

    python -m benchmarks.checks.aot [--covering] [--arch 80 89 90] [--only TEXT] [--jobs N] [--list]

Compiles the distinct launches of the cases (aot_cases.py), which are recorded from declared models; with --covering a
quarter of them, which together have every constant of every kernel (aot_cover.py). Exit status 1 if a launch does not
compile, if one of decode spills registers, if one needs more shared memory than the GPU gives a block (or than Triton
requests for it), if a PDL consumer accesses memory that its producer may write, or reads no weights, before it waits,
or if the cases leave out a kernel that the product has. Results are kept in Triton's cache, by source: a second run is
quick.
"""

import argparse
import gc
import importlib
import os
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import gcd
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from triton.runtime.jit import JITFunction

import quengine.kernels.cuda
from benchmarks.checks.aot_cases import Case, Variant, cases
from benchmarks.checks.aot_cover import covering
from quengine.kernels.collection_pause import paused
from quengine.kernels.cuda.aot.aot_compile import (
    SAME_PTX,
    SHARED_LIMIT,
    RecordedLaunch,
    compile_launch,
    record_distinct,
)
from quengine.kernels.cuda.aot.aot_ptx import Early, before_wait
from quengine.kernels.cuda.aot.meta_backend import ARCHS, gpu_for
from quengine.kernels.cuda.attention.kv_store import CachePointers
from quengine.kernels.cuda.attention.rope import RotationPointers
from quengine.kernels.cuda.gemm.wgmma_plan import GRANTED_BYTES
from quengine.kernels.cuda.launch.gpu import assuming
from quengine.kernels.cuda.launch.kernel import DirectLaunch

T = TypeVar("T")

OWN = frozenset(("own_sums_ptr", "own_counters_ptr", "own_arrivals_ptr"))
"""Pointers through which launches of one kernel alone read and write, of which the one before has ended when the
producer lets the next one start (kernels/cuda/lora/low_rank.py)."""

HINTS = frozenset(("change.scales", "adapter_scales_ptr"))
"""Pointers through which a kernel reads, ahead of its wait, what to prefetch."""

UNWRITTEN = frozenset(
    f"{plane}{part}"
    for plane in ("low", "high", "scales", "supers")
    for part in ("", "_a", "_b", "_2", "_ptr")
) | {
    *("norm_ptr", "weight_ptr", "w_ptr", "gate_ptr", "position_ptr", "table_ptr", "k_ptr", "v_ptr"),
    *("conv_ptr", "conv_bias_ptr", "decay_ptr", "skip_ptr", "history_ptr", "memory_ptr"),
    *("first_weight_ptr", "branch_weight_ptr"),
    *("sink_ptr", "bias_ptr", "known_experts_ptr", "known_positions_ptr", "known_weight_ptr"),
    *(f"rotation.{field}" for field in RotationPointers._fields),
    *(f"cache.{field}" for field in CachePointers._fields),
    *("change.a", "change.b", "change.matrices", "a_ptr", "b_ptr", "tiles_ptr", "rank_words_ptr"),
    *("known_x_ptr", "known_low_ptr", "known_x_scale_ptr", "known_squares_ptr", "known_scales_ptr"),
    *OWN,
    *HINTS,
}
"""Pointers that no PDL producer writes through: weights and tables; what an earlier step has written (its
position, its cache rows); and what a launch wrote that had ended when the producer let its consumers start
(`known_*`, see moe/experts.py). A kernel may read these before it waits.
"""


@dataclass(frozen=True)
class Report:
    """The compiler's result for a variant; stack: bytes of spilled registers per thread."""

    case: str
    kernel: str
    arch: int
    decode: bool
    registers: int = 0
    stack: int = 0
    shared: int = 0
    failure: str = ""
    seconds: float = 0.0


def variants(archs: Sequence[int], only: str = "") -> list[Variant]:
    """The distinct launches of the cases whose name contains `only`, one for all GPUs that share its PTX."""
    chosen: dict[str, Variant] = {}
    for case in cases():
        for arch in set(archs) & set(case.archs) if only in case.name else ():
            for key, (decode, launch) in launches(case, arch).items():
                key = f"{SAME_PTX.get(arch, arch)} {_COLUMNS.sub(_aligned, key)}"
                first = chosen.get(key, Variant(case.name, launch, (), decode))
                met = tuple(sorted({*first.archs, arch}))
                chosen[key] = replace(first, archs=met, decode=first.decode or decode)
    return list(chosen.values())


_COLUMNS = re.compile(r"\bcols=(\d+)")
"""The columns of a packed weight, a constant of its matmuls: they loop over more of them, and are compiled once for all
that are equally aligned."""


def _aligned(columns: re.Match[str]) -> str:
    return f"cols={gcd(int(columns[1]), 256)}"


_BATCHED = re.compile(r"\.gemm\.matmul_|\.grouped_")
"""Kernels that multiply several rows."""


@torch.no_grad()
def launches(case: Case, arch: int) -> dict[str, tuple[bool, RecordedLaunch]]:
    """The distinct launches of a case on a GPU of compute capability `arch`, by key, and whether decode has each."""
    found: dict[str, tuple[bool, RecordedLaunch]] = {}
    with assuming(gpu_for(arch)):
        for decode, step in case.steps():
            for launch in record_distinct(step):
                key, few = launch.key, not _BATCHED.search(kernel_name(launch.kernel))
                found[key] = ((decode and few) or found.get(key, (False, launch))[0], launch)
    return found


def kernels() -> set[str]:
    """The kernels that the product has, by module and name: functions of Triton that are launched, not called."""
    found = set()
    for module in pkgutil.walk_packages(quengine.kernels.cuda.__path__, "quengine.kernels.cuda."):
        for value in vars(importlib.import_module(module.name)).values():
            function = value.kernel if isinstance(value, DirectLaunch) else value
            if isinstance(function, JITFunction) and function.fn.__name__.endswith("_kernel"):
                found.add(kernel_name(function))
    return found


def kernel_name(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def left_out(work: Iterable[Variant]) -> list[str]:
    """The kernels that no variant launches."""
    return sorted(kernels() - {kernel_name(variant.launch.kernel) for variant in work})


_work: list[Variant] = []


def in_forks(call: Callable[[Variant], T], work: Sequence[Variant], jobs: int | None = None) -> Iterator[T]:
    """`call` of each variant, in order, in `jobs` forks of this process (None: one a processor). Forks take variants by
    number, as these hold functions of Triton, which cannot be pickled."""
    _work[:] = work
    gc.freeze()
    with ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0)), get_context("fork")) as pool:
        yield from pool.map(partial(_of_number, call), range(len(work)))


def _of_number(call: Callable[[Variant], T], number: int) -> T:
    with paused():  # compiling creates many objects
        return call(_work[number])


MAY_SPILL = {("qwen3.6-35b-a3b, narrow", "experts_add_kernel"), ("LoRA adapters", "low_rank_kernel")}
"""(case, kernel) that do. Experts: 1,024 threads leave 64 registers, and on sm_89 each spills 152 bytes, at the model's
own width too; fewer slots at once would need a GPU of that kind to be measured on. Adapters: fp32 factors, three
products of tf32 at once, spill 24 bytes on sm_89; files have fp16 or bf16."""


def compile_variant(variant: Variant) -> list[Report]:
    """Compiles a variant for each of its GPUs; a failure is reported, not raised."""
    return [_compile_for(variant, arch) for arch in variant.archs]


def _compile_for(variant: Variant, arch: int) -> Report:
    began, launch = time.perf_counter(), variant.launch
    report = partial(Report, variant.case, launch.name, arch, variant.decode)
    try:
        made = compile_launch(launch, arch)
    except Exception as error:  # the compiler's errors have no common base class
        last = (str(error).strip().splitlines() or [""])[-1]
        return report(failure=f"{type(error).__name__}: {last}")
    spilled = made.stack and variant.decode and (variant.case, launch.name) not in MAY_SPILL
    failures = ["spills"] if spilled else []
    failures += shared_faults(made.shared, made.static, SHARED_LIMIT[arch])
    failures += overlap_faults(launch, before_wait(made.ptx)) if launch.options.get("launch_pdl") else []
    seconds = time.perf_counter() - began
    shared = made.shared + made.static
    return report(made.registers, made.stack, shared, "; ".join(failures), seconds)


def shared_faults(own: int, static: int, limit: int) -> list[str]:
    """Why a block cannot have its shared memory: Triton's own part, and static memory that it does not count."""
    need = own + static
    if need > limit:
        return [f"needs {need} bytes of shared memory, not {limit}"]
    if own <= GRANTED_BYTES < need:
        return [f"needs {need} bytes of shared memory, of which Triton counts {own} and requests no more"]
    return []


def overlap_faults(launch: RecordedLaunch, early: Early) -> list[str]:
    """What a PDL consumer does wrong before it waits."""
    if not early.waits:
        return ["does not wait for the kernel in front"]
    pointers = launch.pointers
    read, written = (
        {pointers[at] for at in touched if at in pointers} for touched in (early.reads, early.writes)
    )
    # A grouped matmul learns which experts have rows before the launch in front begins, or only after its wait.
    known_early = launch.arguments.get("EARLY")
    known = UNWRITTEN | {"of_block_ptr"} if known_early else UNWRITTEN
    found = [f"writes {name} before it waits" for name in sorted(written - OWN)]
    found += [f"reads {name} before it waits" for name in sorted(read - known)]
    codes = {"low", "low_a"} & set(pointers.values()) if known_early is not False else set()
    return found + (["reads no weights before it waits"] if codes and not codes & read else [])


def main() -> int:
    args = _arguments()
    began = time.perf_counter()
    found = variants(args.arch, args.only)
    work = covering(found) if args.covering else found
    every, count = (sum(len(variant.archs) for variant in each) for each in (found, work))
    of_them = f", of which {count} are compiled" if args.covering else ""
    print(f"{every} different kernels for {', '.join(f'sm_{arch}' for arch in args.arch)}{of_them}")
    missing = [] if args.only or 90 not in args.arch else left_out(found)
    for name in missing:
        print(f"FAIL no case launches {name}", file=sys.stderr)
    if args.list:
        return 1 if missing else 0
    print(f"{'case':52} {'kernel':24} {'sm':>3} {'regs':>5} {'spilled':>8} {'shared':>7} {'s':>5}")
    failed = []
    for report in chain.from_iterable(in_forks(compile_variant, work, args.jobs)):
        print(_line(report), flush=True)
        failed += [report] if report.failure else []
    print(f"{count} kernels compiled in {time.perf_counter() - began:.0f} s, {len(failed)} failures")
    for report in failed:
        print(f"FAIL {_line(report)}", file=sys.stderr)
    return 1 if failed or missing else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checks.aot", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--covering", action="store_true", help="only launches that have every constant of every kernel"
    )
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--only", default="", help="only the cases whose name has this text")
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: the cores)")
    parser.add_argument("--list", action="store_true", help="print what would be compiled, and stop")
    return parser.parse_args()


def _line(report: Report) -> str:
    numbers = f"{report.registers:5} {report.stack:8} {report.shared:7} {report.seconds:5.1f}"
    return f"{report.case:52} {report.kernel:24} {report.arch:3} {numbers} {report.failure}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
