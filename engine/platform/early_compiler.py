"""Starts the process that compiles kernels while torch is imported, where a model may lack some on this machine.

Whether it lacks some is known once this process has imported torch and read the model's header, more than a second
later. Until then, a note among the user's caches tells that the model's kernels have been looked for once.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

from quengine.errors import EngineError
from quengine.kernels.cuda.launch import compiler_process
from quengine.kernels.private_folder import cache_of_file
from quengine.models.hub.hub import resolve_model
from quengine.platform.torch_import import PRELUDE

logger = logging.getLogger("quengine.start")

_NEEDED = "quengine.runners.compile_kernels"
"""What the process needs to read an order."""

_notes: list[Path] = []


def begin(model: str) -> None:
    """Begin, unless the kernels of this model have been looked for before."""
    note = _note_of(model)
    if note is None or note.exists():
        return
    _notes.append(note)
    try:
        compiler_process.start_ahead(PRELUDE, _NEEDED)
    except OSError as error:  # it is tried again where it is needed
        logger.debug("kernels are not compiled early: %s", error)


def end(looked_for: bool) -> None:
    """Ends the process, if it still waits, once the model is loaded. looked_for: the model's missing kernels, if any,
    are being compiled; the note is written."""
    compiler_process.drop()
    while _notes:
        note = _notes.pop()
        with suppress(OSError):  # a cache that cannot be written: begun again next time
            if looked_for:
                note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                note.touch(mode=0o600)


def _note_of(model: str) -> Path | None:
    """The note of a model's file, as it is now, and of Triton's folder; None where no cache or file is found."""
    try:
        return cache_of_file("looked-for", resolve_model(model), os.environ.get("TRITON_CACHE_DIR"))
    except (OSError, EngineError):
        return None
