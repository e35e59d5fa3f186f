"""Model names: what a name given to `--model` stands for, and where its file lies on this machine.

Knows the catalogue's aliases, `hf:` names and the layout of the Hugging Face cache. Never goes to the
network: `hub_pull` does that.
"""

import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quengine.errors import EngineError
from quengine.models.catalogue import CatalogueEntry, catalogue, closest_aliases

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))(?![A-Za-z0-9_])", re.IGNORECASE
)


class ModelNameError(EngineError):
    """The name stands for no model, or for more than one."""


class ModelNotHereError(EngineError):
    """The name is right but the file is not on this machine yet; the message has the command to fetch it."""


@dataclass(frozen=True)
class HubName:
    """What is wanted from a repository: one file, or the one set of files of one quantization."""

    repo: str
    file: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        if self.file is not None:
            return f"hf:{self.repo}/{self.file}"
        return f"hf:{self.repo}:{self.quant}" if self.quant else f"hf:{self.repo}"


def parse_hub_name(name: str) -> HubName:
    """Reads `hf:user/repo:QUANT`, `hf:user/repo/folder/file.gguf` or `hf:user/repo`.

    Raises ModelNameError.
    """
    body = name.removeprefix("hf:")
    body, colon, quant = body.partition(":")
    user, _, rest = body.partition("/")
    repo_name, _, file = rest.partition("/")
    repo = f"{user}/{repo_name}"
    parts_ok = (
        _REPO.fullmatch(repo)
        and not (file and colon)
        and (quant or not colon)
        and ".." not in file.split("/")
    )
    if not parts_ok or (file and not file.lower().endswith(".gguf")):
        raise ModelNameError(
            f"{name}: not a model name; write hf:user/repo:QUANT (QUANT as Q4_K_M) or hf:user/repo/file.gguf"
        )
    return HubName(repo, file or None, quant or None)


def file_sets(files: Iterable[str]) -> list[tuple[str, ...]]:
    """The .gguf files of a repository, shards of one model together and in order."""
    sets: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf"):
            shard = _SHARD.search(file)
            sets.setdefault(file[: shard.start()] + f"-of-{shard[2]}" if shard else file, []).append(file)
    return [tuple(found) for found in sets.values()]


def missing_shards(files: Sequence[str]) -> list[str]:
    """The shards that a set's own names promise and that are not in it."""
    shard = _SHARD.search(files[0])
    if shard is None:
        return []
    stem, total = files[0][: shard.start()], int(shard[2])
    wanted = [f"{stem}-{index:05d}-of-{total:05d}.gguf" for index in range(1, total + 1)]
    return [file for file in wanted if file not in files]


def quant_of(file: str) -> str:
    """The quantization that a file's name tells ("Q4_K_M"), or an empty string."""
    found = _QUANT.findall(Path(_SHARD.sub(".gguf", file)).stem)
    return str(found[-1]) if found else ""


def choose_files(wanted: HubName, files: Iterable[str]) -> tuple[str, ...]:
    """The files, in shard order, that `wanted` means among those of its repository.

    Raises ModelNameError, listing what there is, when none or more than one set fits.
    """
    sets = file_sets(files)
    if wanted.file is not None:
        fits = [found for found in sets if wanted.file in found]
    else:
        models = [found for found in sets if not _is_companion(found[0])]
        fits = [found for found in models if wanted.quant is None or _has_quant(found[0], wanted.quant)]
    if len(fits) == 1:
        lost = missing_shards(fits[0])
        if lost:
            raise ModelNameError(
                f"{wanted}: the repository lacks {len(lost)} of its shards, the first is {lost[0]}"
            )
        return fits[0]
    there = ", ".join(found[0] + (f" (+{len(found) - 1} shards)" if len(found) > 1 else "") for found in sets)
    if not sets:
        raise ModelNameError(f"{wanted}: {wanted.repo} has no .gguf files")
    if not fits:
        raise ModelNameError(f"{wanted}: no such file in {wanted.repo}; it has {there}")
    several = ", ".join(found[0] for found in fits)
    raise ModelNameError(
        f"{wanted}: {len(fits)} files fit: {several}; name one, as in hf:{wanted.repo}/{fits[0][0]}"
    )


