"""Activations without a gate on CUDA, against the definition: rows, scaled products, rows quantized for q-dot."""

import pytest
import torch

from quengine.kernels.cuda.gemm.fp16_operand import ScaledProduct
from quengine.kernels.cuda.gemv.activations import quantize_activations
from quengine.kernels.cuda.pointwise import pointwise, pointwise_quantize
from quengine.kernels.pointwise import Pointwise
from quengine.kernels.pointwise import pointwise as definition
from tests.kernels.weights import randn


@pytest.mark.parametrize("activation", ["relu2", "gelu"])
@pytest.mark.parametrize(("rows", "width"), [(1, 33), (3, 1100)])
def test_rows_are_the_definition(rows: int, width: int, activation: Pointwise, device: torch.device) -> None:
    x = 3.0 * randn(rows, width)
    x[0, 0] = torch.nan
    y = pointwise(x.clone().to(device), activation).cpu()
    torch.testing.assert_close(y, definition(x, activation), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_product_is_scaled_first(device: torch.device) -> None:
    product = ScaledProduct(randn(3, 70).to(device), torch.tensor([0.5, 1.0, 4.0], device=device), 8.0)
    expected = definition(product.dequantize().cpu())
    torch.testing.assert_close(pointwise(product, "relu2").cpu(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [32, 1056])
def test_quantized_rows_are_those_of_the_result(width: int, device: torch.device) -> None:
    x = 3.0 * randn(1, width)
    rounded, expected = (
        pointwise_quantize(x.to(device), "relu2"),
        quantize_activations(definition(x).to(device)),
    )
    torch.testing.assert_close(rounded.scale, expected.scale, rtol=1e-6, atol=0)
    assert int((rounded.ints().int() - expected.ints().int()).abs().max()) <= 1
    assert torch.equal(rounded.sums, rounded.ints().int().view(1, -1, 16).sum(-1).int())
