"""Launching a kernel again without asking Triton anew which machine code its arguments take.

A launch by Triton takes 14 to 30 us of the host's time: it binds and classifies each argument, looks its settings up in
the environment and compares every constant that the kernel's source names. A prompt of some hundred tokens has ten
such launches a layer, which together take longer than the GPU. Here a compiled kernel is kept by what Triton would
specialise it on, and launched directly: about 10 us.
Does not know: what kernels compute.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_LAUNCH = JITFunction.run


class Relaunched:
    """A Triton kernel, launched as any other: `kernel[grid](*arguments, **constants_and_options)`.

    Everything that is no constant must be given by position, a tensor first, every constant by name. Under the
    interpreter, or while launches are only recorded or compiled, Triton's own launch is taken.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[object, tuple[CompiledKernel, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            if JITFunction.run is not _LAUNCH:
                self.kernel[grid](*arguments, **named)
                return
            # Written out: a call for each argument would take as long as all the rest.
            kinds = [
                (argument.dtype, argument.data_ptr() & 15 == 0)
                if isinstance(argument, Tensor)
                else (argument == 1, argument & 15 == 0, -(2**31) <= argument < 2**31)
                if type(argument) is int
                else _kind(argument)
                for argument in arguments
            ]
            key = (arguments[0].get_device(), tuple(kinds), tuple(named.items()))
            found = self._compiled.get(key)
            if found is not None:
                compiled, constants = found
                compiled[(*grid, 1, 1)](*arguments, *constants)
                return
            made = self.kernel[grid](*arguments, **named)
            if isinstance(made, CompiledKernel):
                # A compiled kernel takes its constants too, and passes over them.
                behind = self.kernel.arg_names[len(arguments) :]
                self._compiled[key] = made, tuple(named[name] for name in behind)

        return launch


def _kind(argument: object) -> object:
    """What Triton looks at in an argument that is neither a constant nor a tensor nor a whole number."""
    if isinstance(argument, float):
        return float
    raise TypeError(f"a kernel is launched with tensors and numbers, not with {type(argument).__name__}")
