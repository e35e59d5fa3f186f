"""RMSNorm on CUDA: odd widths, sliced rows, every dtype, residual and rounding, against the definition."""

import pytest
import torch

from quengine.kernels.cuda.gemm.half import Form, HalfRows, half_rows
from quengine.kernels.cuda.gemv.activations import round_activations
from quengine.kernels.cuda.rms_norm import geometry, rms_norm, rms_norm_half, rms_norm_round
from quengine.kernels.rms_norm import rms_norm as definition

TOLERANCE = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def inputs(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 10007 + width)
    x = (torch.randn(rows, width, generator=generator) * 3).to(dtype).to(device)
    return x, (torch.rand(width, generator=generator) + 0.5).to(device)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows,width", [(1, 576), (3, 37), (2, 1), (5, 4097), (600, 33), (2, 6000)])
def test_matches_the_definition(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = inputs(rows, width, dtype, device)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    expected = definition(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("rows", [4, 520])
def test_rows_of_a_wider_buffer(rows: int, device: torch.device) -> None:
    wide, weight = inputs(rows, 100, torch.float32, device)
    x = wide[:, 5:54]
    out = torch.full((rows, 60), 9.0, device=device)
    rms_norm(x, weight[:49].contiguous(), 1e-6, out=out[:, 3:52])
    expected = definition(x.double(), weight[:49].double(), 1e-6)
    torch.testing.assert_close(out[:, 3:52].double(), expected, rtol=4e-6, atol=1e-6)
    assert bool((out[:, :3] == 9).all() and (out[:, 52:] == 9).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_residual_is_added_and_updated(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = inputs(3, 96, dtype, device)
    residual = inputs(4, 96, dtype, device)[0][:3]
    total = (x.float() + residual.float()).to(dtype)
    out = rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(residual, total)
    expected = definition(total.double(), weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("rows,width", [(1, 32), (3, 576), (2, 4096), (9, 96)])
def test_rounded_result_is_the_rounding_of_the_result(rows: int, width: int, device: torch.device) -> None:
    x, weight = inputs(rows, width, torch.float32, device)
    rounded = rms_norm_round(x, weight, 1e-5)
    expected = round_activations(rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(rounded.scale, expected.scale, rtol=1e-6, atol=0)
    assert int((rounded.ints().int() - expected.ints().int()).abs().max()) <= 1
    sums = rounded.ints().int().view(rows, -1, 16).sum(-1)
    assert torch.equal(rounded.sums, sums.int())


@pytest.mark.parametrize("rows,width", [(1, 64), (3, 576), (520, 96), (2, 4096)])
def test_half_rows_are_those_of_the_result(rows: int, width: int, device: torch.device) -> None:
    x, weight = inputs(rows, width, torch.float32, device)
    x[0] *= 1e-12
    half, expected = rms_norm_half(x, weight, 1e-5), half_rows(rms_norm(x, weight, 1e-5))
    assert torch.equal(half.unscale, expected.unscale)
    torch.testing.assert_close(half.values, expected.values, rtol=2**-10, atol=0)


@pytest.mark.parametrize("rows,width", [(1, 128), (3, 640), (5, 4096)])
def test_ordered_rows_are_those_of_the_result(rows: int, width: int, device: torch.device) -> None:
    """Alone a row has the same bits."""
    x, weight = inputs(rows, width, torch.float32, device)

    def ordered(x: torch.Tensor) -> HalfRows:
        return rms_norm_half(x, weight, 1e-5, HalfRows.empty(*x.shape, device, Form.ORDERED), fixed=True)

    made, expected = ordered(x), half_rows(rms_norm(x, weight, 1e-5)).as_ordered()
    assert torch.equal(made.unscale, expected.unscale)
    torch.testing.assert_close(made.values[:rows], expected.values[:rows], rtol=2**-10, atol=2**-10)
    alone = ordered(x[-1:])
    assert torch.equal(alone.values[0], made.values[rows - 1])


def test_rounded_with_residual(device: torch.device) -> None:
    x, weight = inputs(2, 64, torch.float32, device)
    residual = inputs(3, 64, torch.float32, device)[0][:2].contiguous()
    total = x + residual
    rounded = rms_norm_round(x, weight, 1e-5, residual=residual)
    assert torch.equal(residual, total)
    exact = definition(total.double(), weight.double(), 1e-5)
    assert float((rounded.dequantize().double() - exact).norm() / exact.norm()) < 3e-5


def test_a_zero_row_rounds_to_zero(device: torch.device) -> None:
    rounded = rms_norm_round(torch.zeros(1, 64, device=device), torch.ones(64, device=device), 1e-5)
    assert not rounded.ints().any() and not rounded.scale.any() and not rounded.sums.any()


@pytest.mark.parametrize("width", [1, 31, 576, 4096, 4097, 14336, 65536])
@pytest.mark.parametrize("rows", [1, 512, 513, 65536])
def test_tiles_cover_the_row_and_fit_a_block(rows: int, width: int) -> None:
    shape = geometry(rows, width)
    assert width <= shape.head + shape.tail
    assert 1 <= shape.warps <= 32
    assert shape.block_rows * (shape.head + shape.tail) <= 64 * 32 * shape.warps, (
        "too many registers a thread"
    )


def test_too_wide_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="65537"):
        geometry(1, 65537)
