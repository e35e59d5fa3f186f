"""Expert weights, the experts' results, and the expert operations on chunks of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cpu.gemv.matmul import check_width, quantize_launch
from quengine.kernels.cpu.moe.experts import (
    CpuExperts,
    ExpertPart,
    add_experts_launch,
)
from quengine.kernels.cpu.moe.groups import ExpertSlots
from quengine.kernels.cpu.moe.prompt import prompt_expert_launches
from quengine.kernels.cpu.ops.glu import glu
from quengine.kernels.cpu.runtime.scratch import scratch
from quengine.kernels.cpu.runtime.threads import run
from quengine.kernels.glu import Activation
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.router import Routing
from quengine.kernels.quant_tensor import QuantTensor


@dataclass(frozen=True)
class ExpertRows:
    """The gated outputs of each row's experts, by place: values fp32 [T * k, F], in decode also quantized."""

    values: Tensor
    groups: ExpertSlots
    records: Tensor | None = None

    def by_slot(self) -> Tensor:
        """The values [T, k, F], in the order of the routing; zeros for experts that are not here."""
        absent = self.values.new_zeros(1, self.values.shape[1])
        return torch.cat([self.values, absent])[self.groups.places]

    def of_slots(self, rows: Tensor) -> ExpertRows:
        """The same places with other values: rows fp32 [T, k, F], in the order of the routing."""
        values, records = torch.empty_like(self.values), None
        here = self.groups.places >= 0
        values[self.groups.places[here]] = rows[here]
        if self.records is not None:
            records = torch.empty_like(self.records)
            run([quantize_launch(values, records)])
        return ExpertRows(values, self.groups, records)


def gate_up_experts(
    gate: Sequence[QuantTensor] | None,
    up: Sequence[QuantTensor],
    bias: Tensor | None,
    share: ExpertShare | None = None,
) -> CpuExperts:
    """The gate and up matrices [F, K] of E experts, for `experts_glu`. bias: fp32 [E, 2F], gate first. gate None: the
    experts have neither gate nor bias. share: see `Backend.gate_up_experts`."""
    first = 0 if share is None else share.first
    if gate is None:
        assert bias is None
        return CpuExperts((ExpertPart.of(up, None),), first)
    width = gate[0].rows
    biases = (None, None) if bias is None else (bias[:, :width], bias[:, width:])
    return CpuExperts((ExpertPart.of(gate, biases[0]), ExpertPart.of(up, biases[1])), first)


def down_experts(
    down: Sequence[QuantTensor], bias: Tensor | None, share: ExpertShare | None = None
) -> CpuExperts:
    """The down matrices [N, F] of E experts, for `experts_add`. bias: fp32 [E, N]."""
    return CpuExperts((ExpertPart.of(down, bias),), 0 if share is None else share.first)


def prompt_experts_glu(
    x: Tensor, routing: Routing, gate_up: CpuExperts, activation: Activation
) -> ExpertRows:
    """activation(gate) * up of each row's experts, of chunks of prompts. x: fp32 [T, K], normalised.

    Raises ValueError for another width.
    """
    _check_width(x, gate_up)
    (rows, used), width = routing.experts.shape, gate_up.parts[0].first.rows
    between = scratch("gate and up", rows * used, len(gate_up.parts) * width)
    groups, launches = prompt_expert_launches(x.contiguous(), routing, gate_up, between)
    run(launches)
    return ExpertRows(glu(between, activation), groups)


def prompt_experts_add(
    gated: ExpertRows, routing: Routing, down: CpuExperts, residual: Tensor | None
) -> Tensor:
    """The weighted sum of each row's experts plus residual, if any, of chunks of prompts: fp32 [T, N].

    Raises ValueError if the gated values are not as wide as the weights.
    """
    _check_width(gated.values, down)
    (part,) = down.parts
    if residual is None:
        residual = torch.zeros(len(routing.experts), part.first.rows)
    residual, groups = residual.contiguous(), gated.groups
    y, products = torch.empty_like(residual), scratch("experts' products", groups.slots, part.first.rows)
    groups, launches = prompt_expert_launches(gated.values, routing, down, products, by_place=True)
    run([*launches, add_experts_launch(groups, products, routing.weights, residual, y)])
    return y


def _check_width(x: Tensor, experts: CpuExperts) -> None:
    for part in experts.parts:
        check_width(x, part.first)
