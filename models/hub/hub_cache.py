"""The models in the Hugging Face cache: which are here, where, and how they are removed.

The cache's published layout is models--USER--REPO/{blobs,refs,snapshots/COMMIT/FILE -> blob}. It is shared with every
program that uses huggingface_hub. Nothing here uses the network.
"""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quengine.errors import CannotRunError
from quengine.models.hub.hub_name import (
    HubName,
    choose_files,
    file_sets,
    fits,
    is_companion,
    missing_shards,
    quant_of,
)
from quengine.models.hub.projectors import choose_projector


def cache_dir() -> Path:
    """The Hugging Face cache, shared with every other program that uses it (HF_HUB_CACHE, HF_HOME).

    Raises:
        CannotRunError: it would be in a home folder, and the user has none.
    """
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    if folder.parts[:1] == ("~",):
        raise CannotRunError(
            "this user has no home folder, so the Hugging Face cache has none: set HOME or HF_HOME"
        )
    return folder


def repo_dir(repo: str) -> Path:
    """The cache's folder of one repository."""
    return cache_dir() / f"models--{repo.replace('/', '--')}"


def snapshots(repo: Path) -> Iterator[Path]:
    """The snapshot folders of a repository in the cache: the one `main` names first, then from new to old."""
    folder = repo / "snapshots"
    if not folder.is_dir():
        return
    main = repo / "refs" / "main"
    current = folder / main.read_text().strip() if main.is_file() else folder / "-"
    found = [path for path in folder.iterdir() if path.is_dir()]
    yield from sorted(found, key=lambda path: (path != current, -path.stat().st_mtime))


def gguf_sets(snapshot: Path) -> list[tuple[str, ...]]:
    """The complete GGUF models of a snapshot: their files, relative to it, shards in order."""
    files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.exists()]
    return [found for found in file_sets(files) if not missing_shards(found)]


def find_in_cache(wanted: HubName) -> Path | None:
    """The first file of `wanted` in the cache, or None unless every shard is there.

    Raises ModelNameError when more than one set of files in the cache fits.
    """
    for snapshot in snapshots(repo_dir(wanted.repo)):
        files = [file for found in gguf_sets(snapshot) for file in found if fits(wanted, found)]
        if files:
            return snapshot / choose_files(wanted, files)[0]
    return None


@dataclass(frozen=True)
class InstalledModel:
    """One model in the cache: its repository, its files (all shards, in order) and their bytes on disk.

    projector: the file that makes images rows of it, relative to the snapshot as `files` are; None: there is none.
    """

    repo: str
    files: tuple[str, ...]
    path: Path
    nbytes: int
    quant: str
    projector: str | None = None

    @property
    def projector_path(self) -> Path | None:
        snapshot = self.path.parents[len(Path(self.files[0]).parts) - 1]
        return None if self.projector is None else snapshot / self.projector


def installed_models() -> list[InstalledModel]:
    """Every complete GGUF model in the cache, by repository and file name; the newest snapshot of each. A projector
    that belongs to a model is not listed."""
    found = _installed()
    taken = {(model.repo, model.projector) for model in found}
    return [model for model in found if (model.repo, model.files[0]) not in taken]


def _installed() -> list[InstalledModel]:
    """As `installed_models`, with projectors listed as models."""
    if not cache_dir().is_dir():
        return []
    found = []
    for repo in sorted(cache_dir().glob("models--*")):
        seen: set[tuple[str, ...]] = set()
        for snapshot in snapshots(repo):
            sets = gguf_sets(snapshot)
            there = [file for files in sets for file in files]
            for files in sets:
                if files not in seen:
                    seen.add(files)
                    nbytes = sum((snapshot / file).stat().st_size for file in files)
                    name = repo.name.removeprefix("models--").replace("--", "/", 1)
                    projector = None if is_companion(files[0]) else choose_projector(files[0], there)
                    found.append(
                        InstalledModel(
                            name, files, snapshot / files[0], nbytes, quant_of(files[0]), projector
                        )
                    )
    return found


def find_installed(wanted: HubName) -> InstalledModel | None:
    """The one complete model in the cache that `wanted` means, or None.

    Raises ModelNameError when more than one fits.
    """
    here = [model for model in _installed() if model.repo == wanted.repo and fits(wanted, model.files)]
    if not here:
        return None
    files = choose_files(wanted, {file for model in here for file in model.files})
    return next(model for model in here if model.files == files)


def remove_model(model: InstalledModel) -> int:
    """Deletes a model's files from every snapshot of its repository, its projector unless another model has it, and the
    blobs nothing else points at.

    Returns the bytes freed.
    """
    repo = repo_dir(model.repo)
    freed = 0
    for snapshot in list(snapshots(repo)):
        for file in (*model.files, *_own_projector(model, snapshot)):
            (snapshot / file).unlink(missing_ok=True)
        _drop_empty(snapshot)
    used = {path.resolve().name for path in (repo / "snapshots").rglob("*") if path.is_symlink()}
    for blob in list((repo / "blobs").iterdir()):
        if blob.name not in used and not blob.name.endswith(".incomplete"):
            freed += blob.stat().st_size
            blob.unlink()
    if not used:
        shutil.rmtree(repo)
        shutil.rmtree(cache_dir() / ".locks" / repo.name, ignore_errors=True)
    return freed


def _own_projector(model: InstalledModel, snapshot: Path) -> list[str]:
    """The projector of a model in a snapshot, unless another model there has it too."""
    sets = gguf_sets(snapshot)
    there = [file for files in sets for file in files]
    others = [files[0] for files in sets if files != model.files and not is_companion(files[0])]
    mine = choose_projector(model.files[0], there)
    return [] if mine is None or mine in {choose_projector(each, there) for each in others} else [mine]


def _drop_empty(snapshot: Path) -> None:
    for folder in [*sorted((path for path in snapshot.rglob("*") if path.is_dir()), reverse=True), snapshot]:
        with contextlib.suppress(OSError):
            folder.rmdir()
