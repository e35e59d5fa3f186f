"""Tests that every layer with a history and a memory passes on the CPU: results, states after them, the same bits for
any chunks."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from quengine.kernels.backend import SlotLayer
from tests.kernels.short_conv_steps import ALL_STEPS, prompt, tokens
from tests.kernels.weights import nmse

TOLERANCE = 1e-11


class MemoryLayer:
    """A module derives its test class.

    run: the compiled operation of a batch, its rows, a spec and a layer's states. of: the module of its definition's
    steps.
    """

    run: ClassVar[Callable[..., Tensor]]
    of: ClassVar[ModuleType]
    shapes: ClassVar[Sequence[Any]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "shape" in metafunc.fixturenames:
            metafunc.parametrize("shape", self.shapes, ids=str)

    @pytest.mark.parametrize("step", ALL_STEPS)
    def test_steps_are_those_of_the_definition(self, step: str, shape: Any) -> None:
        batch, spec, (history, memory) = ALL_STEPS[step], self.of.spec_of(shape), self.of.states(shape)
        x = self.of.rows_of(len(batch), shape, 3)
        wanted, *after = self.of.expected(batch, x, spec, history, memory)
        layer = SlotLayer((history.clone(), memory.clone()))
        made = self.run(batch, x.clone(), spec, layer)
        assert nmse(made, wanted) < TOLERANCE
        assert torch.equal(layer.parts[0], after[0])
        assert nmse(layer.parts[1].flatten(1), after[1].flatten(1)) < TOLERANCE

    def test_a_sequence_has_the_same_bits_in_any_chunks(self, shape: Any) -> None:
        spec, x = self.of.spec_of(shape), self.of.rows_of(90, shape, 5)
        found = []
        for pieces in ([90], [1] * 90, [64, 26], [7, 1, 1, 40, 41]):
            layer, start, made = SlotLayer(self.of.states(shape)), 0, []
            for length in pieces:
                rows = x[start : start + length].clone()
                batch = tokens([start], [2]) if length == 1 else prompt([length], [start], [2])
                made.append(self.run(batch, rows, spec, layer))
                start += length
            found.append([torch.cat(made), *(part[2] for part in layer.parts)])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))

    def test_sequences_of_a_step_leave_each_other_alone(self) -> None:
        shape = self.shapes[0]
        spec, x = self.of.spec_of(shape), self.of.rows_of(30, shape, 6)
        layer = SlotLayer(self.of.states(shape))
        together = self.run(prompt([12, 18], [0, 5], [3, 1]), x.clone(), spec, layer)
        alone = SlotLayer(self.of.states(shape))
        second = self.run(prompt([18], [5], [1]), x[12:].clone(), spec, alone)
        assert torch.equal(together[12:], second)
        assert all(torch.equal(a[1], b[1]) for a, b in zip(layer.parts, alone.parts, strict=True))

    def check_extremes(self, shape: Any, change: Callable[[Tensor, Tensor], None]) -> None:
        """change: puts extreme inputs into the rows."""
        spec, x = self.of.spec_of(shape), self.of.rows_of(6, shape, 7)
        change(x, torch.tensor([-200.0, -88.0, -17.0, 0.0, 17.0, 30.0, 88.0, 200.0]))
        batch, (history, memory) = prompt([6], [9], [1]), self.of.states(shape)
        wanted, *after = self.of.expected(batch, x, spec, history, memory)
        layer = SlotLayer((history, memory))
        made = self.run(batch, x, spec, layer)
        assert nmse(made, wanted) < TOLERANCE and nmse(layer.parts[1][1], after[1][1]) < TOLERANCE
