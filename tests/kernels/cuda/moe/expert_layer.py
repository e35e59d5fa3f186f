"""A layer's experts with random weights: packed, and by the torch definition."""

import torch

from quengine.kernels.block_formats import dequantize
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, to_fp16_operand
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.moe import grouped as module
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights, pack_experts, pack_gate_up_experts
from quengine.kernels.cuda.moe.grouped import GroupedRows, grouped_add, grouped_glu
from quengine.kernels.cuda.moe.groups import number_pairs
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.glu import Activation
from quengine.kernels.moe import experts as definition
from quengine.kernels.moe.router import Routing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from tests.kernels.cuda.moe.routings import empty_groups
from tests.kernels.cuda.weights import ordinary_weight


class Layer:
    """The experts of a layer: K columns, F rows of gate and up, N rows of down, with biases or without. width: columns
    of down, where they are not F (both are tested apart, and the interpreter is slow)."""

    def __init__(
        self,
        types: tuple[str, str, str],
        sizes: tuple[int, int, int],
        count: int,
        bias: bool = False,
        width: int = 0,
    ) -> None:
        (k, f, n), (gate, up, down) = sizes, types
        self.gate, self.up = (
            [ordinary_weight(name, f, k, 7 * e + i) for e in range(count)]
            for i, name in enumerate((gate, up))
        )
        self.width = width or f
        self.down = [ordinary_weight(down, n, self.width, 900 + e) for e in range(count)]
        generator = torch.Generator().manual_seed(5)
        self.gate_up_bias = 10 * torch.randn(count, 2 * f, generator=generator) if bias else None
        self.down_bias = 10 * torch.randn(count, n, generator=generator) if bias else None

    def packed_gate_up(self, device: torch.device) -> ExpertWeights:
        return pack_gate_up_experts(self.gate, self.up, device, _to(self.gate_up_bias, device))

    def packed_down(self, device: torch.device) -> ExpertWeights:
        return pack_experts(self.down, device, _to(self.down_bias, device))

    def exact_glu(self, x: torch.Tensor, routing: Routing, activation: Activation = "silu") -> torch.Tensor:
        """[T, k, F] by the definition, fp64."""
        weights = [torch.cat([_values(g), _values(u)]) for g, u in zip(self.gate, self.up, strict=True)]
        return definition.experts_glu(
            x.double(), routing, lambda e, rows: rows @ weights[e].T + _row(self.gate_up_bias, e), activation
        )

    def exact_add(self, gated: torch.Tensor, routing: Routing, residual: torch.Tensor) -> torch.Tensor:
        """[T, N] by the definition, fp64."""
        wide, weights = Routing(routing.experts, routing.weights.double()), [_values(d) for d in self.down]
        return definition.experts_add(
            gated.double(),
            wide,
            lambda e, rows: rows @ weights[e].T + _row(self.down_bias, e),
            residual.double(),
        )


def _values(weight: QuantTensor) -> torch.Tensor:
    return dequantize(weight.format, weight.data).double()


def _row(bias: torch.Tensor | None, expert: int) -> torch.Tensor | float:
    return 0.0 if bias is None else bias[expert].double()


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def routing_of(experts: torch.Tensor, seed: int = 3) -> Routing:
    weights = torch.rand(experts.shape, generator=torch.Generator().manual_seed(seed))
    return Routing(experts, weights / weights.sum(-1, keepdim=True))


def on(routing: Routing, device: torch.device) -> Routing:
    return Routing(routing.experts.to(device), routing.weights.to(device))


def glu_of(
    gate_up: ExpertWeights,
    x: torch.Tensor,
    routing: Routing,
    room: MatmulWorkspace,
    activation: Activation = "silu",
    exact: bool = False,
) -> torch.Tensor:
    """[T, k, F] of `grouped_glu`."""
    gated = grouped_glu(x.to(room.device), on(routing, room.device), gate_up, room, activation, False, exact)
    width = gate_up.expert_rows // 2
    rows = gated.rows.dequantize(-(-width // 128) * 128)[gated.groups.positions.long(), :width]
    return rows.view(*routing.experts.shape, width)


def grouped(gated: torch.Tensor, routing: Routing, count: int, room: MatmulWorkspace) -> GroupedRows:
    """Rows [T, k, F] as `grouped_glu` leaves them; what no pair has is no number."""
    (tokens, used, width), device = gated.shape, room.device
    layout, block = module._layout_and_block(tokens, used, count, room)
    groups = empty_groups(tokens * used, count, block, device)
    number_pairs(routing.experts.to(device), groups)
    rows = to_fp16_operand(gated.to(device).view(tokens * used, width))
    values = torch.full(
        (groups.rows, -(-width // 128) * 128), float("nan"), dtype=torch.float16, device=device
    )
    scale = torch.full((groups.rows,), float("nan"), device=device)
    at = groups.positions.long()
    values[at] = torch.nn.functional.pad(rows.values, (0, -width % 128))
    scale[at] = rows.row_scale
    operand = Fp16Operand(values, scale)
    return GroupedRows(
        operand.as_mma() if layout is OperandLayout.MMA else operand.as_wgmma(), groups, tokens
    )


def add_of(
    down: ExpertWeights,
    gated: torch.Tensor,
    routing: Routing,
    residual: torch.Tensor,
    room: MatmulWorkspace,
    norm: RMSNorm | None = None,
) -> torch.Tensor | RmsNormed:
    """`grouped_add` of rows [T, k, F]."""
    rows, moved = grouped(gated, routing, down.count, room), on(routing, room.device)
    return grouped_add(rows, moved, down, room, residual.to(room.device, copy=True), norm, False, False)
