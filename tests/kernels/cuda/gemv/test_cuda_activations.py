"""Rounding on the device gives the integers and scales of the definition, to the last bit."""

import pytest
import torch

from quengine.kernels.activations import quantize_activations as definition
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations


def awkward_rows(rows: int, cols: int) -> torch.Tensor:
    """Groups of every magnitude: zeros, denormals, huge values, ties."""
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    x = torch.randn(rows, cols // 32, 32, generator=generator)
    x *= 10.0 ** torch.randint(-12, 12, (rows, cols // 32, 1), generator=generator)
    x[0, 0] = 0
    x[-1, -1] = 1e-44
    x[-1, -1, 0] = 3e-41
    x[0, -1] = torch.arange(32) + 0.5
    x[0, -1, 0] = 32639
    return x.view(rows, cols)


def assert_is_definition(ours: QuantizedActivations, x: torch.Tensor) -> None:
    theirs = definition(x.cpu())
    assert torch.equal(ours.ints().cpu(), theirs.a)
    assert torch.equal(ours.scale.cpu().view(torch.int32), theirs.t.view(torch.int32))
    assert torch.equal(ours.sums.cpu(), theirs.sums(16))


@pytest.mark.parametrize(("rows", "cols"), [(1, 64), (3, 576), (2, 1536), (5, 2048)])
def test_integers_and_scales_are_those_of_the_definition(rows: int, cols: int, device: torch.device) -> None:
    x = awkward_rows(rows, cols).to(device)
    assert_is_definition(quantize_activations(x), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_that_is_not_finite_stays_so(bad: float, device: torch.device) -> None:
    x = awkward_rows(2, 128)
    x[1, 40] = bad
    ours = quantize_activations(x.to(device))
    finite = ours.scale.isfinite().cpu()
    assert not finite[1, 1]
    assert finite.sum() == finite.numel() - 1


def test_a_given_output_is_filled(device: torch.device) -> None:
    x = awkward_rows(3, 128).to(device)
    room = QuantizedActivations.empty(3, 128, device)
    assert quantize_activations(x, out=room) is room
    assert_is_definition(room, x)


def test_widths_that_are_no_whole_groups_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="multiple"):
        quantize_activations(torch.zeros(1, 40, device=device))
