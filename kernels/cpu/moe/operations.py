"""The expert operations of the CPU backend outside a compiled step."""

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
    """The gated outputs of each row's experts, by place: values fp32 [T * k, F], in decode also quantized."""

    values: Tensor
    groups: Groups
    records: Tensor | None = None

    def by_slot(self) -> Tensor:
        """The values [T, k, F], in the order of the routing."""
        return self.values[self.groups.places]

    def of_slots(self, rows: Tensor) -> ExpertRows:
        """The same places with other values: rows fp32 [T, k, F], in the order of the routing."""
        values, records = torch.empty_like(self.values), None
        values[self.groups.places] = rows
        if self.records is not None:
            records = torch.empty_like(self.records)
            run([quantize_launch(values, records)])
        return ExpertRows(values, self.groups, records)


def gate_up_experts(
    gate: Sequence[QuantTensor] | None, up: Sequence[QuantTensor], bias: Tensor | None
) -> CpuExperts:
    """The gate and up matrices [F, K] of E experts, for `experts_glu`. bias: fp32 [E, 2F], gate first. gate None: they
    have none, and no bias."""
    if gate is None:
        assert bias is None
        return CpuExperts((ExpertPart.of(up, None),))
    width = gate[0].rows
    biases = (None, None) if bias is None else (bias[:, :width], bias[:, width:])
    return CpuExperts((ExpertPart.of(gate, biases[0]), ExpertPart.of(up, biases[1])))


def down_experts(down: Sequence[QuantTensor], bias: Tensor | None) -> CpuExperts:
    """The down matrices [N, F] of E experts, for `experts_add`. bias: fp32 [E, N]."""
    return CpuExperts((ExpertPart.of(down, bias),))


def experts_glu(
    x: Tensor, routing: Routing, gate_up: CpuExperts, activation: Activation, phase: Phase
) -> ExpertRows:
    """activation(gate) * up of each row's experts. x: fp32 [T, K], normalised.

    Raises ValueError for another width.
    """
    _check_width(x, gate_up)
    x, (rows, used), width = x.contiguous(), routing.experts.shape, gate_up.parts[0].first.rows
    between = torch.empty(rows * used, len(gate_up.parts) * width)
    if phase == "prefill":
        groups, launches = prompt_expert_launches(x, routing, gate_up.parts, between)
        run(launches)
        return ExpertRows(glu(between, activation), groups)
    repeats = len(set(routing.experts[0].tolist())) < used  # experts of other ranks share one index
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
    gated: ExpertRows, routing: Routing, down: CpuExperts, residual: Tensor | None, phase: Phase
) -> Tensor:
    """The weighted sum of each row's experts plus residual, if any: fp32 [T, N].

    Raises ValueError if the gated values are not as wide as the weights.
    """
    _check_width(gated.values, down)
    (part,) = down.parts
    if residual is None:
        residual = torch.zeros(len(routing.experts), part.first.rows)
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
    """The kernels that turn x into each part's input by place, and those inputs."""
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
