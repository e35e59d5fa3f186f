"""Where Triton keeps compiled kernels: a folder that nobody but this user can write.

Triton loads what it finds there without looking who wrote it.
"""

import atexit
import logging
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import triton

from quengine.kernels.private_folder import ForeignFolderError, check_private, user_cache

_log = logging.getLogger(__name__)


@cache
def use_private_cache() -> None:
    """Before the first kernel is compiled: have Triton keep kernels where only this user can put them.

    That is TRITON_CACHE_DIR, or Triton's folder in the home folder, if it is private; else the engine's among the
    user's caches; else a temporary one of this process.
    """
    found = Path(triton.knobs.cache.dir)
    try:
        _make_private(found)
        return
    except OSError as error:
        problem = error
    own = _other_folder()
    os.environ["TRITON_CACHE_DIR"] = str(
        own
    )  # Triton reads it whenever it looks, child processes as they start
    if Path(triton.knobs.cache.dir) != own:  # a program has set the folder, and not the variable
        triton.knobs.cache.dir = str(own)
    _log.warning(
        "kernels that Triton compiled in %s are not used: %s; they are kept in %s",
        found,
        problem.strerror,
        own,
    )


def _other_folder() -> Path:
    among_caches = user_cache()
    if among_caches is not None:
        try:
            _make_private(among_caches / "triton")
            return among_caches / "triton"
        except OSError as error:
            _log.debug("%s: %s", among_caches / "triton", error.strerror)
    folder = Path(tempfile.mkdtemp(prefix="quengine-triton-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _make_private(folder: Path) -> None:
    """Raises OSError where it is not, and cannot be made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ForeignFolderError(folder, "it cannot be written")
