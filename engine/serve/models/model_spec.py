"""What a server can load: a model's name, where it is, and its options; and the models in and below a folder.

In a folder these are GGUF files, those in parts as one, and Hugging Face checkpoint folders.
"""

import logging
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.models.hub.hub_name import file_sets, is_companion, without_shard
from quengine.serve.settings import ServerSettings

logger = logging.getLogger("quengine.serve")

HUB = "hf.co"
"""The folder of models that clients have pulled from the Hugging Face Hub by repository (`model_links`)."""


def find_models(folder: Path) -> dict[str, Path]:
    """Each model's file (of several parts the first) or folder, by its name.

    The name is that of the file or folder; if several have the same, and in the folder HUB, the path from `folder`
    stands before it. Projectors of vision models (mmproj) and importance matrices are no models. Names that begin with
    a dot are skipped; so are, with a warning, files that no model can be read from: a broken link, a pipe.

    Raises:
        EngineError: the folder cannot be read.
    """
    if not folder.is_dir():
        raise EngineError(f"--models-dir {folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    found = [(_name(path, folder), path) for path in _models(folder)]
    count = Counter(name.name for name, _ in found if name.parts[0] != HUB)
    return {
        (name.name if count[name.name] == 1 and name.parts[0] != HUB else name.as_posix()): path
        for name, path in found
    }


def parts_of(path: Path) -> tuple[Path, ...]:
    """All parts, in order, of the GGUF model whose first (or only) file is `path`."""
    sets = file_sets(each.name for each in path.parent.glob("*.gguf"))
    names = next((found for found in sets if path.name in found), (path.name,))
    return tuple(path.with_name(name) for name in names)


def _models(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "config.json" in files and any(name.endswith(".safetensors") for name in files):
            folders.clear()
            yield Path(place)
            continue
        for parts in file_sets(name for name in files if not name.startswith(".")):
            if is_companion(parts[0]):
                continue
            paths = [Path(place, part) for part in parts]
            wrong = next(((path, why) for path in paths if (why := _unreadable(path)) is not None), None)
            if wrong is None:
                yield paths[0]
            else:
                _warn_skipped(*wrong)


def _unreadable(path: Path) -> str | None:
    """Why no model can be read from a file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a link that leads nowhere"
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISREG(mode):
        return "not a regular file"
    return None if os.access(path, os.R_OK) else "it cannot be read by this user"


@cache
def _warn_skipped(path: Path, why: str) -> None:
    """Warns once for each file, as a folder is scanned again and again."""
    logger.warning("--models-dir: %s is skipped: %s", path, why)


def _name(path: Path, folder: Path) -> Path:
    """The path relative to `folder`, without the number of a part and the suffix."""
    if path.is_dir():
        return path.relative_to(folder) if path != folder else Path(path.resolve().name)
    return path.relative_to(folder).with_name(without_shard(path.name))


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be loaded.

    Attributes:
        settings: the server's, with the names, sampling defaults and template of this model; the first of its
            `model_names` is the model's.
        config: how the engine runs it.
        model: as `LLM` takes it.
        path, nbytes: the file or folder of its weights, and their bytes; None and 0 where they are not known.
        at_start: it is loaded when the server starts.
    """

    settings: ServerSettings
    config: EngineConfig = field(default_factory=EngineConfig)
    model: str = ""
    path: Path | None = None
    nbytes: int = 0
    at_start: bool = False

    @property
    def name(self) -> str:
        return self.settings.model_names[0]


def check_names(specs: Iterable[ModelSpec]) -> None:
    """Raises EngineError where two models have a name in common."""
    owners: dict[str, str] = {}
    for spec in specs:
        for name in spec.settings.model_names:
            if name in owners:
                raise EngineError(f"two models are called {name}: {owners[name]} and {spec.model}")
            owners[name] = spec.model


def check_header(spec: ModelSpec) -> None:
    """Raises EngineError for a GGUF file whose header is not a model's, before another model is unloaded for it."""
    if spec.path is not None and not spec.path.is_dir():
        from quengine.models.gguf.header import read_shard

        for part in parts_of(spec.path):
            read_shard(part)


def weight_bytes(path: Path) -> int:
    """Bytes of a model's files: of a folder's weights, of all parts of a split GGUF. 0 where they cannot be read."""
    try:
        if path.is_dir():
            return sum(each.stat().st_size for each in path.glob("*.safetensors"))
        return sum(part.stat().st_size for part in parts_of(path))
    except OSError:
        return 0
