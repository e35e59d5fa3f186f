"""The C code that launches a kernel, which Triton 3.6 compiles for each signature; later versions have one for all.

It depends only on the types of a kernel's arguments and its tensor maps. It is linked with the driver's library, so it
is built on a machine with a GPU.
"""

import fcntl
import json
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import triton
from triton.backends.nvidia import driver
from triton.runtime.build import compile_module_from_src

_NAME = "__triton_launcher"


@dataclass(frozen=True)
class LauncherSpec:
    """types: the arguments' types in Triton's notation, nested for tuples; maps: Triton's metadata of their
    tensor maps, as JSON.
    """

    types: tuple[Any, ...]
    maps: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", _plain(self.types))


def launcher_of(kernel: Any) -> LauncherSpec | None:
    """The launcher of a compiled kernel; None if Triton needs none."""
    if not hasattr(driver, "make_launcher"):
        return None
    maps = json.dumps(getattr(kernel.metadata, "tensordesc_meta", None))
    return LauncherSpec(tuple(kernel.src.signature.values()), maps)


def build_launcher(spec: LauncherSpec) -> bool:
    """Compiles a launcher through Triton, unless it is cached. Returns whether it exists; it cannot be built
    without a GPU's driver or a C compiler.
    """
    source = driver.make_launcher({}, dict(enumerate(spec.types)), json.loads(spec.maps))
    lock = Path(triton.knobs.cache.dir) / f"quengine-{sha256(source.encode()).hexdigest()[:32]}.lock"
    # ldconfig missing, no driver (an assertion of Triton's), no compiler, or one that fails
    with (
        suppress(OSError, AssertionError, RuntimeError, subprocess.CalledProcessError),
        lock.open("w") as file,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)  # several kernels may share a launcher
        try:
            compile_module_from_src(
                source, _NAME, library_dirs=driver.library_dirs(), include_dirs=driver.include_dirs,
                libraries=driver.libraries,
            )  # fmt: skip
            return True
        finally:
            lock.unlink(missing_ok=True)
    return False


def build_launchers(specs: Sequence[LauncherSpec], threads: int) -> int:
    """Builds all launchers, and Triton's driver module. Returns the number of launchers that exist."""
    if not specs or not build_launcher(specs[0]):
        return 0
    build_utilities()
    with ThreadPoolExecutor(threads) as pool:
        return 1 + sum(pool.map(build_launcher, specs[1:]))


def build_utilities() -> None:
    """Compiles Triton's own C module, unless it is cached."""
    driver.CudaUtils()


def _plain(types: Iterable[Any]) -> tuple[Any, ...]:
    """The types as plain tuples of strings: from named tuples, or from lists where JSON or MessagePack held them."""
    return tuple(_plain(each) if isinstance(each, tuple | list) else str(each) for each in types)
