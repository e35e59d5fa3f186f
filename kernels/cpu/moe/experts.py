"""The experts of a decode step: q-dot on weights as stored, each expert found through the router's output.

A task is a run of one expert's outputs for all rows routed to it, so that its weights are read once. A row's result
does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cpu.gemv.matmul import task_rows
from quengine.kernels.cpu.moe.groups import ExpertSlots, SpreadArguments
from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import (
    add_experts_kernel,
    add_kernel,
    down_add_kernel,
    down_kernel,
    float_matvec_kernel,
    gate_up_kernel,
    glu_kernel,
    matvec_kernel,
    spread_kernel,
)
from quengine.kernels.cpu.runtime.threads import Launch, get_threads
from quengine.kernels.glu import GATELESS, Activation
from quengine.kernels.quant_tensor import QuantTensor

_SHARES = 8  # tasks per thread, if the matrices have enough rows


@dataclass(frozen=True)
class ExpertPart:
    """One matrix [N, K] of each of E experts, all of one format, where it lies in memory.

    addresses: int64 [E]. bias: fp32 [E, N], with any stride between experts.
    """

    matrices: tuple[QuantTensor, ...]
    addresses: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, matrices: Sequence[QuantTensor], bias: Tensor | None) -> ExpertPart:
        first = matrices[0]
        for w in matrices:
            if w.format != first.format or w.shape != first.shape:
                raise ValueError(
                    f"{w.name} is {w.format.name} {list(w.shape)}; the first expert's matrix "
                    f"{first.name} is {first.format.name} {list(first.shape)}"
                )
        return cls(tuple(matrices), torch.tensor([w.data.data_ptr() for w in matrices]), bias)

    @property
    def first(self) -> QuantTensor:
        return self.matrices[0]

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.matrices)


@dataclass(frozen=True)
class CpuExperts:
    """The gate and up matrices, or the down matrices, of a layer's experts, or of those from number `first` on."""

    parts: tuple[ExpertPart, ...]
    first: int = 0

    @property
    def held(self) -> range:
        """Their numbers in a routing."""
        return range(self.first, self.first + len(self.parts[0].matrices))

    @property
    def rows(self) -> int:
        return sum(part.first.rows * len(part.matrices) for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].first.cols

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass
class ExpertMatrices(Arguments):
    """The matrices of all experts, and the rows by place that they are multiplied with.

    length, x, x_stride: as in `MatvecArguments`. bias: address of the first expert's, or 0.
    """

    addresses: int
    row_bytes: int
    rows: int
    length: int
    x: int
    x_stride: int
    bias: int
    bias_stride: int
    one_kernel: int
    many_kernel: int
    add_kernel: int


@dataclass
class GateUpArguments(Arguments):
    """gate_up: fp32 [places, 2F], without a gate [places, F]; out: fp32 [places, F]; records: quantized activations, or
    0."""

    table: int
    blocks: int
    task_rows: int
    gate: ExpertMatrices
    up: ExpertMatrices
    gate_up: int
    out: int
    records: int
    record_stride: int
    glu_kernel: int


@dataclass
class DownArguments(Arguments):
    """products: fp32 [places, N]."""

    table: int
    blocks: int
    task_rows: int
    down: ExpertMatrices
    products: int


@dataclass
class AddExpertsArguments(Arguments):
    """products: fp32 [places, cols]. places: int64 [T, used]; weights: fp32 [T, used]. residual, y: fp32 [T, cols]."""

    products: int
    places: int
    weights: int
    used: int
    cols: int
    residual: int
    y: int


@dataclass
class DownAddArguments(Arguments):
    """For a single row: the products of its experts, and their weighted sum."""

    down: DownArguments
    add: AddExpertsArguments


def spread_launch(rows: Tensor, groups: ExpertSlots, out: Tensor) -> Launch:
    """Copies rows [T, width] to their places: out [T * k, width], both contiguous. A task is a row."""
    row_bytes = rows.shape[1] * rows.element_size()
    arguments = SpreadArguments(
        rows.data_ptr(), row_bytes, groups.places.data_ptr(), groups.used, out.data_ptr()
    )
    return Launch(spread_kernel(), arguments, rows.shape[0], keep=(rows, groups, out))


