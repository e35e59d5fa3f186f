"""Where compiled kernels are kept between processes: a file for each, in a folder for this processor.

A file is a digest and what it holds. The digest is of the content, its name, the sources that kernels are made from,
and the versions of Python, numba and llvmlite. So a file that is damaged, cut short, or left by another version does
not match: it counts as none, and is written anew. Files are written beside and renamed, so any number of processes may
share a folder.

The folder is in `__pycache__` beside this package, or in ~/.cache/quengine (XDG_CACHE_HOME) where that cannot be
written; NUMBA_CACHE_DIR takes the place of both. Its name follows from the processor and from numba's own settings.

Does not know: what is kept, or how it is made.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path

_log = logging.getLogger(__name__)
_DIGEST_BYTES = 32
# Of kernels/, what code generators read besides the modules of this package.
_OTHER_SOURCES = tuple(
    f"{name}.py" for name in ("activations", "backend", "block_formats", "cache_types", "rope", "sampling")
)
_NO_MATTER = ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER")


@dataclass(frozen=True)
class CodeStore:
    """Contents by name in folders, of which the first that can be written gets new ones.

    version: what the contents follow from besides their names.
    """

    folders: Sequence[Path]
    version: str

    def read(self, name: str) -> bytes | None:
        """What was kept under this name, by this version, or None."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                data = (folder / name).read_bytes()
                content = data[_DIGEST_BYTES:]
                if data[:_DIGEST_BYTES] == self._digest(name, content):
                    return content
        return None

    def write(self, name: str, content: bytes) -> None:
        """Keep content under this name; where no folder can be written, say so once."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                _replace(folder / name, self._digest(name, content) + content)
                return
        _say_once(", ".join(str(folder.parent) for folder in self.folders))

    def _digest(self, name: str, content: bytes) -> bytes:
        return sha256(f"{self.version}\0{name}\0".encode() + content).digest()


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
def code_store() -> CodeStore:
    """The store of this process."""
    folder = _machine()
    return CodeStore([place / folder for place in _places()], _version())


def _places() -> list[Path]:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return [Path(chosen)]
    own = os.environ.get("XDG_CACHE_HOME")
    return [
        Path(__file__).parent / "__pycache__",
        (Path(own) if own else Path("~/.cache").expanduser()) / "quengine",
    ]


def _machine() -> str:
    """A folder's name for the processor, and what numba is told about it or about optimization."""
    from llvmlite import binding

    features = ""
    with contextlib.suppress(RuntimeError):  # LLVM cannot tell
        features = binding.get_host_cpu_features().flatten()
    cpu = binding.get_host_cpu_name()
    settings = sorted(
        item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] not in _NO_MATTER
    )
    config = Path(".numba_config.yaml")  # numba reads it where it is started
    facts = (cpu, features, settings, config.read_bytes() if config.is_file() else b"")
    return f"kernels-{cpu}-{sha256(repr(facts).encode()).hexdigest()[:16]}"


def _version() -> str:
    versions = [sys.version, *(metadata.version(name) for name in ("numba", "llvmlite"))]
    return "\0".join([*versions, source_stamp()])


@cache
def source_stamp() -> str:
    """Names this version of the modules that kernels are made from."""
    folder = Path(__file__).parent
    digest = sha256()
    for path in (*(folder.parent / name for name in _OTHER_SOURCES), *sorted(folder.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
