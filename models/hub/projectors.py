"""Finds the projector file of a model (mmproj), by names alone: in a repository, and beside a model's file."""

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from quengine.models.hub.hub_name import QUANT, without_shard

_PREFERRED = ("f16", "bf16", "q8_0", "f32")
"""Types of a projector's file, the first one first."""


def is_projector(file: str) -> bool:
    """Whether a file of this name is a projector."""
    name = PurePosixPath(file).name.lower()
    return name.endswith(".gguf") and "mmproj" in name


def projector_name(model: str) -> str:
    """The name that a projector must have to belong to the model `model` (a file's name without suffix) alone."""
    return f"mmproj-{model}.gguf"


def choose_projector(model: str, files: Iterable[str]) -> str | None:
    """The projector of the model file `model` among files of the same root, as paths with "/", if there is one.

    Files in the model's own folder come before files in the folders above it. Among these it is the one whose name has
    most in common with the model's, then F16, BF16, Q8_0. A projector that `projector_name` names after another model
    belongs to that model, unless this model's name is a longer form of that one's.
    """
    names = list(files)
    own, stem = PurePosixPath(model), without_shard(model)
    if is_projector(model):
        return None
    for folder in own.parents:
        here = [name for name in names if PurePosixPath(name).parent == folder]
        models = {without_shard(name) for name in here if name.lower().endswith(".gguf")}
        others = {projector_name(each).lower() for each in models if not stem.startswith(each)}
        found = [
            name for name in here if is_projector(name) and PurePosixPath(name).name.lower() not in others
        ]
        if found:
            return min(found, key=lambda name: (-_common(own.name, name), _rank(name), name))
    return None


def find_projector(model: Path) -> Path | None:
    """`choose_projector` for a model's file, among the files beside it and, in the Hub's cache, those of its
    snapshot."""
    if model.is_dir():
        return None
    root = next(
        (
            each
            for each in model.parents
            if each.parent.name == "snapshots" and "--" in each.parent.parent.name
        ),
        model.parent,
    )
    folders = [each for each in model.parents if each.is_relative_to(root)]
    files = list[str]()
    try:
        for folder in folders:
            with os.scandir(folder) as entries:
                files += [
                    (folder / each.name).relative_to(root).as_posix()
                    for each in entries
                    if each.name.lower().endswith(".gguf") and each.is_file()
                ]
    except OSError:
        return None
    found = choose_projector(model.relative_to(root).as_posix(), files)
    return None if found is None else root / found


def _common(model: str, projector: str) -> int:
    """The length of the longest prefix of the model's name, up to its type, that the projector's name contains."""
    wanted, given = _plain(model), _plain(projector)
    return max((n for n in range(len(wanted) + 1) if wanted[:n] in given), default=0)


def _plain(file: str) -> str:
    return QUANT.sub("", without_shard(file)).lower().strip("-_.")


def _rank(file: str) -> int:
    stem = without_shard(file).lower()
    return next(
        (rank for rank, kind in enumerate(_PREFERRED) if re.search(rf"(?:^|[-._]){kind}$", stem)),
        len(_PREFERRED),
    )
