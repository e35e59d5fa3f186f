"""Activations without a gate: the definition against torch's, the CPU's kernel and steps against the definition."""

import pytest
import torch

from quengine.kernels import cpu
from quengine.kernels.cpu.gemv.matmul import quantize_launch
from quengine.kernels.cpu.gemv.quantized_rows import quantized_row_bytes
from quengine.kernels.cpu.ops.glu import glu_launch
from quengine.kernels.pointwise import pointwise
from tests.kernels.weights import randn


def test_the_definition_is_the_square_of_torchs_relu() -> None:
    x = 3.0 * randn(4, 33)
    assert torch.equal(pointwise(x), torch.nn.functional.relu(x) ** 2)
    assert pointwise(x.half()).dtype == torch.float16


@pytest.mark.parametrize(("rows", "width"), [(1, 96), (4, 33), (1, 1536)])
def test_the_cpus_kernel_is_its_definition(rows: int, width: int) -> None:
    x = 3.0 * randn(rows, width)
    assert torch.equal(cpu.glu(x, "relu2"), pointwise(x))


def test_the_cpus_kernel_keeps_nan() -> None:
    x = torch.tensor([[torch.nan, -torch.inf, -0.0, 2.0]])
    result = cpu.glu(x, "relu2")
    assert result[0, 0].isnan()
    assert torch.equal(result[:, 1:], torch.tensor([[0.0, 0.0, 4.0]]))


def test_rows_are_quantized_with_it() -> None:
    x = 3.0 * randn(2, 96)
    records, expected = (torch.zeros(2, quantized_row_bytes(96), dtype=torch.uint8) for _ in range(2))
    values = pointwise(x)
    cpu.run([glu_launch(x, x, records, 32, "relu2")])
    cpu.run([quantize_launch(values, expected)])
    assert torch.equal(x, values)
    assert torch.equal(records, expected)
