"""Codes of cached rows against ggml's formulas, and the Hadamard transform against its matrix."""

import pytest
import torch
from gguf import quants

from quengine.kernels.hadamard import hadamard, hadamard_block
from quengine.kernels.kv.kv_codes import dequantize_rows, quantize_rows, round_scales, unpack_codes
from tests.kernels.weights import nmse, randn


@pytest.mark.parametrize("width", [32, 64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_transform_is_the_product_with_its_matrix(width: int, dtype: torch.dtype) -> None:
    size, x = hadamard_block(width), randn(3, 2, width).to(dtype)
    assert width % size == 0 and width // size % 2
    common = torch.arange(size)[:, None] & torch.arange(size)
    signs = torch.tensor([(-1.0) ** int(n).bit_count() for n in common.flatten()]).view(size, size).double()
    wanted = (x.double().unflatten(-1, (-1, size)) @ signs / size**0.5).flatten(-2)
    found = hadamard(x)
    assert found.dtype == dtype and nmse(found, wanted) < (1e-13 if dtype == torch.float32 else 1e-30)
    assert nmse(hadamard(found), x) < 1e-12


def test_codes_of_4_bits_are_those_of_ggml_where_scales_are_exact() -> None:
    x = randn(40, 64).clamp(-1.99, 1.99)
    x[::2, 3], x[1::2, 3], x[:, 40] = -2.0, 2.0, -4.0  # scales 0.25, -0.25 and 0.5
    codes, scales = quantize_rows(x, 4)
    blocks = torch.from_numpy(quants.Q4_0.quantize_blocks(x.view(-1, 32).numpy()))
    assert torch.equal(scales.view(-1, 1).view(torch.uint8), blocks[:, :2])
    assert torch.equal(codes.view(-1, 16), blocks[:, 2:])
    values = torch.from_numpy(quants.Q4_0.dequantize_blocks(blocks.numpy())).view(40, 64)
    assert torch.equal(dequantize_rows(codes, scales), values)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-9, 1e-2, 1.0, 1e4])
def test_rounded_values_lie_within_half_a_code(bits: int, size: float) -> None:
    x = randn(20, 96) * size
    x[3] = 0.0
    codes, scales = quantize_rows(x, bits)
    assert codes.shape == (20, 96 * bits // 8) and scales.shape == (20, 3)
    most = scales.float().abs().repeat_interleave(32, dim=-1)
    # the last code of 4 bits stands for all values beyond it; a scale below fp16's normal numbers has few bits
    room = (0.5 if bits == 8 else 1.1) * most + size * 1e-3 + 1e-6
    assert bool(((dequantize_rows(codes, scales) - x).abs() <= room).all())
    assert not dequantize_rows(codes, scales)[3].any()
    assert int(unpack_codes(codes).abs().max()) <= (127 if bits == 8 else 8)


def test_products_of_codes_and_scales_of_4_bits_are_exact_in_half_precision() -> None:
    scales = round_scales(torch.linspace(-23.0, 12.9, 4001).exp2())
    codes = torch.arange(-8, 8)
    exact = scales.double()[:, None] * codes
    assert torch.equal((scales.half()[:, None] * codes.half()).double(), exact)
