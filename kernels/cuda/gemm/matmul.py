"""Matmul of more than one row: batched decode and prefill. workspace.py has the table of kernels by number of rows.

Packed weights are dequantized to fp16, either in the registers of the matmul, which reads them packed, or into a
buffer that cuBLAS reads; sums and result are fp32. Both ways round activations and weights to fp16 once, scaled by
powers of two (fp16_operand.py). For up to 128 rows of a batch, unless `exact`, a weight's scale and minimum are
rounded to fp16 too: a third of the instructions, three times the error.

A row's last bits depend on the kernel, and with cuBLAS on the number of rows. A `batch_invariant` workspace avoids
both.
"""

import torch
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    OperandLayout,
    ScaledProduct,
    to_fp16_operand,
    to_wgmma_layout,
)
from quengine.kernels.cuda.gemm.matmul_float import launch_float
from quengine.kernels.cuda.gemm.matmul_fused import MatmulMode, launch_fused
from quengine.kernels.cuda.gemm.matmul_wgmma import (
    SplitRows,
    launch_wgmma,
    launch_wgmma_apart,
    launch_wgmma_glu,
    launch_wgmma_two_parts,
    takes_two_parts,
)
from quengine.kernels.cuda.gemm.workspace import FEW_ROWS, MatmulWorkspace
from quengine.kernels.cuda.glu import glu_product, glu_rows, product_bound
from quengine.kernels.cuda.rms_norm import add_norm_fp16, rms_norm_fp16
from quengine.kernels.cuda.rms_norm_wgmma import launch_norm_wgmma
from quengine.kernels.cuda.weights.dequantize import dequantize_part
from quengine.kernels.cuda.weights.packed import FloatPart, PackedPart, PackedWeight
from quengine.kernels.glu import Gating
from quengine.kernels.rms_norm import RMSNorm

_GLU_PRODUCTS = 1 << 23
"""Products of rows with gate and up weights held at a time: 32 MiB, which fit an L2 cache."""


def matmul_product(
    x: Tensor | Fp16Operand,
    weight: PackedWeight,
    workspace: MatmulWorkspace,
    pdl: bool = False,
    exact: bool = False,
) -> ScaledProduct | Tensor:
    """`matmul`, as a `ScaledProduct` where that saves a pass over the result; many rows then stay in the workspace
    until the next call.
    """
    operand = operand_of(x, weight, workspace, pdl)
    if _dequantizes_at_once(operand, weight, workspace):
        out = workspace.product(operand.rows, weight.rows)
        return _multiply_dequantized(operand, weight, workspace, out)
    if operand.rows <= FEW_ROWS:
        return matmul(operand, weight, workspace, pdl=pdl, exact=exact)
    out = workspace.product(operand.rows, weight.rows)
    y = matmul(operand, weight, workspace, pdl=pdl, exact=exact, out=out)
    if not operand.is_wgmma or workspace.batch_invariant:
        return y  # attention keeps more bits of these rows than fp16 has
    return ScaledProduct(y, workspace.ones(operand.rows), 1.0, scaled=False)


