"""The experts of more than one row: rows grouped by expert, two grouped matmuls, and the weighted sum.

There are four launches: the grouping with the copy of the rows (three for many rows; on Hopper the one for few rows
also norms them), gate and up with their activation, down, and the sum with the residual and the next norm. If gate and
up share no tiles (matrices of two formats, plain floats, biases before an activation without a clamp), products are
stored and their gated unit is another launch. gemm/workspace.py has the table of kernels.

Defined in kernels/moe/experts.py. A row's bits do not depend on its block, the other rows or their number, with one
exception: up to FEW_ROWS rows of a batch, unless `exact`, also round a weight's scale and minimum, as in dense matmuls.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    OperandLayout,
    operand_rows,
    operand_shape,
    padded_cols,
    to_fp16_operand,
)
from quengine.kernels.cuda.gemm.matmul_fused import MatmulMode
from quengine.kernels.cuda.gemm.workspace import FEW_ROWS, MatmulWorkspace
from quengine.kernels.cuda.latent.shapes import HeadPlaces
from quengine.kernels.cuda.launch.gpu import is_hopper
from quengine.kernels.cuda.moe.combine import combine_experts, grouped_glu_rows
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.grouped_float import launch_grouped_float
from quengine.kernels.cuda.moe.grouped_mma import launch_grouped_mma
from quengine.kernels.cuda.moe.grouped_program import Blocks, GroupedOutput
from quengine.kernels.cuda.moe.grouped_wgmma import launch_grouped_wgmma
from quengine.kernels.cuda.moe.groups import PairBlocks, group_rows
from quengine.kernels.cuda.rms_norm_grouped import group_normed_rows
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights.launch_table import grouped_block
from quengine.kernels.cuda.weights.packed import FloatPart, PackedPart
from quengine.kernels.glu import Activation, glu_width
from quengine.kernels.moe.grouping import most_blocks
from quengine.kernels.moe.router import Routing
from quengine.kernels.rms_norm import RMSNorm

_MOST_MMA_ROWS = 64
"""Rows per block on m16n8k16, whose sums a warp holds in registers."""

_MOST_NORMED = 256
"""Pairs of a row and an expert up to which norming each pair's row takes less than a launch."""

_MOST_PRODUCTS = 1 << 24
"""Products of gate and up held at a time if no matmul applies their activation: 64 MiB."""


@dataclass(frozen=True)
class GroupedRows:
    """activation(gate) * up of `tokens` rows for each of their experts, in blocks of one expert each. The
    buffers are valid until the next layer.
    """

    rows: Fp16Operand
    groups: PairBlocks
    tokens: int

    def blocks(self, first: int = 0, end: int | None = None, early: bool = False) -> Blocks:
        groups = self.groups
        return Blocks(groups.blocks, groups.block, first, groups.most if end is None else end, early)


def grouped_glu(
    x: Tensor | Fp16Operand,
    routing: Routing,
    gate_up: ExpertWeights,
    workspace: MatmulWorkspace,
    activation: Activation,
    pdl: bool,
    exact: bool,
    norm: RMSNorm | None = None,
) -> GroupedRows:
    """activation(gate) * up of rows x [T, K] for each row's k experts.

    x is fp32, or an fp16 operand in any layout, and is not changed; `norm`: a pending norm of fp32 rows, if
    `norms_in_groups`. `exact`, `pdl`: see `MatmulMode`. Raises ValueError for rows of another width.
    """
    tokens = routing.experts.shape[0]
    if isinstance(x, Tensor) and norm is None:
        x = to_fp16_operand(x.contiguous(), pdl=pdl)
    if not (x.shape[1] == gate_up.cols if isinstance(x, Tensor) else x.fits(gate_up.cols)):
        shape = x.shape if isinstance(x, Tensor) else x.values.shape
        raise ValueError(f"rows of {list(shape)} for experts of {gate_up.cols} columns")
    width = glu_width(gate_up.expert_rows, activation)
    grouped, gated = _buffers(tokens, routing.experts.shape[1], gate_up, width, workspace)
    if isinstance(x, Tensor):
        assert norm is not None
        group_normed_rows(x, norm, routing.experts, gated.groups, grouped, pdl)
    else:
        group_rows(x, gate_up.cols, routing.experts, gated.groups, grouped, pdl)
    mode = _mode(tokens, workspace, pdl, exact)
    clamped = activation == "clamped_swish"
    if gate_up.paired and (gate_up.bias is None or clamped):
        part, out = gate_up.parts[0], gated.rows
        output = GroupedOutput(out.values, 0, gate_up.bias, activation, out.row_scale)
        _multiply_part(grouped, gate_up, part, gated.blocks(), output, mode)
    else:
        _glu_of_products(grouped, gate_up, gated, activation, mode)
    return gated


