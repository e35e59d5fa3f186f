"""Triton's cache of compiled kernels: a folder that only this user can write, with verified files.

Triton loads what it finds there without checking its author or integrity. So each file has a digest beside it, keyed
with the user's secret in the folder (HMAC-SHA-256); a file that does not match is ignored and rebuilt.
"""

import atexit
import hmac
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

import triton
from triton.runtime.cache import FileCacheManager

from quengine.kernels.cuda.launch.triton_changes import use_stable_keys
from quengine.kernels.private_folder import ForeignFolderError, check_private, folder_key, user_cache

_log = logging.getLogger(__name__)

DIGEST_SUFFIX = ".hmac"
_GROUP = "__grp__"
"""The prefix of the file that lists the other files of a kernel."""

when_missing: list[Callable[[str], None]] = []
"""Called with the folder name of a kernel that is not cached: another process may be compiling it."""


class CheckedCache(FileCacheManager):  # type: ignore[misc]
    """The folder of one kernel, or of one compiled C file. Triton creates one for each look-up."""

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        del binary
        if filename.endswith(".source"):  # as large as the machine code, and not used here
            return str(super().put("", filename))
        content = data if isinstance(data, bytes) else str(data).encode()
        path = super().put(content, filename)
        super().put(self._digest(filename, content), filename + DIGEST_SUFFIX)
        return str(path)

    def get_file(self, filename: str) -> str | None:
        return None if self.read(filename) is None else str(self._make_path(filename))

    def get_group(self, filename: str) -> dict[str, str] | None:
        found = self._read_group(filename)
        if found is None and when_missing:
            for call in tuple(when_missing):
                call(self.key)
            found = self._read_group(filename)
        return found

    def _read_group(self, filename: str) -> dict[str, str] | None:
        listed = self.read(_GROUP + filename)
        if listed is None:
            return None
        names = [name for name in json.loads(listed)["child_paths"] if not name.endswith(".source")]
        # The listed paths are in the folder where the list was written, which may have moved.
        return {name: self._make_path(name) for name in names} if all(map(self.get_file, names)) else None

    def read(self, filename: str) -> bytes | None:
        """The content of a file, if it is as this user wrote it, else None."""
        path = Path(self._make_path(filename))
        try:
            content, digest = path.read_bytes(), path.with_name(filename + DIGEST_SUFFIX).read_bytes()
        except OSError:
            return None
        return content if hmac.compare_digest(digest, self._digest(filename, content)) else None

    def _digest(self, filename: str, content: bytes) -> bytes:
        secret = _secret(Path(self.cache_dir).parent)
        return hmac.digest(secret, f"{self.key}\0{filename}\0".encode() + content, "sha256")


def is_cached(key: str) -> bool:
    """Whether a kernel, by the name of its folder, is there, complete and unchanged."""
    manager = CheckedCache(key)
    listed = Path(manager.cache_dir).glob(f"{_GROUP}*.json")
    return any(manager._read_group(path.name[len(_GROUP) :]) for path in listed)


def kernel_names(folder: Path) -> list[str]:
    """The kernels whose files in a folder of the cache are complete and unchanged."""
    manager = CheckedCache(folder.name)
    listed = [path.name[len(_GROUP) :] for path in folder.glob(f"{_GROUP}*.json")]
    return [Path(name).stem for name in listed if manager.get_group(name)]


def source_stamp() -> bytes:
    """A digest of the modules that contain kernels."""
    digest = sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


@cache
def _secret(folder: Path) -> bytes:
    """This user's secret in a folder; if none can be stored, one for this process."""
    try:
        return folder_key(folder, make=True) or os.urandom(32)
    except OSError as error:
        _log.debug("%s: %s", folder, error.strerror)
        return os.urandom(32)


@cache
def use_private_cache() -> None:
    """Makes Triton cache kernels in a private folder and verify them; call before the first kernel is compiled.

    The folder is TRITON_CACHE_DIR or Triton's folder in the home folder, if it is private; else the engine's folder
    among the user's caches; else a temporary one for this process. All processes that call this agree on a kernel's
    name.
    """
    use_stable_keys()
    triton.knobs.cache.manager_class = CheckedCache
    triton.knobs.compilation.store_binary_only = True
    found = Path(triton.knobs.cache.dir)
    try:
        _make_private(found)
        return
    except OSError as error:
        problem = error
    own = _other_folder()
    os.environ["TRITON_CACHE_DIR"] = str(
        own
    )  # Triton reads it at each look-up, child processes when they start
    if Path(triton.knobs.cache.dir) != own:  # a program has set the folder, not the variable
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
    """Creates a folder of mode 0700. Raises OSError if it is not private or not writable."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ForeignFolderError(folder, "it cannot be written")
