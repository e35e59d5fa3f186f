"""What surrounds the experts' last matmul, against torch, for every layout of the rows that it makes."""

from itertools import product

import pytest
import torch

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, operand_shape
from quengine.kernels.cuda.moe.combine import combine_experts, grouped_glu_rows
from quengine.kernels.cuda.moe.grouped_program import Blocks
from quengine.kernels.cuda.moe.groups import number_pairs
from quengine.kernels.glu import GATELESS, Activation, glu
from quengine.kernels.rms_norm import RMSNorm, rms_norm
from tests.kernels.cuda.moe.routings import chosen, empty_groups
from tests.kernels.cuda.weights import nmse, ordinary_activations

ROUNDED = 2e-7
"""fp16 keeps 11 bits."""


def nothing(rows: int, cols: int, layout: OperandLayout, device: torch.device) -> Fp16Operand:
    """An operand whose values are no numbers."""
    shape = operand_shape(rows, cols, layout)
    values = torch.full(shape, float("nan"), dtype=torch.float16, device=device)
    return Fp16Operand(values, torch.full((rows,), float("nan"), device=device), layout)


@pytest.mark.parametrize(
    ("width", "layout"), [(384, OperandLayout.ROW_MAJOR), *product((256, 192), OperandLayout)]
)
def test_weighted_sum_residual_and_norm(width: int, layout: OperandLayout, device: torch.device) -> None:
    if layout is OperandLayout.WGMMA and width % 128:
        return
    experts = chosen(5, 3, 6).to(device)
    groups = empty_groups(15, 6, 8, device)
    number_pairs(experts, groups)
    products = torch.full((groups.rows, width), float("nan"), device=device)
    of_pair = ordinary_activations(15, width).to(device)
    products[groups.positions.long()] = of_pair
    weights, residual = torch.rand(5, 3, device=device), torch.randn(5, width, device=device)
    norm = RMSNorm(torch.rand(width, device=device) + 0.5, 1e-5)
    expected = (of_pair.view(5, 3, width) * weights[..., None]).double().sum(1) + residual.double()
    out, alone = nothing(5, width, layout, device), residual.clone()
    combine_experts(products, groups, weights, alone)
    combine_experts(products, groups, weights, residual, norm, out)
    assert torch.equal(alone, residual) and nmse(residual, expected) < 1e-13
    normed = rms_norm(residual.double(), norm.weight.double(), norm.eps)
    assert nmse(out.dequantize(width), normed) < ROUNDED


def test_a_rows_experts_are_added_in_ascending_order_and_then_to_the_residual(device: torch.device) -> None:
    experts, groups = (
        torch.tensor([[1, 2, 3]], dtype=torch.int32, device=device),
        empty_groups(3, 4, 8, device),
    )
    number_pairs(experts, groups)
    products = torch.zeros(groups.rows, 128, device=device)
    products[groups.positions.long()] = torch.tensor([1e8, 1.0, -1e8], device=device)[:, None].expand(3, 128)
    residual = torch.full((1, 128), 0.25, device=device)
    combine_experts(products, groups, torch.ones(1, 3, device=device), residual)
    assert (residual == 0.25).all()  # in fp32, 1e8 + 1 is 1e8


@pytest.mark.parametrize(
    ("layout", "activation"),
    [
        *zip(OperandLayout, ("silu", "gelu_tanh", "clamped_swish"), strict=True),
        *((OperandLayout.MMA, name) for name in ("relu2", "gelu")),
    ],
)
def test_units_of_products_in_blocks(
    layout: OperandLayout, activation: Activation, device: torch.device
) -> None:
    """Behind the last column of a row that is used there are zeros."""
    experts, groups = chosen(9, 2, 4).to(device), empty_groups(18, 4, 8, device)
    number_pairs(experts, groups)
    parts = 1 if activation in GATELESS else 2
    products = ordinary_activations(groups.rows, parts * 160).to(device)
    out = nothing(groups.rows, 256, layout, device)
    grouped_glu_rows(products, Blocks(groups.blocks, 8, 0, groups.most, False), out, activation)
    used = groups.positions.long()
    made = out.dequantize(256)[used]
    assert nmse(made[:, :160], glu(products[used].double(), activation)) < ROUNDED
    assert not made[:, 160:].any()
