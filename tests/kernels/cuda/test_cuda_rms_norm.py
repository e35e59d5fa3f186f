"""RMSNorm on CUDA: odd widths, sliced rows, every dtype, residual and rounding, against the definition."""

import pytest
import torch

from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    OperandLayout,
    ScaledProduct,
    to_fp16_operand,
)
from quengine.kernels.cuda.gemv.activations import quantize_activations
from quengine.kernels.cuda.rms_norm import add_norm_fp16, geometry, rms_norm, rms_norm_fp16, rms_norm_quantize
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
    out = rms_norm(x, weight[:49].contiguous(), 1e-6)
    expected = definition(x.double(), weight[:49].double(), 1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize("rows,width", [(3, 96), (520, 96)])
def test_a_product_is_added_to_the_residual(rows: int, width: int, device: torch.device) -> None:
    values, weight = inputs(rows, width, torch.float32, device)
    product = ScaledProduct(values, torch.rand(rows, device=device) + 0.5, 4.0)
    residual = inputs(rows + 1, width, torch.float32, device)[0][:rows].contiguous()
    total = product.dequantize() + residual
    out = add_norm_fp16(product, residual, weight, 1e-5, Fp16Operand.empty(rows, width, device))
    torch.testing.assert_close(residual, total, rtol=1e-6, atol=1e-6)
    expected = definition(total.double(), weight.double(), 1e-5)
    torch.testing.assert_close(out.dequantize().double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rows,width", [(1, 32), (3, 576), (2, 4096), (9, 96)])
def test_rounded_result_is_the_rounding_of_the_result(rows: int, width: int, device: torch.device) -> None:
    x, weight = inputs(rows, width, torch.float32, device)
    rounded = rms_norm_quantize(x, weight, 1e-5)
    expected = quantize_activations(rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(rounded.scale, expected.scale, rtol=1e-6, atol=0)
    assert int((rounded.ints().int() - expected.ints().int()).abs().max()) <= 1
    sums = rounded.ints().int().view(rows, -1, 16).sum(-1)
    assert torch.equal(rounded.sums, sums.int())


@pytest.mark.parametrize("rows,width", [(1, 64), (3, 576), (520, 96), (2, 4096)])
def test_fp16_rows_are_those_of_the_result(rows: int, width: int, device: torch.device) -> None:
    x, weight = inputs(rows, width, torch.float32, device)
    x[0] *= 1e-12
    half, expected = rms_norm_fp16(x, weight, 1e-5), to_fp16_operand(rms_norm(x, weight, 1e-5))
    assert torch.equal(half.row_scale, expected.row_scale)
    torch.testing.assert_close(half.values, expected.values, rtol=2**-10, atol=0)


@pytest.mark.parametrize("rows,width", [(1, 128), (3, 640), (5, 4096)])
def test_ordered_rows_are_those_of_the_result(rows: int, width: int, device: torch.device) -> None:
    """Alone a row has the same bits."""
    x, weight = inputs(rows, width, torch.float32, device)

    def ordered(x: torch.Tensor) -> Fp16Operand:
        return rms_norm_fp16(
            x, weight, 1e-5, Fp16Operand.empty(*x.shape, device, OperandLayout.WGMMA), batch_invariant=True
        )

    made, expected = ordered(x), to_fp16_operand(rms_norm(x, weight, 1e-5)).as_wgmma()
    assert torch.equal(made.row_scale, expected.row_scale)
    torch.testing.assert_close(made.values[:rows], expected.values[:rows], rtol=2**-10, atol=2**-10)
    alone = ordered(x[-1:])
    assert torch.equal(alone.values[0], made.values[rows - 1])


def test_a_zero_row_rounds_to_zero(device: torch.device) -> None:
    rounded = rms_norm_quantize(torch.zeros(1, 64, device=device), torch.ones(64, device=device), 1e-5)
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
