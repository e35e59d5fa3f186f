"""LayerNorm: the definition against torch's own operation, the CPU's kernel against the definition."""

import pytest
import torch

from quengine.kernels import cpu
from quengine.kernels.layer_norm import LayerNorm, layer_norm
from quengine.kernels.rms_norm import RMSNorm
from tests.kernels.weights import randn


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_definition_is_torchs(dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = (3.0 * randn(5, 40) + 1.0).to(dtype), randn(1, 40, seed=1)[0]
    bias = randn(1, 40, seed=2)[0] if has_bias else None
    given = None if bias is None else bias.double()
    expected = torch.nn.functional.layer_norm(x.double(), (40,), weight.double(), given, 1e-5)
    found = layer_norm(x, weight, bias, 1e-5)
    assert found.dtype == dtype
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (1, 576), (3, 33), (2, 7), (5, 4096)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_cpus_kernel_is_its_definition(rows: int, width: int, has_bias: bool) -> None:
    x = 3.0 * randn(rows, width) + 2.0
    norm = LayerNorm(randn(1, width, seed=1)[0], randn(1, width, seed=2)[0] if has_bias else None, 1e-5)
    bias = None if norm.bias is None else norm.bias.double()
    expected = layer_norm(x.double(), norm.weight.double(), bias, 1e-5)
    torch.testing.assert_close(cpu.normed(x, norm).double(), expected, rtol=2e-6, atol=2e-6)


def test_a_mean_far_from_zero_costs_no_bits_of_the_variance() -> None:
    x = randn(2, 576) + 1000.0
    norm = LayerNorm(torch.ones(576), None, 1e-5)
    expected = layer_norm(x.double(), norm.weight.double(), None, 1e-5)
    torch.testing.assert_close(cpu.normed(x, norm).double(), expected, rtol=1e-4, atol=1e-4)


def test_zeros_and_nan() -> None:
    norm = LayerNorm(torch.ones(40), torch.full((40,), 0.5), 1e-6)
    assert torch.equal(cpu.normed(torch.zeros(1, 40), norm), torch.full((1, 40), 0.5))
    x = torch.ones(1, 40)
    x[0, 39] = torch.nan
    assert cpu.normed(x, norm).isnan().all()


def test_the_other_norm_and_none_are_themselves() -> None:
    x, weight = randn(2, 40), randn(1, 40, seed=1)[0]
    assert cpu.normed(x, None) is x
    assert torch.equal(cpu.normed(x, RMSNorm(weight, 1e-5)), cpu.rms_norm(x, weight, 1e-5))
