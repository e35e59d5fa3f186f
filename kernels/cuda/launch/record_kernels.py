"""The kernels that a computation launches: launches are recorded, not run, on tensors without data.

Triton itself specializes each launch for a GPU that need not be present, so a kernel has the same name in Triton's
cache as when it is launched on such a GPU. The name follows from the kernel's source, the arguments' types and
alignment, the constants, the options, the GPU's capability, and Triton's own files.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quengine.kernels.cuda.launch.gpu import Gpu, assuming
from quengine.kernels.cuda.launch.triton_changes import (
    TRITON_LAUNCH,
    AbsentDriver,
    launches_handed_to,
    specialized_for,
)


@dataclass(frozen=True)
class Kernel:
    """One kernel for one GPU. key: its folder in Triton's cache; compile: compiles it through Triton, or
    reads it from the cache.
    """

    key: str
    name: str
    compile: Callable[[], Any]


def record_kernels(computations: Sequence[Callable[[], object]], gpu: Gpu) -> dict[str, Kernel]:
    """The kernels that these computations launch on `gpu`, by key.

    torch's own operations do run, so tensors must be on the meta device.
    """
    recorder = _Recorder()
    seen = set[object]()

    def note(kernel: Any, grid: object, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        known = (kernel, *map(specialized_on, args), *named.items())
        if known not in seen:
            seen.add(known)
            recorder.name = kernel.fn.__name__.strip("_")
            TRITON_LAUNCH(kernel, *args, grid=grid, warmup=True, **named)

    absent = AbsentDriver(gpu, gpu.arch)
    with specialized_for(absent, recorder), assuming(gpu), launches_handed_to(note):
        for compute in computations:
            compute()
    return recorder.kernels


class _Recorder:
    """Replaces Triton's AsyncCompileMode, which receives what a launch has to compile."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        self.name = ""

    def submit(self, key: str, compile_: Callable[[], Any], _finalize: Callable[[Any], None]) -> None:
        digest = sha256(key.encode()).digest()
        folder = base64.b32encode(digest).decode().rstrip("=")  # as triton.runtime.cache names it
        self.kernels.setdefault(folder, Kernel(folder, self.name, compile_))


def specialized_on(argument: object) -> object:
    """The properties of an argument that machine code may depend on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return int, argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    if isinstance(argument, tuple):
        return type(argument), *map(specialized_on, argument)
    return float if isinstance(argument, float) else argument
