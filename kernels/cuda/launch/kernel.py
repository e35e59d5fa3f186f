"""Launches of Triton kernels without Triton's launcher.

A launch through Triton takes 14 to 30 us on the host: it binds and classifies each argument, reads settings from the
environment and compares every global constant that the kernel's source names. CUDA graph replays, that is, decode
steps and prompts of up to 1024 tokens, pay none of it. Eager steps do, some ten launches a layer: on longer prompts
the GPU time hides it for a large model, but not for a small one or on a slow host. So `DirectLaunch` caches a compiled
kernel by what Triton would specialize it on, and launches it directly, in about 10 us.

A kernel reads a tensor by TMA (`Copied`) through a tensor map, 128 bytes that depend on address, shape and block
alone. Triton encodes one at every launch; here they are cached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from quengine.kernels.cuda.launch.triton_changes import TRITON_LAUNCH, taking_maps

_MOST_MAPS = 1024


class Copied(NamedTuple):
    """A contiguous tensor [rows, columns] from which a kernel copies blocks [rows, columns] to shared memory by TMA."""

    tensor: Tensor
    block: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Constants:
    """Constants and options of a kernel that its caller keeps: compared by identity, so that they are not
    examined at every launch.
    """

    named: dict[str, Any]


class DirectLaunch:
    """A Triton kernel, launched like any other: `kernel[grid](*arguments, **constants_and_options)`.

    Non-constants must be passed by position, a tensor first, constants by name. Arguments are tensors, numbers,
    (named) tuples of tensors, and None for an absent tensor. Under the interpreter, and while launches go to a
    handler, Triton's own launch is used. `layout`: the shared-memory layout of `Copied` tensors.
    """

    def __init__(self, kernel: Any, layout: Any = None) -> None:
        self.kernel = kernel
        self.layout = layout
        self._compiled: dict[object, tuple[CompiledKernel, tuple[Any, ...], TensorMaps | None]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **named: self._launch(grid, arguments, named, tuple(named.items()))

    def launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Constants) -> None:
        """As `kernel[grid](*arguments, **constants.named)`."""
        self._launch(grid, arguments, constants.named, constants)

    def _launch(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any], constants_key: object
    ) -> None:
        if JITFunction.run is not TRITON_LAUNCH:
            self.kernel[grid](*self._described(arguments), **named)
            return
        # Inlined: a function call per argument would take as long as all the rest.
        kinds = [
            (argument.dtype, argument.data_ptr() & 15 == 0)
            if isinstance(argument, Tensor)
            else (argument == 1, argument & 15 == 0, -(2**31) <= argument < 2**31)
            if type(argument) is int
            else _kind(argument)
            for argument in arguments
        ]
        key = (arguments[0].get_device(), tuple(kinds), constants_key)
        found = self._compiled.get(key)
        if found is not None:
            compiled, constants, maps = found
            passed = arguments if maps is None else maps.expand(arguments)
            compiled[(*grid, 1, 1)](*passed, *constants)
            return
        described = self._described(arguments)
        made = self.kernel[grid](*described, **named)
        if isinstance(made, CompiledKernel):
            # A compiled kernel takes its constants too, and ignores them.
            constants = tuple(named[name] for name in self.kernel.arg_names[len(arguments) :])
            maps = None
            if self.layout is not None:
                direct = taking_maps(made, described)
                made, encode = direct or (made, None)
                maps = TensorMaps(self.layout, encode)
            self._compiled[key] = made, constants, maps

    def _described(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments in Triton's form."""
        if self.layout is None:
            return arguments
        return tuple(_descriptor(a, self.layout) if isinstance(a, Copied) else a for a in arguments)


class TensorMaps:
    """Replaces `Copied` arguments. Without `encode`, by descriptors, which Triton turns into tensor maps at every
    launch; with it, by its cached results for descriptor number i: the map, its shape and its strides.
    """

    def __init__(self, layout: Any, encode: Callable[[int, TensorDescriptor], list[Any]] | None) -> None:
        self.layout = layout
        self.encode = encode
        self._kept: dict[tuple[int, ...], list[Any]] = {}

    def expand(self, arguments: tuple[Any, ...]) -> list[Any]:
        passed: list[Any] = []
        number = 0
        for argument in arguments:
            if type(argument) is Copied:
                passed += self._map(number, argument)
                number += 1
            else:
                passed.append(argument)
        return passed

    def _map(self, number: int, copied: Copied) -> list[Any]:
        if self.encode is None:
            return [_descriptor(copied, self.layout)]
        key = (number, copied.tensor.data_ptr(), *copied.tensor.shape, *copied.block)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= _MOST_MAPS:
                self._kept.clear()
            kept = self._kept[key] = self.encode(number, _descriptor(copied, self.layout))
        return kept


def _descriptor(copied: Copied, layout: Any) -> TensorDescriptor:
    tensor = copied.tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(copied.block), layout)


def _kind(argument: object) -> object:
    """What Triton specializes on in an argument that is neither a constant nor a tensor nor an integer."""
    if argument is None:
        return None
    if isinstance(argument, float):
        return float
    if isinstance(argument, Copied):
        return argument.tensor.dtype, argument.block
    if isinstance(argument, tuple):
        return type(argument), *[(tensor.dtype, tensor.data_ptr() & 15 == 0) for tensor in argument]
    raise TypeError(f"a kernel is launched with tensors and numbers, not with {type(argument).__name__}")
