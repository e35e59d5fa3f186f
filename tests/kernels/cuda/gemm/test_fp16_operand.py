"""Half rows: however they lie, they stand for the same values."""

import pytest
import torch

from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    OperandLayout,
    ScaledProduct,
    operand_shape,
    to_fp16_operand,
    to_wgmma_layout,
)
from quengine.kernels.cuda.post_norm import post_norm_add
from quengine.kernels.rms_norm import RMSNorm


def plain(rows: int, cols: int) -> Fp16Operand:
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(3)).half()
    return Fp16Operand(values, torch.exp2(torch.arange(rows) % 5 - 2.0))


def laid(x: Fp16Operand, form: OperandLayout) -> Fp16Operand:
    return {OperandLayout.ROW_MAJOR: lambda: x, OperandLayout.MMA: x.as_mma, OperandLayout.WGMMA: x.as_wgmma}[
        form
    ]()


@pytest.mark.parametrize("form", list(OperandLayout))
@pytest.mark.parametrize("rows", [slice(-1, None), torch.tensor([4, 0, 10])], ids=["last", "some"])
def test_rows_are_picked_as_fp32(rows: slice | torch.Tensor, form: OperandLayout) -> None:
    x = plain(11, 256)
    lying = laid(x, form)
    assert lying.values.shape == operand_shape(11, 256, form)
    expected = (x.values.float() * x.row_scale[:, None])[rows]
    assert torch.equal(lying.dequantize()[rows], expected)
    assert torch.equal(lying.gather(rows), expected)


@pytest.mark.parametrize("cols", [96, 576, 4160])
def test_whoever_writes_the_wgmma_layout_pads_its_columns_with_zeros(cols: int, device: torch.device) -> None:
    """Blocks of 128 columns are copied and multiplied whole: what is behind the last column must be no NaN."""
    x, rows = plain(3, cols), 3
    padded = -(-cols // 128) * 128

    def room() -> Fp16Operand:
        made = Fp16Operand.empty(rows, cols, device, OperandLayout.WGMMA)
        made.values.fill_(float("nan"))
        return made

    def wide(made: Fp16Operand) -> torch.Tensor:
        assert made.values.shape[1] == padded and made.fits(cols) and not made.fits(padded + 1)
        return made.row_major(padded).cpu()

    values = x.values.to(device)
    moved = to_wgmma_layout(Fp16Operand(values, x.row_scale.to(device)), room().values)
    rounded = to_fp16_operand(values.float(), room())
    normed, residual = room(), torch.zeros(rows, cols, device=device)
    norm = RMSNorm(torch.ones(cols, device=device), 1e-5)
    post_norm_add(values.float(), residual, None, norm, normed, bias=torch.zeros(cols, device=device))
    for made in (moved, rounded, normed, x.as_wgmma()):
        assert (wide(made)[:, cols:] == 0).all()
    assert torch.equal(wide(moved)[:, :cols], x.values)
    assert torch.equal(rounded.dequantize(cols).cpu(), x.values.float())
    scale = x.values.float().square().mean(1, keepdim=True).add(1e-5).rsqrt()
    assert torch.allclose(normed.dequantize(cols).cpu(), x.values.float() * scale, rtol=2e-3, atol=1e-3)


def test_a_part_of_the_last_columns_is_cleared_before_they_are_written() -> None:
    room = Fp16Operand.empty(3, 200, "cpu", OperandLayout.WGMMA)
    room.values.fill_(float("nan"))
    room.clear_padding(200)
    assert room.values[:, 128:].eq(0).all() and room.values[:, :128].isnan().all()


def test_a_product_without_scales_is_its_values() -> None:
    values, ones = torch.randn(3, 32), torch.ones(3)
    assert ScaledProduct(values, ones, 1.0, scaled=False).finish() is values
