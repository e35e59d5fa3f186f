"""The files of `engine bench --synthetic`, which are checked against memory and disk before they are written.

They are kept in the user's cache, where the oldest ones make room, or written to a temporary folder where nothing can
be kept."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from quengine.diagnostics.bench.bench_plan import BenchPlan
from quengine.errors import CannotRunError, EngineError, nearest
from quengine.kernels.private_folder import user_cache
from quengine.loading.placement import free_memory
from quengine.memory import WORKSPACE, gib
from quengine.models.synthetic.presets import PRESETS, synthetic_preset
from quengine.models.synthetic.synthetic import remove_partial_files, synthetic_bytes, write_synthetic
from quengine.platform.device import choose_device
from quengine.platform.machine import available_memory

Say = Callable[[str], None]

_SPARE = 1 << 27
"""Bytes of disk beside the weights: the vocabulary, and room for other programs that write."""


@contextmanager
def synthetic_models(
    names: Sequence[str], plan: BenchPlan, folder: Path | None, say: Say, progress: Say
) -> Iterator[list[Path]]:
    """The files of synthetic models, written unless they are kept from before; those that cannot be kept are removed.

    Args:
        names: presets, or `PRESET-Nl` for the first N layers of one.
        plan: how they will run: its device must have the memory.
        folder: where they are kept; None: the user's cache, whose oldest files make room.
        say: called with a line for each file.
        progress: called with how far a file is written; "" at the end.

    Raises:
        EngineError: no such preset.
        CannotRunError: too little memory for a model or disk for its file, or no folder can be written.
    """
    for name in names:
        if synthetic_preset(name) is None:
            raise EngineError(
                f"--synthetic {name}: must be one of {', '.join(PRESETS)}, or the first N layers of one, as in "
                f"llama-3-70b-20l{nearest(name, PRESETS)}"
            )
    for name in names:
        _check_memory(name, plan)
    kept = _kept_in(folder)
    temporary: Path | None = None
    try:
        made: list[Path] = []
        for name in names:
            path = None if kept is None else kept / _file_name(name)
            if path is not None and path.is_file():
                with suppress(OSError):
                    os.utime(path)  # the oldest are those that were used longest ago
                say(f"{path} is used, {gib(path.stat().st_size)}, kept from before")
            elif path is not None and _has_room(path, name, folder is None, made, say):
                _write(
                    path,
                    name,
                    "kept for the next time; --synthetic-dir DIR keeps it elsewhere",
                    say,
                    progress,
                )
            elif folder is not None:
                raise CannotRunError(_too_full(name, folder))
            else:
                temporary = temporary or _temporary_folder()
                path = temporary / _file_name(name)
                if not _fits(path.parent, name):
                    raise CannotRunError(_too_full(name, *filter(None, (kept, temporary.parent))))
                where = _cache_folder()
                problem = (
                    f"nothing can be kept in {where}" if where else "there is no home folder to keep it in"
                )
                _write(path, name, f"removed at the end, as {problem}", say, progress)
            made.append(path)
        yield made
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _file_name(name: str) -> str:
    from quengine import __version__  # another version may draw other weights

    return f"{name}-{__version__}.gguf"


def _check_memory(name: str, plan: BenchPlan) -> None:
    """Raises CannotRunError for a model whose weights alone are more than the memory of the plan's device."""
    device, _ = choose_device(plan.config)
    ranks = min(plan.ranks)
    room = ranks * free_memory(device, ranks) - WORKSPACE[device.type]
    where = str(device) if ranks == 1 or device.type == "cpu" else f"{ranks} devices"
    if device.type == "cuda" and plan.config.places_experts:
        room, where = room + available_memory(), f"{where} and the host"
    nbytes = synthetic_bytes(name)
    if nbytes <= room:
        return
    raise CannotRunError(
        f"--synthetic {name}: its weights take {gib(nbytes)}, and {where} has {gib(max(0, room))} free; "
        f"{_smaller(name, room)}"
    )


def _smaller(name: str, room: int) -> str:
    """What fits into `room` bytes: the model's first layers, or the largest of the other models."""
    spec = synthetic_preset(name)
    assert spec is not None
    base = name if name in PRESETS else name.rpartition("-")[0]
    for layers in range(spec.block_count - 1, 0, -1):
        fewer = f"{base}-{layers}l"
        if synthetic_bytes(fewer) <= room:
            return f"{fewer} has the most of its {spec.block_count} layers that fit"
    fitting = max(
        (each for each in PRESETS if synthetic_bytes(each) <= room), key=synthetic_bytes, default=None
    )
    return f"{fitting} fits" if fitting else "no synthetic model fits"


def _cache_folder() -> Path | None:
    cache = user_cache()
    return None if cache is None else cache / "synthetic"


def _kept_in(folder: Path | None) -> Path | None:
    """The folder that keeps files, created if missing and cleared of the partial files of killed processes; None: the
    cache cannot be written.

    Raises CannotRunError where a folder that the user chose cannot be written.
    """
    chosen = folder or _cache_folder()
    if chosen is None:
        return None
    try:
        chosen.mkdir(parents=True, exist_ok=True)
        remove_partial_files(chosen)
        with tempfile.NamedTemporaryFile(dir=chosen) as trial:
            trial.write(bytes(4096))
    except OSError as error:
        if folder is not None:
            raise CannotRunError(
                f"--synthetic-dir {folder}: cannot write there: {error.strerror or error}"
            ) from None
        return None
    return chosen


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="quengine-synthetic-"))
    except OSError as error:
        raise CannotRunError(
            f"cannot write a synthetic model: neither the cache nor a temporary folder can be written "
            f"({error.strerror or error}); --synthetic-dir DIR names another folder"
        ) from None


def _has_room(path: Path, name: str, removes: bool, in_use: Sequence[Path], say: Say) -> bool:
    """Whether the file of a model fits onto the disk, once the folder's oldest files have made room if it `removes`."""
    if removes and not _fits(path.parent, name):
        others = [each for each in path.parent.glob("*.gguf") if each not in in_use]
        freed = sum(each.stat().st_size for each in others)
        if _free(path.parent) + freed < synthetic_bytes(name) + _SPARE:
            return False  # removing all of them would not be enough
        for old in sorted(others, key=lambda each: each.stat().st_mtime):
            say(f"{old} makes room, {gib(old.stat().st_size)}")
            old.unlink(missing_ok=True)
            if _fits(path.parent, name):
                break
    return _fits(path.parent, name)


def _fits(folder: Path, name: str) -> bool:
    return _free(folder) >= synthetic_bytes(name) + _SPARE


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _too_full(name: str, *folders: Path) -> str:
    free = ", ".join(f"{gib(_free(folder))} are free in {folder}" for folder in folders)
    return (
        f"--synthetic {name}: its file takes {gib(synthetic_bytes(name))}, and {free}; "
        "--synthetic-dir DIR names another folder"
    )


def _write(path: Path, name: str, fate: str, say: Say, progress: Say) -> None:
    total = synthetic_bytes(name)
    say(f"writing {path}, {gib(total)} of random weights, {fate}")

    def report(done: int) -> None:
        progress(f"writing {name}: {gib(done)} of {gib(total)}, {100 * done / total:.0f}%")

    try:
        write_synthetic(path, name, progress=report)
    except OSError as error:
        raise CannotRunError(
            f"cannot write the synthetic model to {path}: {error.strerror or error}"
        ) from error
    finally:
        progress("")
