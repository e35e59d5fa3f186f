"""`engine kernels`: compiles CUDA kernels into packs, installs packs, shows and clears what is compiled."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from quengine.cli.command_table import ExampleGroup, PanelCommand
from quengine.cli.progress import ProgressLine
from quengine.cli.terminal import confirm_deletion
from quengine.errors import EngineError

group = typer.Typer(cls=ExampleGroup, rich_markup_mode=None)

_ALL = "sm_80,sm_89,sm_90"


@group.callback()
def kernels() -> None:
    """Build and install packs of compiled CUDA kernels; show and clear what is compiled."""


@group.command(cls=PanelCommand)
def build(
    models: Annotated[
        list[str],
        typer.Option(
            "--models",
            metavar="NAME|FILE,...",
            help="Models: files, names, synthetic shapes; `catalogue`: all released shapes that `engine bench "
            "--synthetic` has. May be given several times.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The pack to write.")],
    arch: Annotated[str, typer.Option("--arch", metavar="sm_NN,...", help="GPUs to compile for.")] = _ALL,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, max=512, help="Requests at once, at most.")
    ] = 64,
    cache_type: Annotated[
        str, typer.Option("--cache-type", help="Of keys and values: f16, q8_0 or q4_0.")
    ] = "f16",
) -> None:
    """Compile what models launch, with all processors, and write it to a pack. No GPU is needed.

    A pack is for one version of Triton and of the engine, and of the files it was made of.
    """
    from quengine.cli.flags import split_names
    from quengine.kernels.kv.cache_types import CACHE_TYPES
    from quengine.runners.kernel_packs import PackPlan, arch_of, build_pack

    if cache_type not in CACHE_TYPES:
        raise EngineError(f"no cache type {cache_type!r}; there are {', '.join(CACHE_TYPES)}")
    if output.is_dir():
        raise EngineError(f"{output} is a folder; name a file: -o {output / 'pack.zip'}")
    if not output.parent.is_dir():
        raise EngineError(f"{output.parent}: no such folder")
    progress = ProgressLine()
    archs = [arch_of(name) for name in dict.fromkeys(split_names([arch]))]
    pack = build_pack(PackPlan(list(split_names(models)), archs, parallel, cache_type), output, progress)
    progress.clear()
    size = output.stat().st_size / 1e6
    typer.echo(f"{output}: {len(pack.kernels)} kernels, {size:.1f} MB, for {_about(pack)}", err=True)


@group.command(cls=PanelCommand)
def install(pack: Annotated[Path, typer.Argument(metavar="PACK", help="A file that `build` wrote.")]) -> None:
    """Put a pack's kernels where this user's kernels are, checked by their digests.

    A pack is a program, and its kernels run as your own: install none of an origin that you do not trust.
    """
    if not pack.is_file():
        problem = "not a file" if pack.exists() else "no such file"
        raise EngineError(f"{pack}: {problem}; `engine kernels build` writes packs")
    from quengine.runners.kernel_packs import install as install_pack

    installed, launchers = install_pack(pack)
    built = f"; {launchers} launchers built" if launchers else ""
    typer.echo(f"{len(installed.kernels)} kernels installed, for {_about(installed)}{built}", err=True)


@group.command(name="list", cls=PanelCommand)
def list_kernels(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the packs that are installed, and how many kernels were compiled."""
    from quengine.kernels.cuda.launch import kernel_pack
    from quengine.kernels.cuda.launch.triton_cache import use_private_cache

    use_private_cache()
    packs, summary = kernel_pack.installed_packs(), kernel_pack.cache_summary()
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "name": each.name,
                "kernels": len(each.pack.kernels),
                "whole": each.whole,
                "bytes": each.nbytes,
                "current": each.is_current,
                "triton": each.pack.triton_version,
                "targets": each.pack.targets,
                "models": each.pack.models,
            }
            for each in packs
        ]
        typer.echo(json.dumps({**asdict(summary), "folder": str(summary.folder), "packs": rows}, indent=2))
        return
    for each in packs:
        state = "" if each.is_current else ", of another version: not used"
        lost = len(each.pack.kernels) - each.whole
        damaged = f", {lost} of them gone or damaged" if lost else ""
        typer.echo(
            f"{each.name}: {len(each.pack.kernels)} kernels{damaged}, {each.nbytes / 1e6:.1f} MB, "
            f"for {_about(each.pack)}{state}"
        )
    typer.echo(f"{summary.folder}: {summary.kernels} kernels, {summary.nbytes / 1e6:.1f} MB, packs included")


@group.command(cls=PanelCommand)
def clear(yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False) -> None:
    """Delete all compiled CUDA kernels, after asking; those of other programs stay."""
    from quengine.kernels.cuda.launch.kernel_pack import cache_summary, clear_kernels
    from quengine.kernels.cuda.launch.triton_cache import use_private_cache

    use_private_cache()
    found = cache_summary()
    question = f"Delete {found.kernels} kernels in {found.folder}?"
    if not yes and not confirm_deletion(question, "engine kernels clear -y"):
        return
    clear_kernels()
    typer.echo(f"{found.kernels} kernels deleted, {found.nbytes / 1e6:.1f} MB freed", err=True)


def _about(pack: Any) -> str:
    return f"{', '.join(pack.targets)}, Triton {pack.triton_version}: {', '.join(pack.models)}"