def matmul(
    x: Tensor | Fp16Operand,
    weight: PackedWeight,
    workspace: MatmulWorkspace,
    residual: Tensor | None = None,
    pdl: bool = False,
    exact: bool = False,
    out: Tensor | None = None,
    followed: bool = False,
) -> Tensor:
    """x [T, K] times weight [N, K], plus residual fp32 [T, N] or a bias [N]: fp32 [T, N].

    x is fp32, or an fp16 operand, which may lie in the workspace. out: the result's buffer, used by kernels on packed
    weights only; it may be the residual if T is above 128 and the layout is WGMMA. `exact`, `pdl`: see `MatmulMode`.
    Raises ValueError for other shapes.
    """
    operand = operand_of(x, weight, workspace, pdl)
    if residual is not None and residual.ndim == 1 and not _adds_bias(operand, weight):
        return matmul(operand, weight, workspace, None, pdl, exact, out, followed).add_(residual)
    if _dequantizes_at_once(operand, weight, workspace):
        return _multiply_dequantized(operand, weight, workspace).finish(residual)
    if out is None:
        out = torch.empty(operand.rows, weight.rows, dtype=torch.float32, device=operand.values.device)
    mode, scratch, first = MatmulMode(exact, workspace.batch_invariant, pdl), workspace.scratch, 0
    packed = [part for part in weight.parts if isinstance(part, PackedPart)]
    overlaps = len(packed) == len(weight.parts) > 1
    if overlaps and residual is None and takes_two_parts(operand, packed, workspace.batch_invariant):
        launch_wgmma_two_parts(operand, packed, out, scratch, mode, followed)
        return out
    for part in weight.parts:
        if isinstance(part, PackedPart) and operand.is_wgmma:
            producer, consumer = followed or (overlaps and first == 0), overlaps and first > 0
            launch_wgmma(
                operand, part, weight.paired, out, first, scratch, mode, residual, producer, consumer
            )
        elif isinstance(part, PackedPart) and operand.is_mma:
            launch_fused(operand, part, weight.paired, out, first, scratch, mode, residual)
        elif isinstance(part, FloatPart) and workspace.batch_invariant:
            launch_float(operand, part, out, first, residual, pdl)
        else:
            _dequantize_and_multiply(operand, part, weight.paired, workspace, residual, out, first)
        first += part.rows
    return out


def lets_follow(x: Fp16Operand, weight: PackedWeight) -> bool:
    """Whether `matmul` of x, with PDL and `followed`, lets the next launch run beside it. That launch may read x, and
    whatever was written before x, ahead of its wait."""
    return x.is_wgmma and all(isinstance(part, PackedPart) for part in weight.parts)


def matmul_norm(
    x: Tensor | Fp16Operand,
    weight: PackedWeight,
    workspace: MatmulWorkspace,
    residual: Tensor,
    norm: RMSNorm,
    pdl: bool = False,
    exact: bool = False,
) -> tuple[Tensor, Fp16Operand]:
    """`matmul` with a residual, then RMSNorm: the sum, fp32 [T, N], and its normalised rows as an fp16 operand.

    The sum may overwrite the residual. The operand lies in the workspace until the next one is made there.
    """
    operand = operand_of(x, weight, workspace, pdl)
    rows = operand.rows
    if _dequantizes_at_once(operand, weight, workspace):
        product = _multiply_dequantized(operand, weight, workspace, workspace.product(rows, weight.rows))
        normed = workspace.fp16_operand(rows, weight.rows)
        return residual, add_norm_fp16(product, residual, norm.weight, norm.eps, normed, pdl)
    splits = _rows_of_splits(operand, weight, workspace, pdl, exact)
    if splits is not None:
        normed = workspace.fp16_operand(rows, weight.rows)
        launch_norm_wgmma(residual, norm.weight, norm.eps, normed, pdl, *splits)
        return residual, normed
    in_place = residual if rows > FEW_ROWS and operand.is_wgmma else None
    y = matmul(operand, weight, workspace, residual, pdl, exact, in_place)
    normed = workspace.fp16_operand(rows, weight.rows)
    return y, rms_norm_fp16(y, norm.weight, norm.eps, normed, pdl, workspace.batch_invariant)


def _rows_of_splits(
    x: Fp16Operand, weight: PackedWeight, workspace: MatmulWorkspace, pdl: bool, exact: bool
) -> SplitRows | None:
    """The product as rows of splits, for an unpaired weight of one packed part where Hopper's matmul splits the columns
    of every block; else None."""
    part = weight.parts[0]
    if len(weight.parts) > 1 or weight.paired or not isinstance(part, PackedPart) or not x.is_wgmma:
        return None
    return launch_wgmma_apart(x, part, workspace.scratch, MatmulMode(exact, workspace.batch_invariant, pdl))


