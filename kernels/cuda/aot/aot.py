"""Ahead-of-time compilation of every kernel variant, without a GPU: registers, spills and shared memory per GPU.

    python -m quengine.kernels.cuda.aot [--arch 80 89 90] [--only TEXT] [--jobs N] [--list]

Exit status 1 if a variant does not compile, if one used in decode spills registers, if one needs more shared memory
than the GPU gives a block, or if a PDL consumer accesses memory that its producer may write, or reads no weights,
before it waits. Results are kept in Triton's cache, by source: a second run is quick.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

from quengine.kernels.cuda.aot.aot_cases import (
    ALL_TYPES_WIDTH,
    ARCHS,
    COMMON_TYPES,
    Case,
    backend_for,
    cases,
)
from quengine.kernels.cuda.aot.aot_compile import (
    SAME_PTX,
    SHARED_LIMIT,
    RecordedLaunch,
    compile_launch,
    record,
)
from quengine.kernels.cuda.aot.aot_ptx import Early, before_wait
from quengine.kernels.cuda.attention.kv_store import CachePointers
from quengine.kernels.cuda.attention.rope import RotationPointers

UNWRITTEN = frozenset(
    f"{plane}{part}" for plane in ("low", "high", "scales", "supers") for part in ("", "_a", "_b", "_ptr")
) | {
    *("norm_ptr", "weight_ptr", "w_ptr", "gate_ptr", "position_ptr", "table_ptr", "k_ptr", "v_ptr"),
    *("conv_ptr", "conv_bias_ptr", "decay_ptr", "skip_ptr", "history_ptr", "memory_ptr"),
    *("sink_ptr", "bias_ptr", "known_experts_ptr", "known_positions_ptr", "known_weight_ptr"),
    *(f"rotation.{field}" for field in RotationPointers._fields),
    *(f"cache.{field}" for field in CachePointers._fields),
}
"""Pointers that no PDL producer writes through: weights and tables; what an earlier step has written (its
position, its cache rows); and what a launch wrote that had ended when the producer let its consumers start
(`known_*`, see moe/experts.py). A kernel may read these before it waits.
"""


@dataclass(frozen=True)
class Variant:
    """A kernel to compile: launch number `launch` of case number `case`, for GPUs that share its PTX.

    `decode`: whether the same launch occurs in a case of decode.
    """

    case: int
    launch: int
    archs: tuple[int, ...]
    decode: bool


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


@cache
def _cases_of(arch: int) -> list[Case]:
    """The cases, made once for a GPU of compute capability `arch`: there are hundreds, each with its batches, which
    keep what they computed for that GPU."""
    del arch
    return cases()


@cache
def launches(case: int, arch: int) -> list[RecordedLaunch]:
    """The launches of a case on a GPU of compute capability `arch`."""
    with backend_for(arch) as backend:
        return record(partial(_cases_of(arch)[case].call, backend))


def variants(archs: Sequence[int], only: str = "") -> list[Variant]:
    """The distinct launches of the cases whose name contains `only`, one for all GPUs that share its PTX."""
    chosen: dict[str, Variant] = {}
    for number, case in enumerate(cases()):
        for arch in archs:
            if only not in case.name or arch not in case.archs:
                continue
            for index, launch in enumerate(launches(number, arch)):
                key = f"{SAME_PTX.get(arch, arch)} {launch.key}"
                first = chosen.get(key, Variant(number, index, (), False))
                met = tuple(sorted({*first.archs, arch}))
                chosen[key] = Variant(first.case, first.launch, met, first.decode or case.decode)
    return list(chosen.values())


def compile_variant(variant: Variant) -> list[Report]:
    """Compiles a variant for each of its GPUs; a failure is reported, not raised."""
    return [_compile_for(variant, arch) for arch in variant.archs]


def _compile_for(variant: Variant, arch: int) -> Report:
    began = time.perf_counter()
    # Launches are numbered as for the first of these GPUs; the others have the same launch.
    launch = launches(variant.case, variant.archs[0])[variant.launch]
    report = partial(Report, _cases_of(arch)[variant.case].name, launch.name, arch, variant.decode)
    try:
        made = compile_launch(launch, arch)
    except Exception as error:  # the compiler's errors have no common base class
        last = (str(error).strip().splitlines() or [""])[-1]
        return report(failure=f"{type(error).__name__}: {last}")
    failures = ["spills"] if made.stack and variant.decode else []
    limit = SHARED_LIMIT[arch]
    failures += [f"needs {made.shared} bytes of shared memory, not {limit}"] if made.shared > limit else []
    failures += overlap_faults(launch, before_wait(made.ptx)) if launch.options.get("launch_pdl") else []
    seconds = time.perf_counter() - began
    return report(made.registers, made.stack, made.shared, "; ".join(failures), seconds)


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
    found = [f"writes {name} before it waits" for name in sorted(written)]
    found += [f"reads {name} before it waits" for name in sorted(read - known)]
    codes = {"low", "low_a"} & set(pointers.values()) if known_early is not False else set()
    return found + (["reads no weights before it waits"] if codes and not codes & read else [])


def main() -> int:
    args = _arguments()
    began = time.perf_counter()
    work = variants(args.arch, args.only)
    count = sum(len(variant.archs) for variant in work)
    print(_scope(cases(), args.arch, args.only, count))
    if args.list:
        return 0
    print(f"{'case':52} {'kernel':24} {'sm':>3} {'regs':>5} {'spilled':>8} {'shared':>7} {'s':>5}")
    failed = []
    with ProcessPoolExecutor(args.jobs or len(os.sched_getaffinity(0))) as pool:
        for report in chain.from_iterable(pool.map(compile_variant, work)):
            print(_line(report), flush=True)
            failed += [report] if report.failure else []
    print(f"{count} kernels compiled in {time.perf_counter() - began:.0f} s, {len(failed)} failures")
    for report in failed:
        print(f"FAIL {_line(report)}", file=sys.stderr)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m quengine.kernels.cuda.aot", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--only", default="", help="only the cases whose name holds this text")
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: the cores)")
    parser.add_argument("--list", action="store_true", help="say what would be compiled, and stop")
    return parser.parse_args()


def _scope(found: list[Case], archs: Sequence[int], only: str, count: int) -> str:
    chosen = [case for case in found if only in case.name]
    few = sum(case.archs != ARCHS for case in chosen)
    return (
        f"{count} different kernels of {len(chosen)} cases for {', '.join(f'sm_{arch}' for arch in archs)}.\n"
        f"{few} cases are compiled for some GPUs only: sm_90 has all; sm_89 has {', '.join(COMMON_TYPES)} and leaves\n"
        f"the other types to sm_80, which has one batched matmul of each. Others, and less common attentions\n"
        f"and widths, are left to sm_90.\n"
        f"Every type is compiled at {ALL_TYPES_WIDTH} columns, Q4_K and Q6_K also at a 7B model's shapes."
    )


def _line(report: Report) -> str:
    numbers = f"{report.registers:5} {report.stack:8} {report.shared:7} {report.seconds:5.1f}"
    return f"{report.case:52} {report.kernel:24} {report.arch:3} {numbers} {report.failure}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
