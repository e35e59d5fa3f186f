"""Compilation of the CPU kernels: on first use, kept on disk, one C function per kernel variant.

A kernel is a function `kernel(context, task)`: `context` is the address of its int64 parameters, `task` says which
part of the work to do. As all kernels have this one signature, the thread team (threads.py) is compiled once, and a
step can be a list of kernels. numba keeps compiled code in `__pycache__` beside this package, or in the user's cache
folder when that is read-only (NUMBA_CACHE_DIR overrides both).

Does not know: what the kernels compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import cfunc, njit, types
from numba.core.registry import cpu_target

from quengine.kernels.cpu.tiles import Tile, tile_for

KERNEL = types.void(types.int64, types.int64)
_log = logging.getLogger(__name__)
_KEPT: list[Any] = []  # numba frees the machine code of a function that nobody holds


@cache
def source_stamp() -> str:
    """Names this version of the code generators.

    numba's cache notices changes of the file that a kernel is written in, not of the generators it calls: kernels
    carry this stamp in their variant string, which is part of the cache's key.
    """
    folder = Path(__file__).parent
    digest = sha256((folder.parent / "block_formats.py").read_bytes())
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def host_tile() -> Tile:
    """The tile of the processor that kernels are compiled for."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return tile_for(triple, features)


def compile_kernel(function: Callable[[int, int], None]) -> int:
    """Compile a kernel, or load it from disk: the address of its machine code, valid until the process ends."""
    compiled = _cached(cfunc, KERNEL)(function)
    if not compiled.cache_hits:
        _say_once()
    _KEPT.append(compiled)
    return int(compiled.address)


@cache
def _say_once() -> None:
    """The first kernel of many had to be compiled: tell whoever waits."""
    _log.warning("compiling kernels for this processor; this takes some seconds, the first time only")


def compiled_function(function: Callable[..., Any]) -> Any:
    """A module-level function compiled on its first call, kept on disk, that frees the interpreter while it runs."""
    return _cached(njit, nogil=True)(function)


def _cached(decorator: Any, *args: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return decorator(*args, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache function" not in str(error):
                raise
            return decorator(*args, **options)(function)  # no folder can be written: compiled in each process

    return decorate
