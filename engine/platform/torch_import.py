"""A quick `import torch` in the processes of the `engine` program: from bytecode, also where none was installed, and
without looking for backends that other packages have."""

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path

from quengine.kernels.private_folder import check_private, user_cache

PRELUDE = "from quengine.platform import torch_import; torch_import.begin()"
"""The first statements of a process that compiles kernels."""


def begin() -> None:
    """Prepare the import, which follows soon."""
    keep_bytecode()
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def keep_bytecode() -> None:
    """Keep bytecode in the user's cache from now on, where torch was installed without (as some images have it).

    Otherwise each start takes two seconds to compile a thousand modules, also where Python is set to write no bytecode
    beside them. The folder is used if it belongs to this user alone.
    """
    spec = importlib.util.find_spec("torch")
    cache = user_cache()
    if spec is None or spec.origin is None or cache is None or sys.pycache_prefix is not None:
        return
    if Path(importlib.util.cache_from_source(spec.origin)).exists():
        return
    folder = cache / "bytecode"
    with suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        check_private(folder)
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
