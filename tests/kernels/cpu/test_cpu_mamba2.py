"""The compiled Mamba2 layer against the definition."""

from torch import Tensor

from tests.kernels import mamba2_steps
from tests.kernels.cpu.cpu_runs import mamba2
from tests.kernels.cpu.memory_layers import MemoryLayer
from tests.kernels.mamba2_steps import Shape


class TestMamba2(MemoryLayer):
    run, of = staticmethod(mamba2), mamba2_steps
    shapes = (
        Shape(4, 64, 2, 128),
        Shape(2, 8, 1, 8, taps=3, rows=5),
        Shape(6, 32, 3, 40, limits=(0.05, 0.2)),
        Shape(3, 16, 1, 16, taps=1, rows=1),
    )

    def test_extreme_steps_of_time_are_those_of_the_definition(self) -> None:
        """Memories that fade at once, and not at all."""

        def change(x: Tensor, extremes: Tensor) -> None:
            x[:, -8:] = extremes

        self.check_extremes(Shape(8, 8, 2, 8), change)
