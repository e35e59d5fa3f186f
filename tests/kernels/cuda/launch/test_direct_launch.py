"""Kernels launched again without Triton's binding: by the same machine code, and by no other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia import driver
from triton.compiler import CompiledKernel
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from quengine.kernels.cuda.launch.kernel import Copied, DirectLaunch


class Made(CompiledKernel):
    """Machine code that notes how it is launched."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launches.append((grid, *arguments))


class Kernel:
    """Stands for what triton.jit makes of a function; makes machine code at every launch it is asked for."""

    arg_names = ("x_ptr", "count", "scale", "FIRST", "LAST")

    def __init__(self) -> None:
        self.made: list[Made] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Made]:
        def launch(*_arguments: object, **_named: object) -> Made:
            self.made.append(Made())
            return self.made[-1]

        return launch


def test_a_launch_of_the_same_kind_runs_what_was_compiled() -> None:
    kernel = Kernel()
    again = DirectLaunch(kernel)
    x, y = torch.zeros(8), torch.zeros(4)
    again[(3,)](x, 32, 1.0, LAST=5, FIRST=4, num_warps=2)
    again[(7, 2)](y, 48, 2.5, LAST=5, FIRST=4, num_warps=2)
    (made,) = kernel.made
    ((grid, *arguments),) = made.launches
    assert grid[:3] == (7, 2, 1) and arguments[0] is y and arguments[1:] == [48, 2.5, 4, 5]


