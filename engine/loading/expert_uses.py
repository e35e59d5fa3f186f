"""How often a model's experts were used, kept from one start to the next: a device then holds the most used at once.

A file for each model, among the user's caches. One that is missing or damaged costs a warm-up and nothing else.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from quengine.kernels.private_folder import cache_of_file
from quengine.models.gguf.whole_file import beside

logger = logging.getLogger("quengine.experts")

MOST_FILES = 32
"""Models whose counts are kept: those that were used last."""


def uses_file(model: Path) -> Path | None:
    """The file of a model's counts, another one once the model's file has changed. None without a home folder."""
    found = cache_of_file("experts", model)
    return None if found is None else found.with_suffix(".json")


def read_uses(model: Path, layers: int, experts: int) -> list[list[int]] | None:
    """The counts [layers][experts] of a model; None where no file has them, or one has another number of layers or is
    damaged (which is logged)."""
    try:
        file = uses_file(model)
        if file is None or not file.exists():
            return None
    except OSError:
        return None
    try:
        uses: list[list[int]] = json.loads(file.read_bytes())
        if not isinstance(uses, list) or not uses or not all(_is_row(row, experts) for row in uses):
            raise ValueError(f"no lists of {experts} counts")
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("uses of experts are counted anew, as %s cannot be read: %s", file, error)
        return None
    return uses if len(uses) == layers else None


def write_uses(model: Path, uses: Sequence[Sequence[int]]) -> None:
    """Keeps the counts of a model, and removes those of models used long ago."""
    try:
        file = uses_file(model)
        if file is None:
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with beside(file) as written:
            written.write(json.dumps([list(row) for row in uses]).encode())
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
