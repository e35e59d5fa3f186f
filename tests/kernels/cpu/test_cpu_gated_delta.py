"""The compiled gated delta net against the definition."""

import torch
from torch import Tensor

from quengine.kernels.cpu.ops.state_copy import copy_states
from tests.kernels import gated_delta_steps
from tests.kernels.cpu.cpu_runs import gated_delta
from tests.kernels.cpu.memory_layers import MemoryLayer
from tests.kernels.gated_delta_steps import Shape


class TestGatedDelta(MemoryLayer):
    run, of = staticmethod(gated_delta), gated_delta_steps
    shapes = (
        Shape(2, 4, 128),
        Shape(2, 2, 8, taps=3, rows=5),
        Shape(1, 3, 40, tiled=False),
        Shape(2, 6, 32, taps=1, rows=1),
    )

    def test_extreme_gates_are_those_of_the_definition(self) -> None:
        """Strengths of 0 and 1, decays to 0 and of nothing."""

        def change(x: Tensor, extremes: Tensor) -> None:
            x[:, -16:-8], x[:, -8:] = extremes, extremes.flip(0)

        self.check_extremes(Shape(1, 8, 16), change)


def test_states_of_all_layers_are_copied() -> None:
    for shape in ((3, 5, 4, 9), (2, 4, 70, 900)):
        part = torch.randn(shape, generator=torch.Generator().manual_seed(8))
        wanted = part.clone()
        wanted[:, 1] = part[:, 3]
        copy_states(part, 3, 1)
        assert torch.equal(part, wanted)