def test_an_absent_tensor_is_passed_as_it_is() -> None:
    kernel = Kernel()
    again = DirectLaunch(kernel)
    for absent in (None, torch.zeros(8), None):
        again[(3,)](torch.zeros(8), 32, absent, FIRST=4, LAST=5)
    without, with_it = kernel.made
    ((_, *arguments),) = without.launches
    assert arguments[1:] == [32, None, 4, 5] and not with_it.launches


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((torch.zeros(8)[1:], 32, 1.0), {"FIRST": 4}),  # an address that is no multiple of 16
        ((torch.zeros(8, dtype=torch.float16), 32, 1.0), {"FIRST": 4}),
        ((torch.zeros(8), 33, 1.0), {"FIRST": 4}),  # a number that is none
        ((torch.zeros(8), 1, 1.0), {"FIRST": 4}),  # a number that is taken for a constant
        ((torch.zeros(8), 2**40, 1.0), {"FIRST": 4}),  # a number of 64 bits
        ((torch.zeros(8), 32, None), {"FIRST": 4}),  # nothing
        ((torch.zeros(8), 32, 1.0), {"FIRST": 5}),
        ((torch.zeros(8), 32, 1.0), {"FIRST": 4, "num_warps": 8}),
    ],
)
def test_a_launch_of_another_kind_is_compiled(arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    kernel = Kernel()
    again = DirectLaunch(kernel)
    again[(1,)](torch.zeros(8), 32, 1.0, FIRST=4, LAST=0)
    again[(1,)](*arguments, **named, LAST=0)
    assert len(kernel.made) == 2


def test_while_launches_are_only_recorded_triton_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    again = DirectLaunch(kernel)
    again[(1,)](torch.zeros(8), 32, 1.0, FIRST=4, LAST=0)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    again[(1,)](torch.zeros(8), 32, 1.0, FIRST=4, LAST=0)
    assert len(kernel.made) == 2 and not kernel.made[0].launches


def test_a_kernel_takes_tensors_and_numbers() -> None:
    with pytest.raises(TypeError, match="not with str"):
        DirectLaunch(Kernel())[(1,)]("x", FIRST=1, LAST=2)


LAYOUT = NVMMASharedLayout(128, 16, 2)
SIGNATURE = {
    "x_ptr": "*fp32",
    "rows": f"tensordesc<fp16[8, 64],{LAYOUT!r}>",
    "count": "i32",
    "FIRST": "constexpr",
}
TUPLE = not triton.__version__.startswith("3.6.")
"""Whether Triton hands a kernel's arguments on as one tuple, behind what every launch has, or one by one."""


class Launcher:
    """Stands for Triton's, around whose launch it has put what makes maps of descriptors."""

    def __init__(self, wrapped: bool) -> None:
        self.launches: list[list[object]] = []
        self.launch: Callable[..., None] = self.plain
        if wrapped:
            self.launch = driver.wrap_handle_tensordesc(self.plain, SIGNATURE, [{"facts": 1}])

    def plain(self, *arguments: Any) -> None:
        self.launches.append(list(arguments[-1] if TUPLE else arguments[13:]))


class WithMaps(CompiledKernel):
    def __init__(self, wrapped: bool) -> None:
        self._run = Launcher(wrapped)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self._run.launch(*[None] * 13, *([arguments] if TUPLE else arguments))


class KernelOfRows(Kernel):
    arg_names = ("x_ptr", "rows", "count", "FIRST")

    def __init__(self, wrapped: bool) -> None:
        self.compiled, self.given = WithMaps(wrapped), list[tuple[Any, ...]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *arguments, **_named: self.given.append(arguments) or self.compiled


def launch_three(kernel: KernelOfRows) -> tuple[list[torch.Tensor], list[list[object]]]:
    """Two tensors, the second twice, after a first launch by Triton; the arguments of what then launches."""
    again, x = DirectLaunch(kernel, LAYOUT), torch.zeros(8)
    rows = [torch.zeros(32, 128, dtype=torch.float16), torch.zeros(16, 128, dtype=torch.float16)]
    for tensor in (rows[0], rows[0], rows[1], rows[1]):
        again[(1,)](x, Copied(tensor, (8, 64)), 32, FIRST=4)
    ((_, first, _),) = kernel.given
    assert isinstance(first, TensorDescriptor) and first.base is rows[0] and first.block_shape == [8, 64]
    launches = kernel.compiled._run.launches
    assert all(launch[0] is x and launch[-2:] == [32, 4] for launch in launches)
    return rows, launches


def test_maps_for_the_copy_engine_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def encode(descriptor: TensorDescriptor, facts: object) -> list[object]:
        assert facts == {"facts": 1}
        made.append(descriptor.base)
        return [f"map {descriptor.base.data_ptr()}", *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    rows, launches = launch_three(KernelOfRows(wrapped=True))
    for tensor, launch in zip((rows[0], rows[1], rows[1]), launches, strict=True):
        assert launch[1:-2] == [f"map {tensor.data_ptr()}", *tensor.shape, 128, 1]
    assert [tensor is rows[0] for tensor in made[-2:]] == [True, False] and len(made) == 3


def test_each_of_several_maps_is_made_by_its_own_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(descriptor: TensorDescriptor, facts: object) -> list[object]:
        return [f"map {facts}", *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    signature = {"x_ptr": "*fp32", "a": SIGNATURE["rows"], "b": SIGNATURE["rows"], "FIRST": "constexpr"}
    kernel = KernelOfRows(wrapped=True)
    kernel.arg_names = ("x_ptr", "a", "b", "FIRST")
    launcher = kernel.compiled._run
    launcher.launch = driver.wrap_handle_tensordesc(launcher.plain, signature, ["of a", "of b"])
    again, x = DirectLaunch(kernel, LAYOUT), torch.zeros(8)
    a, b = (torch.zeros(rows, 64, dtype=torch.float16) for rows in (32, 16))
    for first, second in ((a, b), (a, b), (a, a)):
        again[(1,)](x, Copied(first, (8, 64)), Copied(second, (8, 64)), FIRST=4)
    for launch, rows in zip(launcher.launches, (16, 32), strict=True):
        assert launch[1:-1] == ["map of a", 32, 64, 64, 1, "map of b", rows, 64, 64, 1]


def test_where_triton_makes_them_otherwise_it_is_given_descriptors() -> None:
    rows, launches = launch_three(KernelOfRows(wrapped=False))
    for tensor, (_, descriptor, _, _) in zip((rows[0], rows[1], rows[1]), launches, strict=True):
        assert isinstance(descriptor, TensorDescriptor) and descriptor.base is tensor


def test_another_block_is_another_kernel() -> None:
    kernel = KernelOfRows(wrapped=False)
    again, rows = DirectLaunch(kernel, LAYOUT), torch.zeros(32, 128, dtype=torch.float16)
    for block in ((8, 64), (16, 64), (8, 64)):
        again[(1,)](torch.zeros(8), Copied(rows, block), 32, FIRST=4)
    assert len(kernel.given) == 2
