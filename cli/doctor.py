"""`engine doctor`: what this machine offers, and whether the kernels compute the right numbers on it."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quengine.cli.list import installed_rows

if TYPE_CHECKING:
    from quengine.doctor import Diagnosis
    from quengine.self_test import KernelCheck

FAILED = 2
"""The exit code when a kernel is wrong: nothing should be run on this machine."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    threads: Annotated[
        int | None, typer.Option("-t", "--threads", min=1, help="CPU threads; default: the physical cores.")
    ] = None,
) -> None:
    """Show versions, devices, memory and its measured speed; test every quantization's kernel.

    Exits with 2 when a kernel fails its test.
    """
    from quengine.doctor import check_cpu_kernels, diagnose
    from quengine.machine import physical_cores

    threads = threads or physical_cores()
    found = diagnose(threads)
    if as_json:
        checks = list(check_cpu_kernels(threads))
        typer.echo(json.dumps(as_object(found, checks), indent=2))
    else:
        for line in machine_lines(found):
            typer.echo(line)
        typer.echo("\nkernel self-test: NMSE against float64, every format (the first run compiles them)")
        checks = print_table(check_cpu_kernels(threads))
    if not all(check.passed for check in checks):
        raise typer.Exit(FAILED)


def as_object(found: "Diagnosis", checks: "list[KernelCheck]") -> dict[str, Any]:
    """What `--json` prints. An error that is no number is null: JSON has no NaN."""
    kernels = [
        {
            "format": check.format,
            "phase": check.phase,
            "nmse": check.error if math.isfinite(check.error) else None,
            "limit": check.limit,
            "passed": check.passed,
        }
        for check in checks
    ]
    models = [{"name": row.name, "size": row.size, "path": str(row.path)} for row in installed_rows()]
    healthy = all(check.passed for check in checks)
    return {**asdict(found), "models": models, "kernels": kernels, "healthy": healthy}


def machine_lines(found: "Diagnosis") -> list[str]:
    """The lines for people, without the self-test."""
    rows = [
        ("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in found.versions.items())),
        ("platform", found.platform),
        ("cpu", found.cpu),
        (
            "cores",
            f"{found.physical_cores} usable, {found.usable_cpus} logical; {found.threads} threads here",
        ),
        ("simd", " ".join(found.simd) or "unknown"),
        ("memory", f"{_gib(found.available_memory)} available of {_gib(found.total_memory)}"),
        ("bandwidth", f"{found.memory_bandwidth / 1e9:.1f} GB/s measured, reading, {found.threads} threads"),
    ]
    for device in found.cuda:
        memory = f"{_gib(device.free_memory)} free of {_gib(device.total_memory)}"
        rows.append((f"cuda:{device.index}", f"{device.name}, sm {device.capability}, {memory}"))
    if not found.cuda:
        rows.append(("cuda", "no device"))
    rows.append(("cache", f"{found.cache_dir}, {found.cache_free / 1e9:.1f} GB free"))
    models = installed_rows()
    rows.append(("models", ", ".join(row.name for row in models) or "none; see engine list --all"))
    return [f"{label:10} {text}" for label, text in rows]


def print_table(checks: "Iterable[KernelCheck]") -> "list[KernelCheck]":
    """Prints a row a format and a column a phase as the checks come, then the verdict; returns the checks."""
    done: list[KernelCheck] = []
    for name, row in groupby(checks, key=lambda check: check.format):
        cells = list(row)
        if not done:
            typer.echo(f"{'':8}" + "".join(f"{check.phase:>16}" for check in cells))
        shown = (f"{check.error:>11.1e} {'ok' if check.passed else 'FAIL':>4}" for check in cells)
        typer.echo(f"{name:8}" + "".join(shown))
        done += cells
    failed = sum(not check.passed for check in done)
    typer.echo(f"{failed} of {len(done)} checks FAILED" if failed else f"all {len(done)} checks passed")
    return done


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
