"""What layers get of a token beside the stream, on CUDA, against its definition in fp64."""

import pytest
import torch

from quengine.kernels.block_formats import dequantize
from quengine.kernels.cuda.gemm.fp16_operand import ScaledProduct
from quengine.kernels.cuda.layer_inputs import input_glu, input_glu_quantize, layer_inputs
from quengine.kernels.cuda.weights.packed import pack_on_host
from quengine.kernels.layer_inputs import input_glu as defined_glu
from quengine.kernels.layer_inputs import layer_inputs as defined_inputs
from quengine.kernels.rms_norm import RMSNorm
from tests.kernels.cuda.weights import nmse, ordinary_weight

ROWS, LAYERS, SIZE = 3, 3, 96


def product(
    device: torch.device, scaled: bool, columns: int
) -> tuple[torch.Tensor | ScaledProduct, torch.Tensor]:
    """fp32 rows, or a matmul's with scales to come; and their values in fp64."""
    values = torch.randn(ROWS, columns, device=device)
    if not scaled:
        return values, values.double().cpu()
    row_scale = torch.tensor([0.5, 2.0, 8.0], device=device)
    exact = values.double() * row_scale.double()[:, None] / 4.0
    return ScaledProduct(values, row_scale, 4.0), exact.cpu()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "BF16"])
def test_inputs_of_all_layers(kind: str, scaled: bool, device: torch.device) -> None:
    torch.manual_seed(1)
    size = 256 if kind == "Q6_K" else SIZE
    table = ordinary_weight(kind, 40, LAYERS * size)
    projected, exact = product(device, scaled, LAYERS * size)
    weight = torch.rand(size) + 0.5
    norm = RMSNorm(weight.to(device), 1e-3)
    ids = torch.tensor([39, 0, 17], device=device)
    held = pack_on_host(table, device)
    got = layer_inputs(projected, norm, held, ids, 1.5)
    rows = dequantize(table.format, table.data[ids.cpu()]).double() * 1.5
    assert nmse(got.cpu().double(), defined_inputs(exact, RMSNorm(weight.double(), 1e-3), rows)) < 1e-12


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_a_gate_of_a_layers_input(activation: str, device: torch.device) -> None:
    torch.manual_seed(2)
    inputs = torch.randn(ROWS, LAYERS * SIZE, device=device)
    for scaled in (False, True):
        gate, exact = product(device, scaled, SIZE)
        expected = defined_glu(exact, inputs.double().cpu(), 2, activation)  # type: ignore[arg-type]
        got = input_glu(gate, inputs, 2, activation)  # type: ignore[arg-type]
        assert nmse(got.cpu().double(), expected) < 1e-12
        if isinstance(gate, torch.Tensor):
            rounded = input_glu_quantize(gate, inputs, 2, activation)  # type: ignore[arg-type]
            assert nmse(rounded.dequantize().cpu().double(), expected) < 1e-8
