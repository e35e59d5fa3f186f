"""A quick `import torch` in the processes of the `engine` program: from bytecode, also where none was installed."""

import importlib.util
import sys
from contextlib import suppress
from pathlib import Path

from quengine.kernels.private_folder import check_private, user_cache

PRELUDE = "from quengine.platform import torch_import; torch_import.keep_bytecode()"
"""The first statements of a process that compiles kernels."""


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
