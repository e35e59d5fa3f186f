"""Half rows: however they lie, they stand for the same values."""

import pytest
import torch

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, operand_shape


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
