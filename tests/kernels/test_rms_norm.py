"""RMSNorm and SwiGLU definitions against hand-written fp64 formulas and torch's own operators."""

import pytest
import torch

from quengine.kernels.glu import glu
from quengine.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("width", [1, 7, 576, 4097])
def test_matches_the_formula_in_fp64(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(3, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(width, generator=generator, dtype=torch.float64)
    expected = torch.stack([row / (row.pow(2).sum() / width + 1e-5).sqrt() * weight for row in x])
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_keeps_the_dtype_and_rounds_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 96, generator=generator).to(dtype)
    weight = torch.randn(96, generator=generator)
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    exact = rms_norm(x.double(), weight.double(), 1e-6)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_large_values_do_not_overflow_in_half_precision() -> None:
    x = torch.full((1, 64), 60000.0, dtype=torch.float16)  # its square is beyond fp16
    assert torch.equal(rms_norm(x, torch.ones(64), 1e-5), torch.ones(1, 64, dtype=torch.float16))


def test_zero_row_stays_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


def test_agrees_with_torch_on_leading_dimensions() -> None:
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(2))
    weight = torch.linspace(0.5, 1.5, 40)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (40,), weight, 1e-5)
    )


def test_swiglu_takes_the_gate_from_the_first_half() -> None:
    gate = torch.randn(4, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    up = torch.randn(4, 10, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(glu(torch.cat((gate, up), dim=-1)), expected, rtol=1e-13, atol=1e-14)


def test_geglu_is_a_gelu_of_the_gate_times_up() -> None:
    gate, up = torch.linspace(-9, 9, 40, dtype=torch.float64).view(2, 20), torch.full((2, 20), 0.7).double()
    cube = gate + 0.044715 * gate**3
    expected = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * cube)) * up
    torch.testing.assert_close(glu(torch.cat([gate, up], 1), "gelu_tanh"), expected)
    exact = 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up
    torch.testing.assert_close(glu(torch.cat([gate, up], 1), "gelu_erf"), exact)