def matmul_glu(
    x: Tensor | Fp16Operand,
    gate_up: PackedWeight,
    workspace: MatmulWorkspace,
    activation: Gating = "silu",
    pdl: bool = False,
    exact: bool = False,
) -> Tensor | Fp16Operand:
    """activation(gate) * up of x [T, K] (as in `matmul`) times a merged weight [2F, K]: [T, F], fp32 or an fp16
    operand.

    The operand lies in the workspace until the next call.
    """
    operand = operand_of(x, gate_up, workspace, pdl)
    rows, width, part = operand.rows, gate_up.rows // 2, gate_up.parts[0]
    apart = operand.is_wgmma and width % 128 > 0  # the result's padding columns would not be written
    if apart or not gate_up.paired or not isinstance(part, PackedPart):
        return glu_rows(matmul(operand, gate_up, workspace, pdl=pdl, exact=exact), activation, pdl)
    mode = MatmulMode(exact, workspace.batch_invariant, pdl)
    if operand.is_wgmma:
        result = workspace.glu_operand(rows, width)
        launch_wgmma_glu(operand, part, activation, result, workspace.scratch, mode)
        return result
    if operand.is_mma:
        y = workspace.glu_rows(rows, width)
        launch_fused(operand, part, True, y, 0, workspace.scratch, mode, activation=activation)
        return to_fp16_operand(y, workspace.fp16_operand(rows, width), pdl)
    return _glu_dequantized(operand, part, workspace, activation)


def paired_matmul(
    x: Tensor | Fp16Operand, weight: PackedWeight, workspace: MatmulWorkspace, pdl: bool = False
) -> Tensor:
    """x [T, K] (as in `matmul`) times a paired weight [2F, K], by cuBLAS: fp32 [T, 2F], gate first. It takes some gate
    rows and their up rows at a time."""
    operand, (part,) = operand_of(x, weight, workspace, pdl), weight.parts
    assert weight.paired and isinstance(part, PackedPart)
    width, tiles = weight.rows // 2, max(1, workspace.max_weights // part.cols // 16)
    out = torch.empty(operand.rows, weight.rows, dtype=torch.float32, device=operand.values.device)
    for tile in range(0, part.tiles, tiles):
        count = min(tiles, part.tiles - tile)
        dequantized = workspace.dequantized(16 * count, part.cols)
        dequantize_part(part, True, dequantized, tile, count)
        gate, up = _multiply(operand, dequantized, part.weight_scale).finish().chunk(2, 1)
        out[:, 8 * tile : 8 * tile + gate.shape[1]] = gate
        out[:, width + 8 * tile : width + 8 * tile + up.shape[1]] = up
    return out


def operand_of(
    x: Tensor | Fp16Operand, weight: PackedWeight, workspace: MatmulWorkspace, pdl: bool
) -> Fp16Operand:
    """The rows as an fp16 operand in the matmul's layout, checked against the weight."""
    if weight.change is not None:
        raise ValueError("a change is of one quantized row: matmul does not add it")
    if isinstance(x, Tensor):
        if x.ndim != 2 or x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"matmul takes contiguous fp32 [T, K], not {x.dtype} {list(x.shape)}")
        x = to_fp16_operand(x, workspace.fp16_operand(x.shape[0], x.shape[1]), pdl)
    elif x.layout is OperandLayout.ROW_MAJOR:
        layout = workspace.layout(x.rows)
        if layout is OperandLayout.WGMMA:
            x = to_wgmma_layout(x, workspace.fp16_operand(x.rows, weight.cols).values, pdl)
        elif layout is OperandLayout.MMA:
            x = x.as_mma()
    if not x.fits(weight.cols):
        raise ValueError(f"rows of {list(x.values.shape)} for weights of {weight.cols}")
    return x


def _adds_bias(x: Fp16Operand, weight: PackedWeight) -> bool:
    """Whether the matmul kernel adds a bias: not with two parts, which would then take two launches and be slower."""
    whole = len(weight.parts) == 1 and isinstance(weight.parts[0], PackedPart)
    return whole and not weight.paired and x.layout is not OperandLayout.ROW_MAJOR