def _is_companion(file: str) -> bool:
    """Vision projectors and importance matrices lie beside the models and are not models."""
    stem = Path(file).name.lower()
    return stem.startswith("mmproj") or "imatrix" in stem


def _has_quant(file: str, quant: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", file, re.IGNORECASE) is not None


def cache_dir() -> Path:
    """The Hugging Face cache, shared with every other program that uses it (HF_HUB_CACHE, HF_HOME)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


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


def find_in_cache(wanted: HubName) -> Path | None:
    """The first file of `wanted` in the cache, or None unless every shard is there.

    Raises ModelNameError when more than one set of files in the cache fits.
    """
    for snapshot in snapshots(repo_dir(wanted.repo)):
        files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.exists()]
        fits = [found for found in file_sets(files) if not missing_shards(found)]
        if wanted.file is not None:
            fits = [found for found in fits if wanted.file in found]
        elif wanted.quant is not None:
            fits = [found for found in fits if _has_quant(found[0], wanted.quant)]
        if fits:
            return snapshot / choose_files(wanted, [file for found in fits for file in found])[0]
    return None


def packaged_file(entry: CatalogueEntry) -> Path | None:
    """The model file inside an installed Python package, found without importing the package."""
    if entry.package is None or entry.package_file is None:
        return None
    spec = importlib.util.find_spec(entry.package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / entry.package_file
        if path.is_file():
            return path
    return None


def hub_name(name: str) -> HubName:
    """What an alias or an `hf:` name means. Raises ModelNameError for anything else."""
    if name.startswith("hf:"):
        return parse_hub_name(name)
    entry = catalogue().get(name.lower())
    if entry is None:
        raise _unknown(name)
    return HubName(entry.repo, entry.file)


def resolve_model(name: str) -> Path:
    """The file or checkpoint folder that `name` stands for.

    `name` is a path to a GGUF file or a Hugging Face checkpoint folder, an alias of the catalogue, or
    `hf:user/repo:QUANT` / `hf:user/repo/file.gguf`. For a split GGUF the first shard is returned.

    Raises ModelNotHereError (with the `engine pull` command) for a known name that was not pulled yet, and
    ModelNameError for a name that stands for nothing.
    """
    path = Path(name).expanduser()
    if not name.startswith("hf:"):
        if path.is_file() or (path / "config.json").is_file():
            return path
        if name.lower() not in catalogue():
            raise _no_path(name, path) if path.exists() or _is_like_path(name) else _unknown(name)
    entry = catalogue().get(name.lower())
    found = (packaged_file(entry) if entry else None) or find_in_cache(hub_name(name))
    if found is None:
        raise ModelNotHereError(f"{name}: not on this machine; fetch it with: engine pull {name}")
    return found


def _is_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.lower().endswith(".gguf")


def _no_path(name: str, path: Path) -> ModelNameError:
    if path.is_dir():
        inside = ", ".join(sorted(child.name for child in path.glob("*.gguf")))
        having = f"it has {inside}: name that file" if inside else "and no .gguf file"
        return ModelNameError(f"{name}: a folder without config.json; {having}")
    return ModelNameError(f"{name}: no such file")


def _unknown(name: str) -> ModelNameError:
    if _REPO.fullmatch(name.partition(":")[0]):
        return ModelNameError(f"{name}: no such file; a model of the Hugging Face Hub is written hf:{name}")
    near = closest_aliases(name)
    if near:
        return ModelNameError(f"{name}: no such model; did you mean {' or '.join(near)}?")
    return ModelNameError(
        f"{name}: no such model; `engine list --all` shows the names, or give a path or hf:user/repo:QUANT"
    )
