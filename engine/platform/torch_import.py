"""`import torch` without the modules that running a model does not need: those for tracing, exporting and training.

They take two fifths of the time of the import. In the processes of the `engine` program each is put off until one of
its attributes is used, and registrations that it makes as it is imported (`torch._meta_registrations`: shapes of
operations for the compiler of torch) are not made. In other programs torch is left as it is.
"""

import importlib.util
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

DEFERRED = frozenset(
    {
        "torch._meta_registrations",
        "torch.compiler",
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
    """Makes a module that is executed by the loader `inner` when its first attribute is asked for."""

    def __init__(self, inner: Loader) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Later: `_Deferred` does it."""


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # Python itself looks for these
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with _executing:
            if type(self) is _Deferred:
                self.__class__ = ModuleType
                spec = self.__spec__
                assert spec is not None and isinstance(spec.loader, _DeferredLoader)
                spec.loader = self.__loader__ = spec.loader.inner
                spec.loader.exec_module(self)
        return getattr(self, name)


_executing = threading.RLock()
