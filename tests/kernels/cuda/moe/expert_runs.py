"""Experts, routings and rows for the tests of the mixture of experts on CUDA, and what is expected of them."""

import torch
from torch import Tensor

from quengine.kernels import activations as definition
from quengine.kernels.block_formats import dequantize, unpack
from quengine.kernels.glu import Activation
from quengine.kernels.moe.experts import experts_add, experts_glu
from quengine.kernels.moe.router import Routing
from quengine.kernels.q_dot import q_dot
from quengine.kernels.quant_tensor import QuantTensor
from tests.kernels.cuda.weights import ordinary_weight


def experts_of(name: str, count: int, rows: int, cols: int, seed: int = 0) -> list[QuantTensor]:
    """The experts of one tensor, as a file has them: neighbouring views."""
    return ordinary_weight(name, count * rows, cols, seed).row_slices(rows)


def routing_of(experts: list[list[int]], device: torch.device, seed: int = 3) -> Routing:
    """These experts, with random weights."""
    chosen = torch.tensor(experts, dtype=torch.int32)
    weights = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(seed)) + 0.1
    return Routing(chosen.to(device), weights.to(device))


def product(weight: QuantTensor, x: Tensor) -> Tensor:
    """The q-dot of fp64 rows x, quantized, in fp64; of plain floats their product with the quantized rows."""
    rounded = definition.quantize_activations(x.float())
    if not weight.format.is_quantized:
        return rounded.values().double() @ dequantize(weight.format, weight.data).double().T
    return q_dot(rounded, unpack(weight.format, weight.data), torch.float64)


def expected_glu(
    x: Tensor,
    routing: Routing,
    gate: list[QuantTensor],
    up: list[QuantTensor],
    bias: Tensor | None,
    activation: Activation,
) -> Tensor:
    """The definition on the q-dot: [T, k, F], fp64. x: the quantized rows' values."""

    def gate_up(expert: int, rows: Tensor) -> Tensor:
        both = torch.cat([product(gate[expert], rows), product(up[expert], rows)], dim=1)
        return both if bias is None else both + bias[expert].double()

    return experts_glu(x.double(), _on_host(routing), gate_up, activation)


def expected_add(
    gated: Tensor, routing: Routing, down: list[QuantTensor], bias: Tensor | None, residual: Tensor
) -> Tensor:
    """The definition on the q-dot: [T, N], fp64. gated: [T, k, F]."""

    def of_expert(expert: int, rows: Tensor) -> Tensor:
        y = product(down[expert], rows)
        return y if bias is None else y + bias[expert].double()

    return experts_add(gated.double(), _on_host(routing), of_expert, residual.double())


def _on_host(routing: Routing) -> Routing:
    return Routing(routing.experts.cpu(), routing.weights.double().cpu())