def _dequantizes_at_once(x: Fp16Operand, weight: PackedWeight, workspace: MatmulWorkspace) -> bool:
    """Whether these rows go to cuBLAS and the whole weight, with rows in order, fits the workspace."""
    if workspace.layout(x.rows) is not OperandLayout.ROW_MAJOR:
        return False
    packed = all(isinstance(part, PackedPart) for part in weight.parts)
    return packed and not weight.paired and weight.rows * weight.cols <= workspace.max_weights


def _multiply_dequantized(
    x: Fp16Operand, weight: PackedWeight, workspace: MatmulWorkspace, out: Tensor | None = None
) -> ScaledProduct:
    """Rows times the whole weight, with the smallest scale of its parts, so that none exceeds fp16's range."""
    dequantized = workspace.dequantized(weight.rows, weight.cols)
    parts = [part for part in weight.parts if isinstance(part, PackedPart)]
    weight_scale, first = min(part.weight_scale for part in parts), 0
    for part in parts:
        dequantize_part(part, False, dequantized[first : first + part.rows], weight_scale=weight_scale)
        first += part.rows
    return _multiply(x, dequantized, weight_scale, out)


def _glu_dequantized(
    x: Fp16Operand, part: PackedPart, workspace: MatmulWorkspace, activation: Gating
) -> Fp16Operand:
    """activation(gate) * up of x times a paired part, by cuBLAS, as an fp16 operand in the workspace. It takes some
    gate rows and their up rows at a time, which limits the memory of weights and products."""
    out = Fp16Operand(workspace.wide(x.rows, part.rows // 2), workspace.glu_row_scale(x.rows))
    most = max(16, min(workspace.max_weights // part.cols, _GLU_PRODUCTS // x.rows))
    tiles = -(-part.tiles // -(-part.rows // most))
    for tile in range(0, part.tiles, tiles):
        count = min(tiles, part.tiles - tile)
        dequantized = workspace.dequantized(16 * count, part.cols)
        dequantize_part(part, True, dequantized, tile, count)
        z = _multiply(x, dequantized, part.weight_scale, workspace.product(x.rows, 16 * count))
        glu_product(z, activation, product_bound(part), out, 8 * tile)
    return out


def _dequantize_and_multiply(
    x: Fp16Operand,
    part: PackedPart | FloatPart,
    paired: bool,
    workspace: MatmulWorkspace,
    residual: Tensor | None,
    out: Tensor,
    first: int,
) -> None:
    """Stores x times a part, by cuBLAS, to the columns of `out` from `first` on, plus the same columns of `residual`.
    It takes as many weight rows at a time as fit the workspace. Raises ValueError if the workspace is too small."""
    at_a_time = workspace.max_weights // part.cols
    if not paired:
        at_a_time = at_a_time // 16 * 16
    if at_a_time < (part.rows if paired else min(16, part.rows)):
        raise ValueError(f"the workspace dequantizes {workspace.max_weights} weights; rows have {part.cols}")
    for row in range(0, part.rows, at_a_time):
        count = min(at_a_time, part.rows - row)
        dequantized = workspace.dequantized(count, part.cols)
        if isinstance(part, FloatPart):
            dequantized.copy_(part.weight[row : row + count])
        else:
            dequantize_part(part, paired, dequantized, row // 16, -(-count // 16))
        weight_scale = 1.0 if isinstance(part, FloatPart) else part.weight_scale
        columns = slice(first + row, first + row + count)
        added = None if residual is None else residual[:, columns].contiguous()
        out[:, columns] = _multiply(x, dequantized, weight_scale).finish(added)


def _multiply(
    x: Fp16Operand, dequantized: Tensor, weight_scale: float, out: Tensor | None = None
) -> ScaledProduct:
    """Rows [T, K] times weight_scale * weights, fp16 [N, K], with fp32 sums, into `out` if given."""
    rows = x.row_major(dequantized.shape[1])
    if rows.is_cuda:
        values = torch.mm(rows, dequantized.T, out_dtype=torch.float32, out=out)
    else:
        values = torch.mm(rows.float(), dequantized.float().T, out=out)
    return ScaledProduct(values, x.row_scale, weight_scale)
