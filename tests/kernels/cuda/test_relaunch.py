"""Kernels launched again without Triton's binding: by the same machine code, and by no other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from quengine.kernels.cuda.relaunch import Relaunched


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
    again = Relaunched(kernel)
    x, y = torch.zeros(8), torch.zeros(4)
    again[(3,)](x, 32, 1.0, LAST=5, FIRST=4, num_warps=2)
    again[(7, 2)](y, 48, 2.5, LAST=5, FIRST=4, num_warps=2)
    (made,) = kernel.made
    ((grid, *arguments),) = made.launches
    assert grid[:3] == (7, 2, 1) and arguments[0] is y and arguments[1:] == [48, 2.5, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((torch.zeros(8)[1:], 32, 1.0), {"FIRST": 4}),  # an address that is no multiple of 16
        ((torch.zeros(8, dtype=torch.float16), 32, 1.0), {"FIRST": 4}),
        ((torch.zeros(8), 33, 1.0), {"FIRST": 4}),  # a number that is none
        ((torch.zeros(8), 1, 1.0), {"FIRST": 4}),  # a number that is taken for a constant
        ((torch.zeros(8), 2**40, 1.0), {"FIRST": 4}),  # a number of 64 bits
        ((torch.zeros(8), 32, 1.0), {"FIRST": 5}),
        ((torch.zeros(8), 32, 1.0), {"FIRST": 4, "num_warps": 8}),
    ],
)
def test_a_launch_of_another_kind_is_compiled(arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    kernel = Kernel()
    again = Relaunched(kernel)
    again[(1,)](torch.zeros(8), 32, 1.0, FIRST=4, LAST=0)
    again[(1,)](*arguments, **named, LAST=0)
    assert len(kernel.made) == 2


def test_while_launches_are_only_recorded_triton_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    again = Relaunched(kernel)
    again[(1,)](torch.zeros(8), 32, 1.0, FIRST=4, LAST=0)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    again[(1,)](torch.zeros(8), 32, 1.0, FIRST=4, LAST=0)
    assert len(kernel.made) == 2 and not kernel.made[0].launches


def test_a_kernel_takes_tensors_and_numbers() -> None:
    with pytest.raises(TypeError, match="not with str"):
        Relaunched(Kernel())[(1,)]("x", FIRST=1, LAST=2)
