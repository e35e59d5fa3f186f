"""Launching a kernel again without asking Triton anew which machine code its arguments take.

A launch by Triton takes 14 to 30 us of the host's time: it binds and classifies each argument, looks its settings up in
the environment and compares every constant that the kernel's source names. A prompt of some hundred tokens has ten
such launches a layer, which together take longer than the GPU. Here a compiled kernel is kept by what Triton would
specialise it on, and launched directly: about 10 us.

Of a tensor that the copy engine reads (`Copied`), a kernel is given a map: 128 bytes that follow from address, shape
and block alone. Triton encodes one anew at every launch, and takes the argument list apart for it; here they are kept.
Does not know: what kernels compute.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from triton.backends.nvidia import driver
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

_LAUNCH = JITFunction.run
_MOST_MAPS = 1024


class Copied(NamedTuple):
    """A contiguous tensor [rows, columns] of which a kernel copies blocks [rows, columns] to shared memory."""

    tensor: Tensor
    block: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Constants:
    """Constants and options of a kernel, kept by who launches it: they are told from others by which object it is, so
    that none of them is looked at again."""

    named: dict[str, Any]


class Relaunched:
    """A Triton kernel, launched as any other: `kernel[grid](*arguments, **constants_and_options)`.

    Everything that is no constant must be given by position, a tensor first, every constant by name. Under the
    interpreter, or while launches are only recorded or compiled, Triton's own launch is taken. `layout`: how what is
    `Copied` lies in shared memory.
    """

    def __init__(self, kernel: Any, layout: Any = None) -> None:
        self.kernel = kernel
        self.layout = layout
        self._compiled: dict[object, tuple[CompiledKernel, tuple[Any, ...], Maps | None]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **named: self._launch(grid, arguments, named, tuple(named.items()))

    def launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Constants) -> None:
        """As `kernel[grid](*arguments, **constants.named)`."""
        self._launch(grid, arguments, constants.named, constants)

    def _launch(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any], told_by: object
    ) -> None:
        if JITFunction.run is not _LAUNCH:
            self.kernel[grid](*self._described(arguments), **named)
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
        key = (arguments[0].get_device(), tuple(kinds), told_by)
        found = self._compiled.get(key)
        if found is not None:
            compiled, constants, maps = found
            passed = arguments if maps is None else maps.expand(arguments)
            compiled[(*grid, 1, 1)](*passed, *constants)
            return
        described = self._described(arguments)
        made = self.kernel[grid](*described, **named)
        if isinstance(made, CompiledKernel):
            # A compiled kernel takes its constants too, and passes over them.
            behind = self.kernel.arg_names[len(arguments) :]
            constants = tuple(named[name] for name in behind)
            maps = None
            if self.layout is not None:
                made, maps = _with_maps(made, described, self.layout)
            self._compiled[key] = made, constants, maps

    def _described(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as Triton takes them."""
        if self.layout is None:
            return arguments
        return tuple(_descriptor(a, self.layout) if isinstance(a, Copied) else a for a in arguments)


class Maps:
    """Arguments with what is `Copied` replaced: by descriptors, which Triton turns into maps at every launch, or, where
    `encode` is given, by what it makes of number i of them: the map, its shape and its strides."""

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


def _with_maps(made: CompiledKernel, described: tuple[Any, ...], layout: Any) -> tuple[CompiledKernel, Maps]:
    """A compiled kernel that takes maps themselves, and how to give it them.

    Triton's launcher wraps the function that launches in one that makes the maps; it is taken out. Where this version
    of Triton keeps it in some other way, the kernel stays as it is and takes descriptors.
    """
    try:
        launcher: Any = made.run
        wrapper = launcher.launch
        held = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
        facts = list(held["tensordesc_meta"].cell_contents)
        encode: Any = driver.make_tensordesc_arg
        descriptors = [a for a in described if isinstance(a, TensorDescriptor)]
        for descriptor, of_it in zip(descriptors, facts, strict=True):
            if len(encode(descriptor, of_it)) != 1 + 2 * len(descriptor.shape):
                return made, Maps(layout, None)
        direct, plain = copy.copy(made), copy.copy(launcher)
        plain.launch = held["launcher"].cell_contents
        direct._run = plain
    except (AttributeError, KeyError, TypeError, ValueError):
        return made, Maps(layout, None)
    return direct, Maps(layout, lambda number, descriptor: list(encode(descriptor, facts[number])))


def _descriptor(copied: Copied, layout: Any) -> TensorDescriptor:
    tensor = copied.tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(copied.block), layout)


def _kind(argument: object) -> object:
    """What Triton looks at in an argument that is neither a constant nor a tensor nor a whole number."""
    if isinstance(argument, float):
        return float
    if isinstance(argument, Copied):
        return argument.tensor.dtype, argument.block
    raise TypeError(f"a kernel is launched with tensors and numbers, not with {type(argument).__name__}")