def norms_in_groups(rows: int, used: int, device: torch.device) -> bool:
    """Whether the launch that groups `rows` rows with `used` experts each also norms them, a row once per expert."""
    return is_hopper(device) and 0 < rows * used <= _MOST_NORMED


def grouped_add(
    gated: GroupedRows,
    routing: Routing,
    down: ExpertWeights,
    workspace: MatmulWorkspace,
    residual: Tensor,
    next_norm: RMSNorm | None,
    pdl: bool,
    exact: bool,
) -> Tensor | RmsNormed:
    """Adds each row's weighted sum of `down` times `gated` over its experts, in ascending order, to residual [T, N],
    contiguous fp32, in place, and returns it; with `next_norm` also the normalised rows, in the workspace.
    """
    mode = _mode(gated.tokens, workspace, pdl, exact)
    products = workspace.of_experts(
        "rows", torch.float32, gated.tokens, (gated.groups.rows, down.expert_rows), 0
    )  # their previous content was read by gate and up
    _multiply(gated.rows, down, gated.blocks(early=True), products, mode)
    normed = None if next_norm is None else workspace.fp16_operand(*residual.shape)
    combine_experts(products, gated.groups, routing.weights, residual, next_norm, normed, pdl)
    return residual if normed is None else RmsNormed(residual, normed)


def head_places(tokens: int, heads: int, workspace: MatmulWorkspace) -> tuple[HeadPlaces, OperandLayout]:
    """The places of the rows of each head, and the layout of operands there, for `head_products`."""
    layout, block = _layout_and_block(tokens, heads, heads, workspace)
    return HeadPlaces(tokens, heads, block), layout


def head_products(
    x: Fp16Operand,
    weights: ExpertWeights,
    places: HeadPlaces,
    of_block: Tensor,
    products: Tensor,
    workspace: MatmulWorkspace,
    pdl: bool,
    exact: bool,
) -> None:
    """Writes to `products`, fp32 [places, N], the rows x at their places times their heads' matrices [N, K]. of_block:
    from `latent_rows`."""
    blocks = Blocks(of_block, places.block, 0, places.blocks, early=False)
    _multiply(x, weights, blocks, products, _mode(places.tokens, workspace, pdl, exact))


def _mode(tokens: int, workspace: MatmulWorkspace, pdl: bool, exact: bool) -> MatmulMode:
    return MatmulMode(exact or tokens > FEW_ROWS, workspace.batch_invariant, pdl)


