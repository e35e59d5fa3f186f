"""`engine doctor`: what this machine offers, and whether the kernels compute the right numbers on it."""

import json
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quengine.cli import interrupts
from quengine.cli.commands.list import installed_rows
from quengine.cli.progress import ProgressLine
from quengine.platform import collector

if TYPE_CHECKING:
    from quengine.diagnostics.harness import KernelCheck
    from quengine.diagnostics.machine import Diagnosis
    from quengine.parallel.sum_times import SumTimes

FAILED = 2
"""The exit code when a kernel is wrong: nothing should be run on this machine."""


def doctor(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One check of each kind of kernel: seconds once they are compiled."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    threads: Annotated[
        int | None, typer.Option("-t", "--threads", min=1, help="CPU threads; default: the physical cores.")
    ] = None,
) -> None:
    """Show versions, devices, memory and its measured speed; test every kernel of the CPU and of each GPU.

    Exits with 2 when a kernel fails its test.
    """
    with interrupts.at_once():
        from quengine.diagnostics.machine import diagnose
    from quengine.platform.machine import thread_count

    threads = thread_count(threads)
    progress = ProgressLine()
    progress("looking at the machine, and measuring its memory's speed")
    found = diagnose(threads)
    progress.clear()
    if as_json:
        tested = {device: list(checks) for device, checks in self_tests(found, quick)}
        typer.echo(json.dumps(as_object(found, tested), indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in machine_lines(found):
            typer.echo(line if width is None else textwrap.fill(line, width, subsequent_indent=" " * 11))
        tested = {}
        for device, checks in self_tests(found, quick):
            typer.echo(f"\n{device} kernels: error (NMSE) against float64; the first run compiles them")
            tested[device] = print_table(device, checks, width)
        if quick:
            typer.echo("\none check of each kind; without --quick every format and kind of kernel is tested")
    if not all(check.passed for checks in tested.values() for check in checks):
        raise typer.Exit(FAILED)


def self_tests(found: "Diagnosis", quick: bool = False) -> "Iterator[tuple[str, Iterator[KernelCheck]]]":
    """The CPU's tests, and those of every GPU that the engine can use."""
    with interrupts.at_once():
        from quengine.diagnostics.selftest.self_test_run import check_cpu, check_cuda
    from quengine.platform.device import MIN_CAPABILITY

    collector.working()
    yield "cpu", check_cpu(found.threads, quick)
    for device in found.cuda:
        if tuple(map(int, device.capability.split("."))) >= MIN_CAPABILITY:
            yield f"cuda:{device.index}", check_cuda(device.index, device.free_memory, quick)


def as_object(found: "Diagnosis", tested: "dict[str, list[KernelCheck]]") -> dict[str, Any]:
    """What `--json` prints. An error that is no number is null: JSON has no NaN."""
    kernels = [
        {
            "device": device,
            **asdict(check),
            "error": check.error if math.isfinite(check.error) else None,
            "passed": check.passed,
        }
        for device, checks in tested.items()
        for check in checks
    ]
    models = [{"name": row.name, "size": row.size, "path": str(row.path)} for row in installed_rows()]
    healthy = all(kernel["passed"] for kernel in kernels)
    return {**asdict(found), "models": models, "kernels": kernels, "healthy": healthy}


def _sums_text(sums: "SumTimes") -> str:
    """How long a sum over the GPUs takes, by size."""
    if sums.problem:
        return f"no model can be shared by the {sums.ranks} GPUs: {sums.problem}"
    times = ", ".join(f"{t.rows} x {t.width} in {t.seconds * 1e6:.1f} us" for t in sums.times)
    return f"{sums.ranks} GPUs, {sums.note}: {times}"


def machine_lines(found: "Diagnosis") -> list[str]:
    """The lines for people, without the self-test."""
    nodes = f", NUMA nodes: {found.numa_nodes}" if found.numa_nodes > 1 else ""
    rows = [
        ("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in found.versions.items())),
        ("platform", found.platform),
        ("cpu", found.cpu),
        (
            "cores",
            f"{found.physical_cores} usable, {found.usable_cpus} logical; {found.threads} threads here",
        ),
        ("simd", " ".join(found.simd) or "unknown"),
        ("memory", f"{_gib(found.available_memory)} available of {_gib(found.total_memory)}{nodes}"),
        ("bandwidth", f"{found.memory_bandwidth / 1e9:.1f} GB/s measured, reading, {found.threads} threads"),
    ]
    for device in found.cuda:
        memory = f"{_gib(device.free_memory)} free of {_gib(device.total_memory)}"
        rows.append((f"cuda:{device.index}", f"{device.name}, sm {device.capability}, {memory}"))
    if found.sums is not None:
        rows.append(("links", _sums_text(found.sums)))
    if not found.cuda:
        rows.append(("cuda", "no device"))
    rows.append(("cache", f"{found.cache_dir}, {found.cache_free / 1e9:.1f} GB free"))
    models = installed_rows()
    rows.append(("models", ", ".join(row.name for row in models) or "none; see engine list --all"))
    return [f"{label:10} {text}" for label, text in rows]


def print_table(
    device: str, checks: "Iterable[KernelCheck]", width: int | None = None
) -> "list[KernelCheck]":
    """Prints a row a subject as the checks come, with the names of their tests above where these change, then the
    failures and the verdict; returns the checks.

    A terminal of a `width` that has no room for a row gets the number of its tests and their largest error instead.
    """
    began = time.perf_counter()
    done: list[KernelCheck] = []
    tests, wide = list[str](), 0
    for subject, group in groupby(checks, key=lambda check: check.subject):
        row = list(group)
        done += row
        if width is not None and 20 + len(row) * max(18, 2 + max(len(each.test) for each in row)) > width:
            typer.echo(f"{subject:20}{_summed(row)}")
            tests = []
            continue
        if [check.test for check in row] != tests:
            tests = [check.test for check in row]
            wide = max(18, 2 + max(map(len, tests)))
            typer.echo(" " * 20 + "".join(f"{test:>{wide}}" for test in tests))
        typer.echo(f"{subject:20}" + "".join(f"{_shown(check):>{wide}}" for check in row))
    failed = [check for check in done if not check.passed]
    for check in failed:
        why = check.note or f"error {check.error:.1e} is over {check.limit:.0e}"
        typer.echo(f"FAIL {device} {check.subject}, {check.test}: {why}")
    verdict = f"{len(failed)} of {len(done)} checks FAILED" if failed else f"all {len(done)} checks passed"
    typer.echo(f"{verdict} ({time.perf_counter() - began:.1f} s)")
    return done


def _summed(row: "list[KernelCheck]") -> str:
    """Several checks of a subject in a few words; failures have lines of their own."""
    failed = sum(not check.passed for check in row)
    largest = max((check.error for check in row if check.passed), default=math.nan)
    verdict = f"{failed} of {len(row)} FAIL" if failed else f"{len(row)} ok"
    return f"{verdict:>14}, largest error {largest:.1e}"


def _shown(check: "KernelCheck") -> str:
    return f"{check.error:.1e} {'ok' if check.passed else 'FAIL'}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
