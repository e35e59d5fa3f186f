"""Half rows: however they lie, they stand for the same values."""

import pytest
import torch

from quengine.kernels.cuda.gemm.half import Form, HalfRows, half_shape


def plain(rows: int, cols: int) -> HalfRows:
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(3)).half()
    return HalfRows(values, torch.exp2(torch.arange(rows) % 5 - 2.0))


def laid(x: HalfRows, form: Form) -> HalfRows:
    return {Form.ROW_MAJOR: lambda: x, Form.TILED: x.as_tiled, Form.ORDERED: x.as_ordered}[form]()


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("rows", [slice(-1, None), torch.tensor([4, 0, 10])], ids=["last", "some"])
def test_rows_are_picked_as_fp32(rows: slice | torch.Tensor, form: Form) -> None:
    x = plain(11, 256)
    lying = laid(x, form)
    assert lying.values.shape == half_shape(11, 256, form)
    expected = (x.values.float() * x.unscale[:, None])[rows]
    assert torch.equal(lying.dequantize()[rows], expected)
    assert torch.equal(lying.pick(rows), expected)
