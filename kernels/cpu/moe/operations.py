"""The experts' operations of the CPU backend, outside of a compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cpu.gemv.matmul import quantize_launch
from quengine.kernels.cpu.gemv.quantized_rows import quantized_row_bytes
from quengine.kernels.cpu.moe.experts import (
    CpuExperts,
    ExpertPart,
    add_experts_launch,
    down_launches,
    gate_up_launch,
    spread_launch,
)
from quengine.kernels.cpu.moe.groups import Groups
from quengine.kernels.cpu.moe.prompt import prompt_expert_launches
from quengine.kernels.cpu.ops.glu import glu
from quengine.kernels.cpu.runtime.threads import Launch, run
from quengine.kernels.forward_batch import Phase
from quengine.kernels.glu import Activation
from quengine.kernels.moe.router import Routing
from quengine.kernels.quant_tensor import QuantTensor


@dataclass(frozen=True)
class ExpertRows:
    """What each row's experts make of it, by place: values fp32 [T * k, F], and in decode the same quantized."""

    values: Tensor
    groups: Groups
    records: Tensor | None = None

    def by_slot(self) -> Tensor:
        """[T, k, F], in the order of the routing."""
        return self.values[self.groups.places]

    def of_slots(self, rows: Tensor) -> ExpertRows:
        """The same with other values, rows fp32 [T, k, F] in the order of the routing."""
        values, records = torch.empty_like(self.values), None
        values[self.groups.places] = rows
        if self.records is not None:
            records = torch.empty_like(self.records)
            run([quantize_launch(values, records)])
        return ExpertRows(values, self.groups, records)


def gate_up_experts(
    gate: Sequence[QuantTensor], up: Sequence[QuantTensor], bias: Tensor | None
) -> CpuExperts:
    """The matrices [F, K] of E experts, for `experts_glu`. bias: fp32 [E, 2F], gate first."""
    width = gate[0].rows
    biases = (None, None) if bias is None else (bias[:, :width], bias[:, width:])
    return CpuExperts((ExpertPart.of(gate, biases[0]), ExpertPart.of(up, biases[1])))


def down_experts(down: Sequence[QuantTensor], bias: Tensor | None) -> CpuExperts:
    """The matrices [N, F] of E experts, for `experts_add`. bias: fp32 [E, N]."""
    return CpuExperts((ExpertPart.of(down, bias),))


def experts_glu(
    x: Tensor, routing: Routing, gate_up: CpuExperts, activation: Activation, phase: Phase
) -> ExpertRows:
    """activation(gate) * up of rows x fp32 [T, K] (behind the norm) by each of their experts."""
    _check_width(x, gate_up)
    x, (rows, used), width = x.contiguous(), routing.experts.shape, gate_up.parts[0].first.rows
    between = torch.empty(rows * used, 2 * width)
    if phase == "prefill":
        groups, launches = prompt_expert_launches(x, routing, gate_up.parts, between)
        run(launches)
        return ExpertRows(glu(between, activation), groups)
    repeats = len(set(routing.experts[0].tolist())) < used  # those of other ranks are one here
    groups = Groups.empty(rows, used, repeats)
    launches, sources = _sources(x, gate_up.parts, groups)
    out, records = torch.empty(rows * used, width), None
    if width % 32 == 0:
        records = torch.empty(rows * used, quantized_row_bytes(width), dtype=torch.uint8)
    grouping = groups.launch(routing.experts, len(gate_up.parts[0].matrices))
    product = gate_up_launch(gate_up, groups, sources, between, out, records, activation)
    run([grouping, *launches, product])
    return ExpertRows(out, groups, records)


def experts_add(
    gated: ExpertRows, routing: Routing, down: CpuExperts, residual: Tensor, phase: Phase
) -> Tensor:
    """The weighted sum of each row's experts plus residual fp32 [T, N]."""
    _check_width(gated.values, down)
    (part,) = down.parts
    residual, groups = residual.contiguous(), gated.groups
    y, products = torch.empty_like(residual), torch.empty(groups.slots, part.first.rows)
    if phase == "prefill":
        groups, launches = prompt_expert_launches(gated.values, routing, down.parts, products, by_place=True)
        run([*launches, add_experts_launch(groups, products, routing.weights, residual, y)])
        return y
    source = gated.records if part.first.format.is_quantized else gated.values
    assert source is not None
    run(down_launches(down, groups, source, products, routing.weights, residual, y))
    return y


def _sources(x: Tensor, parts: Sequence[ExpertPart], groups: Groups) -> tuple[list[Launch], list[Tensor]]:
    """What each part is multiplied with, by place, and the kernels that make it of x and the groups."""
    launches: list[Launch] = []
    made: dict[bool, Tensor] = {}
    for quantized in {part.first.format.is_quantized for part in parts}:
        source = x
        if quantized:
            source = torch.empty(x.shape[0], quantized_row_bytes(x.shape[1]), dtype=torch.uint8)
            launches.append(quantize_launch(x, source))
        made[quantized] = source
        if not groups.single_places:
            made[quantized] = torch.empty(groups.slots, source.shape[1], dtype=source.dtype)
            launches.append(spread_launch(source, groups, made[quantized]))
    return launches, [made[part.first.format.is_quantized] for part in parts]


def _check_width(x: Tensor, experts: CpuExperts) -> None:
    for part in experts.parts:
        w = part.first
        if w.cols != x.shape[1]:
            raise ValueError(f"{w.name} has width {w.cols}; the activations have {x.shape[1]}")