def _glu_of_products(
    x: Fp16Operand, gate_up: ExpertWeights, gated: GroupedRows, activation: Activation, mode: MatmulMode
) -> None:
    """Writes activation(gate) * up to `gated`, some blocks at a time to limit the memory of products."""
    groups = gated.groups
    places = max(1, _MOST_PRODUCTS // (gate_up.expert_rows * groups.block))
    for first in range(0, groups.most, places):
        blocks = gated.blocks(first, min(first + places, groups.most))
        rows = (blocks.end - first) * groups.block
        products = torch.empty(rows, gate_up.expert_rows, dtype=torch.float32, device=x.values.device)
        of_x, of_gated = (_from_place(operand, first * groups.block) for operand in (x, gated.rows))
        _multiply(of_x, gate_up, blocks, products, mode)
        grouped_glu_rows(products, blocks, of_gated, activation, mode.pdl)


def _multiply(
    x: Fp16Operand, weights: ExpertWeights, blocks: Blocks, products: Tensor, mode: MatmulMode
) -> None:
    """Rows in blocks times their experts' matrices, fp32, with biases."""
    for number, part in enumerate(weights.parts):
        output = GroupedOutput(products, number * weights.part_rows, weights.bias)
        _multiply_part(x, weights, part, blocks, output, mode)


def _multiply_part(
    x: Fp16Operand,
    weights: ExpertWeights,
    part: PackedPart | FloatPart,
    blocks: Blocks,
    output: GroupedOutput,
    mode: MatmulMode,
) -> None:
    if isinstance(part, FloatPart):
        launch_grouped_float(x, weights, part, blocks, output, mode.pdl)
    elif x.is_wgmma:
        launch_grouped_wgmma(x, weights, part, blocks, output, mode)
    else:
        launch_grouped_mma(x, weights, part, blocks, output, mode)


def _from_place(x: Fp16Operand, place: int) -> Fp16Operand:
    """The part of an operand that begins at row `place`, a multiple of 8."""
    first = place // 8 if x.is_mma else place
    return Fp16Operand(x.values[first:], x.row_scale[place:], x.layout)


@dataclass(frozen=True)
class _Places:
    """The grouping of a step's rows: layout, rows per block, and the most places. reserved: places that
    buffers are allocated for.
    """

    layout: OperandLayout
    block: int
    most: int
    reserved: int


def _places(tokens: int, used: int, weights: ExpertWeights, workspace: MatmulWorkspace) -> _Places:
    among, count = weights.among, weights.count
    layout, block = _layout_and_block(tokens, used, among, workspace)
    most = most_blocks(tokens * used, count, block) * block
    if tokens > FEW_ROWS:
        return _Places(layout, block, most, most)
    of_few = (_layout_and_block(rows, used, among, workspace)[1] for rows in range(1, FEW_ROWS + 1))
    reserved = [most_blocks(rows * used, count, b) * b for rows, b in enumerate(of_few, 1)]
    return _Places(layout, block, most, operand_rows(max(reserved)))


def _layout_and_block(
    tokens: int, used: int, experts: int, workspace: MatmulWorkspace
) -> tuple[OperandLayout, int]:
    """The layout and the rows of a block for rows with `used` slots each, spread over `experts` experts."""
    block = grouped_block(tokens * used, experts)
    if is_hopper(workspace.device):
        return OperandLayout.WGMMA, block
    return OperandLayout.MMA, min(block, _MOST_MMA_ROWS)


def _buffers(
    tokens: int, used: int, gate_up: ExpertWeights, width: int, workspace: MatmulWorkspace
) -> tuple[Fp16Operand, GroupedRows]:
    """The buffers of the grouped rows, and of gate and up's results of `width` columns."""
    places = _places(tokens, used, gate_up, workspace)
    blocks, reserved = places.most // places.block, places.reserved

    def take(name: str, dtype: torch.dtype, *shape: int, least: int) -> Tensor:
        return workspace.of_experts(name, dtype, tokens, shape, least)

    def operand(name: str, cols: int, least: int) -> Fp16Operand:
        padded = padded_cols(cols)
        shape = operand_shape(places.most, padded, places.layout)
        values = take(name, torch.float16, *shape, least=least * padded * reserved)
        scale = take(f"{name}' scales", torch.float32, places.most, least=4 * reserved)
        return Fp16Operand(values, scale, places.layout)

    groups = PairBlocks(
        take("blocks", torch.int32, 1 + blocks, least=4 + reserved // 2),
        take("positions", torch.int32, tokens * used, least=4 * used * FEW_ROWS),
        places.block,
        gate_up.count,
        gate_up.share,
    )
    # down's products, fp32 of the same width, reuse the rows' memory.
    rows, gated = operand("rows", gate_up.cols, 4), operand("gated", width, 2)
    return rows, GroupedRows(gated, groups, tokens)
