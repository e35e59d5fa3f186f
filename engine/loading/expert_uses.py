"""How often a model's experts were used, kept from one start to the next: a device then holds the most used at once.

A file for each model, among the user's caches. What is wrong with one, or missing, costs a warm-up and nothing else.
"""

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from quengine.kernels.private_folder import user_cache

logger = logging.getLogger("quengine.experts")

MOST_FILES = 32
"""Models whose counts are kept: those that were used last."""


def uses_file(model: Path) -> Path | None:
    """The file of a model's counts; another once the model's own has changed. None without a home folder."""
    cache = user_cache()
    if cache is None:
        return None
    status = model.stat()
    name = f"{model.resolve()} {status.st_size} {status.st_mtime_ns}"
    return cache / "experts" / f"{sha256(name.encode()).hexdigest()[:32]}.json"


def read_uses(model: Path, layers: int, experts: int) -> list[list[int]] | None:
    """The counts [layers][experts] of a model; None: there are none."""
    with suppress(OSError, ValueError):
        file = uses_file(model)
        if file is not None:
            uses: list[list[int]] = json.loads(file.read_text())
            shaped = isinstance(uses, list) and len(uses) == layers
            if shaped and all(_is_row(row, experts) for row in uses):
                return uses
    return None


def write_uses(model: Path, uses: Sequence[Sequence[int]]) -> None:
    """Keeps the counts of a model, and removes those of models used long ago."""
    try:
        file = uses_file(model)
        if file is None:
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps([list(row) for row in uses]))
        beside.replace(file)
        kept = sorted(file.parent.glob("*.json"), key=lambda each: -each.stat().st_mtime_ns)
        for old in kept[MOST_FILES:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.info("uses of experts are not kept: %s", error)


def _is_row(row: object, experts: int) -> bool:
    return (
        isinstance(row, list)
        and len(row) == experts
        and all(isinstance(use, int) and 0 <= use < 2**31 for use in row)
    )
