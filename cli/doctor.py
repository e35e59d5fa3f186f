"""`engine doctor`: what this machine offers, and whether the kernels compute the right numbers on it."""

import json
from typing import TYPE_CHECKING, Annotated

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
    from quengine.doctor import diagnose

    found = diagnose(threads)
    if as_json:
        models = [{"name": row.name, "size": row.size, "path": str(row.path)} for row in installed_rows()]
        typer.echo(json.dumps({**found.as_json(), "models": models}, indent=2))
    else:
        for line in report(found):
            typer.echo(line)
    if not found.healthy:
        raise typer.Exit(FAILED)


def report(found: "Diagnosis") -> list[str]:
    """The lines for people."""
    rows = [
        ("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in found.versions.items())),
        ("platform", found.platform),
        ("cpu", f"{found.cpu}; {found.physical_cores} cores, {found.usable_cpus} logical usable"),
        ("simd", " ".join(found.simd) or "unknown"),
        ("memory", f"{_gib(found.available_memory)} available of {_gib(found.total_memory)}"),
        ("bandwidth", f"{found.memory_bandwidth / 1e9:.1f} GB/s measured, reading"),
    ]
    for device in found.cuda:
        memory = f"{_gib(device.free_memory)} free of {_gib(device.total_memory)}"
        rows.append((f"cuda:{device.index}", f"{device.name}, sm {device.capability}, {memory}"))
    if not found.cuda:
        rows.append(("cuda", "no device"))
    rows.append(("cache", f"{found.cache_dir}, {found.cache_free / 1e9:.1f} GB free"))
    models = installed_rows()
    rows.append(("models", ", ".join(row.name for row in models) or "none; see engine list --all"))
    lines = [f"{label:10} {text}" for label, text in rows]
    return [*lines, "", *_kernel_lines(found.kernels)]


def _kernel_lines(checks: "list[KernelCheck]") -> list[str]:
    """A table of errors, one row a format and one column a phase, and the verdict."""
    phases = list(dict.fromkeys(check.phase for check in checks))
    formats = list(dict.fromkeys(check.format for check in checks))
    cell = {(check.format, check.phase): check for check in checks}
    lines = [
        "kernel self-test: NMSE against float64",
        f"{'':8}" + "".join(f"{phase:>16}" for phase in phases),
    ]
    for name in formats:
        shown = [cell[name, phase] for phase in phases]
        lines.append(
            f"{name:8}" + "".join(f"{c.error:>11.1e} {'ok' if c.passed else 'FAIL':>4}" for c in shown)
        )
    failed = sum(not check.passed for check in checks)
    verdict = f"{failed} of {len(checks)} checks FAILED" if failed else f"all {len(checks)} checks passed"
    return [*lines, verdict]


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
