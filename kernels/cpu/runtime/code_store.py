"""The store of compiled kernels between processes: one file per kernel, in a folder for this processor.

A file is a digest and its content. The digest is an HMAC with a secret of the user, over the content, its name, the
sources that kernels are generated from, and the versions of Python, numba and llvmlite. A file that is damaged,
truncated, written by another user or by another version does not match; it is ignored and replaced. Files are written
under a temporary name and renamed, so any number of processes may share a folder.

The folder is in ~/.cache/quengine (XDG_CACHE_HOME), or in NUMBA_CACHE_DIR; never beside this package, where it would
remain as an empty package after an uninstallation. Its name is a hash of the user, the processor, numba's settings and
this package's path, so that installations in several places do not replace each other's files. The folder is private to
the user (private_folder.py) and holds the secret; a folder owned by another user is not used.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from quengine.kernels.private_folder import ForeignFolderError, check_owner, folder_key, user_cache

_log = logging.getLogger(__name__)
_DIGEST_BYTES = 32
# Modules of kernels/ outside this package that code generators read.
_OTHER_SOURCES = tuple(
    f"{name}.py"
    for name in (
        "activations",
        "altup",
        "block_formats",
        "codebooks",
        "glu",
        "kv/cache_types",
        "moe/router",
        "moe/router_kind",
        "quantize/books",
        "quantize/entries",
        "quantize/grid",
        "quantize/importance",
        "quantize/minimums",
        "quantize/scales",
        "rope",
        "sampling",
    )
)
_NO_MATTER = ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER")


@dataclass(frozen=True)
class CodeStore:
    """Contents by name in folders; new ones go to the first folder that is writable.

    version: what contents depend on besides their names.
    """

    folders: Sequence[Path]
    version: str
    _keys: dict[Path, bytes] = field(default_factory=dict, repr=False, compare=False)

    def read(self, name: str) -> bytes | None:
        """The content stored under this name by this version, or None."""
        for folder in self.folders:
            key = self._key(folder)
            if key is None:
                continue
            with contextlib.suppress(OSError):
                data = (folder / name).read_bytes()
                content = data[_DIGEST_BYTES:]
                if hmac.compare_digest(data[:_DIGEST_BYTES], self._digest(key, name, content)):
                    return content
        return None

    def has_file(self, name: str) -> bool:
        """Whether a file is stored under this name, by whichever version."""
        return any((folder / name).is_file() for folder in self.folders)

    def has_folder(self) -> bool:
        """Whether one of the folders exists, that is, whether a kernel has been compiled and stored."""
        return any(folder.is_dir() for folder in self.folders)

    def write(self, name: str, content: bytes) -> None:
        """Stores content under this name; warns once if no folder is writable."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                if (key := self._made_key(folder)) is None:
                    continue
                _replace(folder / name, self._digest(key, name, content) + content)
                return
        _say_once(
            ", ".join(str(folder.parent) for folder in self.folders)
            or "the cache of a user without a home folder"
        )

    def keeps(self) -> bool:
        """Whether a folder for new contents exists or can be made; makes it."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                if self._made_key(folder) is not None:
                    return True
        return False

    def _made_key(self, folder: Path) -> bytes | None:
        """The secret of a folder; makes both where missing. Raises OSError if the folder cannot be made."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._key(folder, make=True)

    def _key(self, folder: Path, make: bool = False) -> bytes | None:
        """This user's secret in a folder; None if the folder may not be used or has no secret."""
        key = self._keys.get(folder)
        if key is None:
            try:
                key = folder_key(folder, make)
            except ForeignFolderError as error:
                _say_foreign(folder, error.strerror)
            except OSError:
                return None
            if key is not None:
                self._keys[folder] = key
        return key

    def _digest(self, key: bytes, name: str, content: bytes) -> bytes:
        return hmac.digest(key, f"{self.version}\0{name}\0".encode() + content, "sha256")


def _replace(path: Path, data: bytes) -> None:
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


@cache
def _say_once(folders: str) -> None:
    _log.warning(
        "compiled kernels cannot be kept, so every start compiles them: no file can be written in %s; "
        "set NUMBA_CACHE_DIR to a folder",
        folders,
    )


@cache
def _say_foreign(folder: Path, problem: str) -> None:
    _log.warning("compiled kernels in %s are not used: %s", folder, problem)


@cache
def code_store() -> CodeStore:
    """The code store of this process."""
    return CodeStore(_folders(_machine()), _version())


def _folders(name: str) -> list[Path]:
    """Folders of this name: in NUMBA_CACHE_DIR if set; in the user's cache if not, or if the first is foreign."""
    own = user_cache()
    caches = [] if own is None else [own / name]
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if not chosen:
        return caches
    folder = Path(chosen) / name
    try:
        check_owner(folder)
    except ForeignFolderError:
        return [folder, *caches]
    except OSError:  # does not exist yet
        pass
    return [folder]


def _machine() -> str:
    """A folder name for the user, the processor, numba's target and optimization settings, and the package's path."""
    from llvmlite import binding

    features = ""
    with contextlib.suppress(RuntimeError):  # the host has no feature query in LLVM
        features = binding.get_host_cpu_features().flatten()
    cpu = binding.get_host_cpu_name()
    settings = sorted(
        item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] not in _NO_MATTER
    )
    config = Path(".numba_config.yaml")  # numba reads it from the working directory
    package = str(Path(__file__).parents[2])
    facts = (os.geteuid(), cpu, features, settings, config.read_bytes() if config.is_file() else b"", package)
    return f"kernels-{cpu}-{sha256(repr(facts).encode()).hexdigest()[:16]}"


def _version() -> str:
    versions = [sys.version, *(metadata.version(name) for name in ("numba", "llvmlite"))]
    return "\0".join([*versions, source_stamp()])


@cache
def source_stamp() -> str:
    """A digest of the modules that kernels are generated from."""
    folder = Path(__file__).parents[1]
    digest = sha256()
    for path in (*(folder.parent / name for name in _OTHER_SOURCES), *sorted(folder.rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
