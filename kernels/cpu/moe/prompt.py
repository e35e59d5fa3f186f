"""The experts in prefill: rows grouped by expert, each group multiplied as in gemm/tile_matmul.py.

A row's result depends on the row and its experts alone, not on the other rows: groups of any size use the same
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.kernels.cpu.gemm.tile_matmul import TileKind, tile_kind
from quengine.kernels.cpu.gemm.tiles import DEPTH, MatmulArguments
from quengine.kernels.cpu.moe.experts import CpuExperts, ExpertPart
from quengine.kernels.cpu.moe.groups import ExpertSlots, GroupedMatmulArguments, PackGroupsArguments
from quengine.kernels.cpu.runtime.kernel_table import grouped_matmul_kernel, pack_groups_kernel
from quengine.kernels.cpu.runtime.scratch import scratch
from quengine.kernels.cpu.runtime.threads import Launch
from quengine.kernels.moe.router import Routing

_TASK_BYTES = (
    512 << 10
)  # of weights: where a task reads them before it multiplies, they fit into the L2 cache


def prompt_expert_launches(
    x: Tensor, routing: Routing, experts: CpuExperts, y: Tensor, by_place: bool = False
) -> tuple[ExpertSlots, list[Launch]]:
    """y fp32 [T * k, sum of N_i], by place: the place's row of x times its expert's matrix of each part, plus the bias.

    Experts that are not here have no places. x: fp32 [T, K], or with `by_place` [T * k, K]. All are contiguous. The
    launches fill the returned groups first.
    """
    rows, used = routing.experts.shape
    by_kind: dict[TileKind, list[tuple[int, ExpertPart]]] = {}
    column = 0
    for part in experts.parts:
        by_kind.setdefault(tile_kind(part.first), []).append((column, part))
        column += part.first.rows
    launches: list[Launch] = []
    for kind, placed in by_kind.items():
        groups = ExpertSlots.empty(rows, used)
        most = max(1, min(rows, kind.most or rows))
        launches.append(groups.launch(routing.experts, experts.held, most, kind.block))
        launches += _grouped_launches(x, kind, placed, groups, most, y, by_place)
    return groups, launches


def _grouped_launches(
    x: Tensor,
    kind: TileKind,
    placed: Sequence[tuple[int, ExpertPart]],
    groups: ExpertSlots,
    most: int,
    y: Tensor,
    by_place: bool,
) -> list[Launch]:
    """`prompt_expert_launches` of parts of one `TileKind`, in groups of at most `most` rows."""
    panels, count = -(-x.shape[1] // DEPTH), len(placed[0][1].matrices)
    most_groups = min(groups.slots, count + groups.slots // most)
    most_blocks = min(groups.slots, most_groups + groups.slots // kind.block)
    panel_bytes = kind.block * kind.row_bytes
    packed = scratch("packed groups", most_blocks, panels * panel_bytes // 4).view(torch.uint8)
    pack = PackGroupsArguments(
        table=groups.table.data_ptr(),
        order=0 if by_place else groups.order.data_ptr(),
        used=groups.used,
        x=x.data_ptr(),
        x_stride=4 * x.stride(0),
        cols=x.shape[1],
        block_rows=kind.block,
        packed=packed.data_ptr(),
        block_bytes=packed.stride(0),
        panel_bytes=panel_bytes,
        kernel=kind.pack_kernel(),
    )
    launches = [Launch(pack_groups_kernel(), pack, most_blocks, keep=(x, groups, packed))]
    for number, (column, part) in enumerate(placed):
        w = part.first
        bias = torch.zeros(1, w.rows) if part.bias is None else part.bias
        kernel, panel, task_strips, _ = kind.product(w, -(-most // kind.block), min(count, groups.slots))
        task_strips = min(task_strips, max(1, _TASK_BYTES // (kind.strip * w.data.shape[1])))
        tasks = -(-w.rows // (task_strips * kind.strip))
        matmul = MatmulArguments(
            *(0, w.data.shape[1], w.rows, w.cols, packed.data_ptr(), 0, 0, 0),
            y=y.data_ptr() + 4 * column,
            y_stride=4 * y.stride(0),
            panel_kernel=panel,
            block_weights=w.format.block,
            block_bytes=w.format.nbytes,
            task_strips=task_strips,
        )
        grouped = GroupedMatmulArguments(
            *(groups.table.data_ptr(), tasks, part.addresses.data_ptr(), bias.data_ptr()),
            bias_stride=0 if part.bias is None else 4 * bias.stride(0),
            block_bytes=packed.stride(0),
            task_rows=task_strips * kind.strip,
            read_first=int(not kind.reads_ahead),
            kernel=kernel,
            matmul=matmul,
        )
        keep = (part, bias, packed, groups, y)
        launches.append(Launch(grouped_matmul_kernel(), grouped, most_groups * tasks, number == 0, keep))
    return launches
