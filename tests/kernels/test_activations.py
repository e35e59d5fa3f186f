"""Rounding of activations: the definition itself."""

import pytest
import torch

from quengine.kernels.activations import quantize_activations


def test_error_is_at_most_half_a_step() -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5).view(-1, 1)
    rounded = quantize_activations(x)
    steps = rounded.t.double().repeat_interleave(32, dim=1)
    assert ((rounded.values() - x.double()).abs() <= steps * 0.5001).all()
    assert rounded.a.dtype == torch.int16 and rounded.t.dtype == torch.float32
    assert (rounded.a.view(5, 3, 32).abs().amax(-1) == 32639).all()


def test_ties_go_to_even() -> None:
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([32639.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert quantize_activations(x).a[0, :6].tolist() == [32639, 0, 2, 2, 0, -2]


def test_a_group_of_zeros_has_no_scale() -> None:
    x = torch.ones(1, 64)
    x[0, :32] = 0
    rounded = quantize_activations(x)
    assert rounded.t[0, 0] == 0 and (rounded.a[0, :32] == 0).all() and (rounded.a[0, 32:] == 32639).all()


@pytest.mark.parametrize("largest", [1e-45, 3e-42, 2e-41, 1e-38, 3e38])
def test_extreme_magnitudes_stay_in_range(largest: float) -> None:
    x = torch.full((1, 32), largest)
    x[0, 1] = -largest
    rounded = quantize_activations(x)
    assert rounded.a.abs().max() <= 32639
    assert torch.isfinite(rounded.t).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible_in_the_scale(bad: float) -> None:
    x = torch.ones(1, 64)
    x[0, 3] = bad
    rounded = quantize_activations(x)
    assert not torch.isfinite(rounded.t[0, 0])
    assert torch.isfinite(rounded.t[0, 1])


def test_sums_are_exact() -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    rounded = quantize_activations(x)
    for group in (16, 32):
        assert torch.equal(rounded.sums(group).long(), rounded.a.long().view(3, -1, group).sum(-1))


def test_partial_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 32"):
        quantize_activations(torch.zeros(1, 40))
