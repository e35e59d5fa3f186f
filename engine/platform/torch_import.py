"""A quick `import torch`: from bytecode, and without the modules for tracing, exporting and training.

These modules take a third of the time of the import. In the processes of the `engine` program they are put off until an
attribute of one of them is used, and registrations that they make as they are imported (`torch._meta_registrations`:
shapes of operations, for the compiler of torch) are not made before that. `torch.compiler` is none of them: capturing a
CUDA graph asks for it. In other programs torch is left as it is.
"""

import importlib.util
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from quengine.kernels.cuda.launch.source_lines import use_quick_source_lines
from quengine.kernels.private_folder import check_private, user_cache

DEFERRED = frozenset(
    {
        "torch._meta_registrations",
        "torch.distributions",
        "torch.export",
        "torch.masked",
        "torch.nested",
        "torch.optim",
        "torch.utils.data",
    }
)

VERSIONS = ("2.11.", "2.13.")
"""Releases of torch that were tried; another may import these modules for what it needs of them."""


def prepare() -> None:
    """For the imports of torch, and of kernels, in a process of the program that computes."""
    keep_bytecode()
    defer_modules()
    use_quick_source_lines()


def keep_bytecode() -> None:
    """Keep bytecode in the user's cache from now on, where torch was installed without (as some images have it).

    Compiling a thousand modules takes two seconds of each start otherwise, also where Python is told to write none
    beside them. The folder is used if it is this user's alone.
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


def defer_modules() -> None:
    """Put off `DEFERRED` when torch is imported; nothing where it has been, or is of another version."""
    if "torch" in sys.modules or not _version().startswith(VERSIONS):
        return
    sys.meta_path.insert(0, _Finder())


def _version() -> str:
    """Of the torch that would be imported, from its version.py; empty where that cannot be found."""
    spec = importlib.util.find_spec("torch")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        file = Path(folder) / "version.py"
        if file.is_file():
            _, found, value = file.read_text().partition("__version__ = ")
            return value.split("\n", 1)[0].strip("'\"") if found else ""
    return ""


class _Finder(MetaPathFinder):
    """Finds the modules of `DEFERRED` as all others are found, with a loader that waits."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in DEFERRED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferredLoader(spec.loader)
        return spec


class _DeferredLoader(Loader):
    """Makes a module that is executed by the loader `inner` when one of those put off is used."""

    def __init__(self, inner: Loader) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Deferred(spec.name)
        _modules.append(module)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Later: `_Deferred` does it."""
        if module.__name__ == "torch._meta_registrations":
            _allow_generators()


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # Python itself looks for these
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with _executing:
            while _modules:  # all, in the order of their import: what uses one may count on what others do
                _execute(_modules.pop(0))
        return getattr(self, name)


def _execute(module: ModuleType) -> None:
    spec = module.__spec__
    assert spec is not None and isinstance(spec.loader, _DeferredLoader)
    module.__class__ = ModuleType
    spec.loader = module.__loader__ = spec.loader.inner
    spec.loader.exec_module(module)


def _allow_generators() -> None:
    """Give `torch.Generator` its metaclass, without which torch 2.13 refuses to make one.

    `torch._prims.rng_prims` does it, which `torch._meta_registrations` imports. torch 2.11 has no metaclass to set.
    """
    set_metaclass = getattr(sys.modules["torch._C"], "_set_generator_metaclass", None)
    if set_metaclass is not None:
        from torch._opaque_base import OpaqueBaseMeta  # type: ignore[import-not-found, unused-ignore]

        set_metaclass(OpaqueBaseMeta)


_executing = threading.RLock()
_modules: list[ModuleType] = []
"""Those that wait, in the order of their import."""
