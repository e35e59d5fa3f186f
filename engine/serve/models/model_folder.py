"""The models in and below a folder: GGUF files, those in parts as one, and Hugging Face checkpoint folders."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from quengine.errors import EngineError
from quengine.models.hub.hub_name import file_sets, is_companion, without_shard

HUB = "hf.co"
"""The folder of models that clients have pulled from the Hugging Face Hub by repository (`model_links`)."""


def find_models(folder: Path) -> dict[str, Path]:
    """Each model's file (of several parts the first) or folder, by its name.

    The name is the file's or the folder's; of several alike, and of what lies in the folder HUB, it has the path from
    `folder` before it. Projectors of vision models (mmproj) and importance matrices are no models. What begins with a
    dot is passed over, and so are links that lead nowhere.

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
            if not is_companion(parts[0]) and Path(place, parts[0]).exists():
                yield Path(place, parts[0])


def _name(path: Path, folder: Path) -> Path:
    """Relative to `folder`, without the number of a part and the suffix."""
    if path.is_dir():
        return path.relative_to(folder) if path != folder else Path(path.resolve().name)
    return path.relative_to(folder).with_name(without_shard(path.name))
