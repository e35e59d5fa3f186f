"""The compiled short convolution against the definition: results, and states behind them."""

import pytest
import torch

from quengine.kernels.backend import SlotLayer
from tests.kernels.cpu.cpu_runs import short_conv
from tests.kernels.short_conv_steps import ALL_STEPS, expected, rows_of, spec_of, states


@pytest.mark.parametrize("step", ALL_STEPS)
@pytest.mark.parametrize(("channels", "taps"), [(1000, 3), (24, 4), (64, 1)])
def test_steps_are_those_of_the_definition(step: str, channels: int, taps: int) -> None:
    batch, spec, state = ALL_STEPS[step], spec_of(channels, taps), states(channels)
    bcx = rows_of(len(batch), channels, 3)
    wanted, after = expected(batch, bcx, spec, state)
    layer = SlotLayer((state.clone(),))
    torch.testing.assert_close(short_conv(batch, bcx, spec, layer), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.parts[0], after, rtol=1e-6, atol=0)
