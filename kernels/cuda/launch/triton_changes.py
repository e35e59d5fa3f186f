"""Everything that this package changes inside Triton, with the reasons; torch and numba are used as they are.

- `JITFunction.run`, within `launches_handed_to`: launches are recorded, and no hook of Triton sees their arguments.
- `driver._active` and `active_mode`, within `specialized_for`: Triton specializes for a GPU that need not be present.
- `DependenciesFinder._update_hash`, from the first kernel on (`use_stable_keys`): a kernel's key followed from what its
  process had launched before.
- The launcher in a copy of a kernel that uses TMA (`taking_maps`): Triton encodes its tensor maps at every launch.

Settings that Triton has for its users are no changes: `triton.knobs`, which triton_cache.py and
engine/platform/device.py set. `benchmarks/checks/gpu_commands.py` runs every command of the documents on a GPU.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import DependenciesFinder, JITFunction

TRITON_LAUNCH = JITFunction.run
"""Triton's own launch; `JITFunction.run` is another one where launches go to a handler or to the interpreter."""

Handler = Callable[[Any, object, tuple[Any, ...], dict[str, Any]], None]
"""Handles a launch: the Triton function, its grid, arguments by position, constants and options by name."""


@contextmanager
def launches_handed_to(handler: Handler) -> Iterator[None]:
    """Within this context, launches of all Triton kernels of this process go to `handler` instead of running."""

    def run(self: Any, *args: Any, grid: object, warmup: bool, **named: Any) -> None:
        del warmup
        handler(self, grid, args, named)

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


class AbsentDriver:
    """A Triton driver for a GPU that need not be present, with the methods that specializing a launch calls. device:
    what Triton caches kernels by; arch: its compute capability, 90 for 9.0."""

    def __init__(self, device: object, arch: int) -> None:
        self._device, self._arch = device, arch

    def get_current_device(self) -> object:
        return self._device

    def get_current_stream(self, _device: object) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)


@contextmanager
def specialized_for(gpu: AbsentDriver, compilations: object) -> Iterator[None]:
    """Within this context, Triton specializes launches for `gpu`, and has `compilations` compile them, an object with
    the method `submit` of Triton's AsyncCompileMode."""
    before = driver._active
    driver.set_active(gpu)
    token = active_mode.set(compilations)
    try:
        yield
    finally:
        active_mode.reset(token)
        driver._active = before


@cache
def use_stable_keys() -> None:
    """Gives a called function its key before its constants are read; call before any kernel is compiled or recorded.

    Triton's key of a function includes the constants of the functions that it calls, but only of those that have a key
    already. So the key depends on the order in which a process launches kernels, and a process may not find what
    another has compiled (Triton 3.6 and 3.7).
    """
    merge = DependenciesFinder._update_hash

    def _update_hash(finder: Any, function: Any) -> None:
        _ = function.cache_key
        merge(finder, function)

    DependenciesFinder._update_hash = _update_hash


def taking_maps(
    made: CompiledKernel, described: Sequence[Any]
) -> tuple[CompiledKernel, Callable[[int, TensorDescriptor], list[Any]]] | None:
    """A copy of a compiled kernel that takes tensor maps in place of descriptors, and what encodes descriptor number i:
    the map, its shape and its strides.

    Triton's launcher wraps the function that launches in one that encodes the maps; the copy lacks the wrapper. None if
    this version of Triton stores it in another way.
    """
    try:
        launcher: Any = made.run
        wrapper = launcher.launch
        held = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
        facts = list(held["tensordesc_meta"].cell_contents)
        encode: Any = nvidia_driver.make_tensordesc_arg
        descriptors = [a for a in described if isinstance(a, TensorDescriptor)]
        for descriptor, of_it in zip(descriptors, facts, strict=True):
            if len(encode(descriptor, of_it)) != 1 + 2 * len(descriptor.shape):
                return None
        direct, plain = copy.copy(made), copy.copy(launcher)
        plain.launch = held["launcher"].cell_contents
        direct._run = plain
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return direct, lambda number, descriptor: list(encode(descriptor, facts[number]))