def gate_up_launch(
    experts: CpuExperts,
    groups: ExpertSlots,
    sources: Sequence[Tensor],
    between: Tensor,
    out: Tensor,
    records: Tensor | None,
    activation: Activation,
) -> Launch:
    """activation(gate) * up of each slot: out fp32 [T * k, F], by place.

    sources: the inputs of gate and of up (see `matvec_launch`), one row per place, or a single row for all. between:
    fp32 [T * k, 2F]; of experts without a gate there is one source, and [T * k, F]. With `records`, uint8 [T * k,
    quantized_row_bytes(F)], the result is quantized into it as well; F must be a multiple of 32. All are contiguous.
    """
    gate, up = experts.parts[0], experts.parts[-1]  # the same one without a gate
    parts, width = len(experts.parts), up.first.rows
    assert (records is None or width % 32 == 0) and (activation in GATELESS) == (parts == 1)
    step = _step(width, task_rows(up.first) // parts, groups.slots, unit=32)
    arguments = GateUpArguments(
        table=groups.table.data_ptr(),
        blocks=-(-width // step),
        task_rows=step,
        gate=_matrices(gate, sources[0], groups),
        up=_matrices(up, sources[-1], groups),
        gate_up=between.data_ptr(),
        out=out.data_ptr(),
        records=0 if records is None else records.data_ptr(),
        record_stride=0 if records is None else records.stride(0),
        glu_kernel=glu_kernel(activation),
    )
    keep = (experts, groups, sources, between, out, records)
    return Launch(
        gate_up_kernel(parts == 2), arguments, _most_groups(up, groups) * arguments.blocks, keep=keep
    )


def down_launches(
    experts: CpuExperts,
    groups: ExpertSlots,
    source: Tensor,
    products: Tensor,
    weights: Tensor,
    residual: Tensor,
    y: Tensor,
) -> list[Launch]:
    """Consecutive kernels: y fp32 [T, N] = the weighted sum of each row's experts, plus residual fp32 [T, N].

    source: the input of each place; products: fp32 [T * k, N]; weights: fp32 [T, k]; all contiguous. For several rows
    the last kernel has one task per row; a single row takes one kernel.
    """
    (part,) = experts.parts
    single, width = residual.shape[0] == 1, part.first.rows
    step = _step(width, task_rows(part.first), 1 if single else groups.slots, unit=16)
    down = DownArguments(
        table=groups.table.data_ptr(),
        blocks=-(-width // step),
        task_rows=step,
        down=_matrices(part, source, groups),
        products=products.data_ptr(),
    )
    add = add_experts_launch(groups, products, weights, residual, y)
    keep = (experts, source, *add.keep)
    if single:
        assert isinstance(add.arguments, AddExpertsArguments)
        return [Launch(down_add_kernel(), DownAddArguments(down, add.arguments), down.blocks, keep=keep)]
    return [Launch(down_kernel(), down, _most_groups(part, groups) * down.blocks, keep=keep), add]


def add_experts_launch(
    groups: ExpertSlots, products: Tensor, weights: Tensor, residual: Tensor, y: Tensor
) -> Launch:
    """y fp32 [T, N] = the weighted sum of each row's products, fp32 [T * k, N] by place, plus residual.

    A task is a row.
    """
    assert weights.is_contiguous() and residual.is_contiguous() and y.is_contiguous()
    arguments = AddExpertsArguments(
        products=products.data_ptr(),
        places=groups.places.data_ptr(),
        weights=weights.data_ptr(),
        used=groups.used,
        cols=y.shape[1],
        residual=residual.data_ptr(),
        y=y.data_ptr(),
    )
    return Launch(add_experts_kernel(), arguments, y.shape[0], keep=(groups, products, weights, residual, y))


def _matrices(part: ExpertPart, source: Tensor, groups: ExpertSlots) -> ExpertMatrices:
    w, bias = part.first, part.bias
    if w.format.is_quantized:
        one, length = matvec_kernel(w.format.name, False), w.cols // w.format.block
        many = one if groups.single_places else matvec_kernel(w.format.name, True)
    else:
        one = many = float_matvec_kernel(w.format.name)
        length = w.cols
    assert bias is None or bias.stride(1) == 1
    return ExpertMatrices(
        *(part.addresses.data_ptr(), w.data.shape[1], w.rows, length, source.data_ptr()),
        x_stride=source.stride(0) * source.element_size() if source.shape[0] > 1 else 0,
        bias=0 if bias is None else bias.data_ptr(),
        bias_stride=0 if bias is None else 4 * bias.stride(0),
        one_kernel=one,
        many_kernel=many,
        add_kernel=add_kernel(),
    )


def _most_groups(part: ExpertPart, groups: ExpertSlots) -> int:
    return min(len(part.matrices), groups.slots)


def _step(rows: int, most: int, matrices: int, unit: int) -> int:
    """Rows per task, a multiple of `unit` and at most about `most`, for `matrices` matrices of `rows` rows."""
    fair = -(-rows * matrices // (_SHARES * get_threads()))
    tasks = -(-rows // max(unit, min(most, fair)))
    return -(-rows // (tasks * unit)) * unit
