"""LayerNorm on CUDA: odd widths, sliced rows, every dtype, quantized and fp16 rows, against the definition."""

import pytest
import torch

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, to_fp16_operand
from quengine.kernels.cuda.gemv.activations import quantize_activations
from quengine.kernels.cuda.layer_norm import layer_norm, layer_norm_fp16, layer_norm_quantize
from quengine.kernels.layer_norm import LayerNorm
from quengine.kernels.layer_norm import layer_norm as definition

TOLERANCE = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def inputs(rows: int, width: int, device: torch.device, bias: bool = True) -> tuple[torch.Tensor, LayerNorm]:
    generator = torch.Generator().manual_seed(rows * 10007 + width)
    x = torch.randn(rows, width, generator=generator) * 3 + 1
    weight, added = torch.rand(2, width, generator=generator).add(0.5).to(device)
    return x.to(device), LayerNorm(weight, added if bias else None, 1e-5)


def expected(x: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
    bias = None if norm.bias is None else norm.bias.double()
    return definition(x.double(), norm.weight.double(), bias, norm.eps)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 37), (2, 1), (5, 4097)])
def test_matches_the_definition(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, norm = inputs(rows, width, device, bias=rows != 3)
    x = x.to(dtype)
    out = layer_norm(x, norm)
    assert out.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected(x, norm), rtol=tolerance, atol=tolerance)


def test_rows_of_a_wider_buffer(device: torch.device) -> None:
    wide, _ = inputs(4, 100, device)
    x, norm = wide[:, 5:54], inputs(4, 49, device)[1]
    torch.testing.assert_close(layer_norm(x, norm).double(), expected(x, norm), rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize(("rows", "width"), [(1, 32), (2, 576)])
def test_rounded_rows_are_those_of_the_result(rows: int, width: int, device: torch.device) -> None:
    x, norm = inputs(rows, width, device)
    rounded, wanted = layer_norm_quantize(x, norm), quantize_activations(layer_norm(x, norm))
    torch.testing.assert_close(rounded.scale, wanted.scale, rtol=1e-6, atol=0)
    assert int((rounded.ints().int() - wanted.ints().int()).abs().max()) <= 1
    assert torch.equal(rounded.sums, rounded.ints().int().view(rows, -1, 16).sum(-1).int())


@pytest.mark.parametrize("layout", list(OperandLayout))
@pytest.mark.parametrize(("rows", "width"), [(3, 576), (1, 128)])
def test_fp16_rows_are_those_of_the_result(
    rows: int, width: int, layout: OperandLayout, device: torch.device
) -> None:
    x, norm = inputs(rows, width, device)
    half = layer_norm_fp16(x, norm, Fp16Operand.empty(rows, width, device, layout))
    wanted = to_fp16_operand(layer_norm(x, norm))
    assert torch.equal(half.row_scale, wanted.row_scale)
    torch.testing.assert_close(half.row_major(width), wanted.values, rtol=2**-10, atol=2**-10)


def test_a_row_has_the_same_bits_alone(device: torch.device) -> None:
    x, norm = inputs(5, 640, device)
    assert torch.equal(layer_norm(x, norm)[3:4], layer_norm(x[3:4], norm))
