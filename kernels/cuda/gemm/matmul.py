"""Matrix times more than one row, on packed weights: batched decode and prefill.

Two ways, by the number of rows (launch_table.py keeps the measured crossover):
- fused (matmul_wgmma.py on Hopper, else matmul_fused.py): weights are dequantized to fp16 in registers, read packed
  and never written;
- dequantize to a reused fp16 workspace (expand.py), then cuBLAS with fp32 sums and an fp32 result.
Both round activations and weights to fp16 once, scaled by powers of two (half.py). Up to 128 rows that are not
`exact`, those of a batch, take the fused way with a weight's scale and minimum rounded too: a third of the
instructions, three times the error.

A row's last bits depend on the way, and with cuBLAS on the number of rows. Where that must not be, the workspace is
`fixed`: every number of rows, one too, goes the fused way, in launches whose sums have an order that follows from the
weight alone; plain floats through matmul_float.py.
Does not know: models, or where rows come from.
"""

import math

import torch
from torch import Tensor

from quengine.kernels.backend import Activation
from quengine.kernels.cuda.gemm.half import Form, HalfRows, Products, half_rows, half_shape, order_rows
from quengine.kernels.cuda.gemm.matmul_float import launch_float
from quengine.kernels.cuda.gemm.matmul_fused import FusedScratch, launch_fused
from quengine.kernels.cuda.gemm.matmul_wgmma import (
    launch_wgmma,
    launch_wgmma_glu,
    launch_wgmma_two_parts,
    takes_two_parts,
    uses_wgmma,
)
from quengine.kernels.cuda.glu import glu_products, glu_rows, reach_of
from quengine.kernels.cuda.rms_norm import finish_norm_half, rms_norm_half
from quengine.kernels.cuda.weights.expand import dequantize_part
from quengine.kernels.cuda.weights.launch_table import fused_limit
from quengine.kernels.cuda.weights.packed import FloatPart, PackedPart, PackedWeight

_FEW_ROWS = 128
_MOST_VIEWS = 64
_PRODUCTS = 1 << 23
"""Products of rows with gate and up weights held at a time: 32 MiB, which an L2 cache holds."""


class MatmulWorkspace:
    """Memory that every `matmul` of one stream reuses: fp16 weights, expanding up to `max_weights` at a time, taken
    when some are first expanded, and room for rows that grows with the longest chunk met. Few rows have room of their
    own: CUDA graphs of batched decode keep its addresses, whatever chunk comes between them. Those of prompts are of
    use until `rooms_left`, how often room for many rows was let go of for more, counts on.

    `fixed`: weights are rounded once, and a row's result is the same, to the last bit, for any number of rows; nothing
    is expanded.
    `packed`: some weights are; where all are plain floats, many rows are left in the order in which cuBLAS reads them.
    """

    def __init__(
        self, max_weights: int, device: torch.device | str, fixed: bool = False, packed: bool = True
    ) -> None:
        self.fixed = fixed
        self.packed = packed
        self.max_weights = 0 if fixed else max_weights
        self.device = torch.device(device)
        self._weights: Tensor | None = None
        self.scratch = FusedScratch(device)
        self._room: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.rooms_left = 0
        self._few_ones = torch.ones(_FEW_ROWS, dtype=torch.float32, device=device)
        self._ones = self._few_ones

    def form(self, rows: int, cols: int) -> Form:
        """How half rows lie for the fused way on this device; row-major where that is not taken."""
        wgmma = uses_wgmma(self.device, cols)
        limit = fused_limit(wgmma) if self.packed else min(fused_limit(wgmma), _FEW_ROWS)
        if not self.fixed and rows > limit:
            return Form.ROW_MAJOR
        return Form.ORDERED if wgmma else Form.TILED

    def half_rows(self, rows: int, cols: int) -> HalfRows:
        """Scaled fp16 rows, tiled or ordered where the fused way is taken; one set at a time is in use."""
        form = self.form(rows, cols)
        values = self._take("rows", torch.float16, rows, *half_shape(rows, cols, form))
        return HalfRows(values, self.unscale(rows), form)

    def unscale(self, rows: int) -> Tensor:
        return self._take("unscale", torch.float32, rows, rows)

    def gated(self, rows: int, width: int) -> Tensor:
        """fp32 rows of SwiGLU."""
        return self._take("gated", torch.float32, rows, rows, width)

    def gated_half(self, rows: int, width: int) -> HalfRows:
        """Ordered rows of SwiGLU."""
        values = self._take("gated half", torch.float16, rows, *half_shape(rows, width, Form.ORDERED))
        return HalfRows(values, self.gated_unscale(rows), Form.ORDERED)

    def gated_unscale(self, rows: int) -> Tensor:
        return self._take("gated unscale", torch.float32, rows, rows)

    def wide(self, rows: int, width: int) -> Tensor:
        """fp16 [rows, width], contiguous: queries and what attention makes of them; later in a layer, SwiGLU's rows.
        None of them outlives the matmul that reads it."""
        return self._take("wide", torch.float16, rows, rows, width)

    def products(self, rows: int, width: int) -> Tensor:
        """fp32 [rows, width], contiguous: products that the next launch reads."""
        return self._take("products", torch.float32, rows, rows, width)

    def as_they_are(self, values: Tensor, rows: int, form: Form = Form.ROW_MAJOR) -> HalfRows:
        """`rows` fp16 rows that need no scale."""
        return HalfRows(values, self.ones(rows), form)

    def ones(self, rows: int) -> Tensor:
        """The unscale of rows that have none."""
        if self._ones.shape[0] < rows:
            self.rooms_left += 1
            self._ones = torch.ones(rows, dtype=torch.float32, device=self.device)
        return (self._few_ones if rows <= _FEW_ROWS else self._ones)[:rows]

    def expanded(self, rows: int, cols: int) -> Tensor:
        """Where weights are expanded to: fp16 [rows, cols]."""
        view = self._views.get(("weights", (rows, cols)))
        if view is not None:
            return view
        if self._weights is None:
            self._weights = torch.empty(self.max_weights, dtype=torch.float16, device=self.device)
        return self._seen("weights", self._weights, (rows, cols))

    @property
    def nbytes(self) -> int:
        """Of all that is held for rows and weights."""
        held = [*self._room.values(), *([] if self._weights is None else [self._weights])]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def _take(self, name: str, dtype: torch.dtype, rows: int, *shape: int) -> Tensor:
        view = self._views.get((name, shape))
        if view is not None:
            return view
        size = math.prod(shape)
        place = f"few {name}" if rows <= _FEW_ROWS else name
        held = self._room.get(place)
        if held is None or held.numel() < size:
            self._views.clear()
            self.rooms_left += rows > _FEW_ROWS and place in self._room
            self._room.pop(place, None)  # free the smaller one first
            del held
            if self.device.type == "cuda" and rows > _FEW_ROWS:
                torch.cuda.empty_cache()  # nothing else is of its size: kept, it would only take room
            wanted = _FEW_ROWS * -(-size // rows) if rows <= _FEW_ROWS else size
            held = self._room[place] = torch.empty(wanted, dtype=dtype, device=self.device)
        return self._seen(name, held, shape)

    def _seen(self, name: str, held: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The beginning of some memory in a shape, made once for all layers: it takes the host some microseconds."""
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        view = self._views[name, shape] = held[: math.prod(shape)].view(shape)
        return view


def matmul_products(
    x: Tensor | HalfRows,
    weight: PackedWeight,
    workspace: MatmulWorkspace,
    pdl: bool = False,
    exact: bool = False,
) -> Products | Tensor:
    """`matmul`, left unscaled where that saves a pass. Many rows then lie in the workspace, until the next ones."""
    half = _halved(x, weight, workspace, pdl)
    if _expands_at_once(half, weight, workspace):
        return _multiply_all(half, weight, workspace, workspace.products(half.rows, weight.rows))
    if half.rows <= _FEW_ROWS:
        return matmul(half, weight, workspace, pdl=pdl, exact=exact)
    out = workspace.products(half.rows, weight.rows)
    y = matmul(half, weight, workspace, pdl=pdl, exact=exact, out=out)
    # As products, they are told from rows of which attention is to keep more bits than fp16's.
    return Products(y, workspace.ones(half.rows), 1.0) if half.ordered and not workspace.fixed else y


def matmul(
    x: Tensor | HalfRows,
    weight: PackedWeight,
    workspace: MatmulWorkspace,
    residual: Tensor | None = None,
    pdl: bool = False,
    exact: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, K] times weight [N, K], plus residual fp32 [T, N]: fp32 [T, N], where there is room for it in `out`, which
    may be the residual where T is more than 128 and x ordered.

    x is fp32, or already scaled fp16, which may lie in the workspace. `exact`: the weights of few rows are rounded to
    fp16 once, as those of many are, not their scales and minimums before. `pdl`: kernels of this project are launched
    before their predecessor in the stream ends (sm_90 and later; it must not write the weights). Raises ValueError on
    other shapes.
    """
    half = _halved(x, weight, workspace, pdl)
    rows = half.rows
    if _expands_at_once(half, weight, workspace):
        return _multiply_all(half, weight, workspace).finish(residual)
    if out is None:
        out = torch.empty(rows, weight.rows, dtype=torch.float32, device=half.values.device)
    y, first = out, 0
    packed = [part for part in weight.parts if isinstance(part, PackedPart)]
    beside = len(packed) == len(weight.parts) > 1
    if beside and residual is None and takes_two_parts(half, packed, workspace.fixed):
        launch_wgmma_two_parts(half, packed, y, workspace.scratch, pdl, exact)
        return y
    for part in weight.parts:
        if isinstance(part, PackedPart) and half.ordered:
            before, behind = beside and first == 0, beside and first > 0
            launch_wgmma(
                half, part, weight.paired, y, first, workspace.scratch, residual, pdl, before, behind,
                exact, workspace.fixed,
            )  # fmt: skip
        elif isinstance(part, PackedPart) and half.tiled:
            launch_fused(
                half, part, weight.paired, y, first, workspace.scratch, residual, pdl=pdl, exact=exact,
                fixed=workspace.fixed,
            )  # fmt: skip
        elif isinstance(part, FloatPart) and workspace.fixed:
            launch_float(half, part, y, first, residual, pdl)
        else:
            _expand_and_multiply(half, part, weight.paired, workspace, residual, y, first)
        first += part.rows
    return y


def matmul_norm(
    x: Tensor | HalfRows,
    weight: PackedWeight,
    workspace: MatmulWorkspace,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    pdl: bool = False,
    exact: bool = False,
) -> tuple[Tensor, HalfRows]:
    """`matmul` with a residual, and the RMSNorm behind it: fp32 [T, N], and its normed rows as scaled fp16.

    The former may be written over the residual. The latter lie in the workspace, until the next rows that are made
    there. `norm`: fp32 [N].
    """
    half = _halved(x, weight, workspace, pdl)
    rows = half.rows
    if _expands_at_once(half, weight, workspace):
        products = _multiply_all(half, weight, workspace, workspace.products(rows, weight.rows))
        room = workspace.half_rows(rows, weight.rows)
        return residual, finish_norm_half(products, residual, norm, eps, room, pdl)
    in_place = rows > _FEW_ROWS and half.ordered
    y = matmul(half, weight, workspace, residual, pdl, exact, residual if in_place else None)
    return y, rms_norm_half(y, norm, eps, workspace.half_rows(rows, weight.rows), pdl, workspace.fixed)


def _halved(x: Tensor | HalfRows, weight: PackedWeight, workspace: MatmulWorkspace, pdl: bool) -> HalfRows:
    """The rows as scaled fp16, checked against the weight."""
    if isinstance(x, Tensor):
        if x.ndim != 2 or x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"matmul takes contiguous fp32 [T, K], not {x.dtype} {list(x.shape)}")
        x = half_rows(x, workspace.half_rows(x.shape[0], x.shape[1]), pdl)
    elif x.form is Form.ROW_MAJOR:
        form = workspace.form(x.rows, weight.cols)
        if form is Form.ORDERED:
            x = order_rows(x, workspace.half_rows(x.rows, weight.cols).values, pdl)
        elif form is Form.TILED:
            x = x.as_tiled()
    if not x.fits(weight.cols):
        raise ValueError(f"rows of {list(x.values.shape)} for weights of {weight.cols}")
    return x


def matmul_glu(
    x: Tensor | HalfRows,
    gate_up: PackedWeight,
    workspace: MatmulWorkspace,
    activation: Activation = "silu",
    pdl: bool = False,
    exact: bool = False,
) -> Tensor | HalfRows:
    """activation(gate) * up of x [T, K] (as `matmul`'s) times a merged weight [2F, K]: [T, F], fp32 or scaled fp16.

    The latter lies in the workspace, until the next call.
    """
    half = _halved(x, gate_up, workspace, pdl)
    rows, part = half.rows, gate_up.parts[0]
    apart = half.ordered and not uses_wgmma(half.values.device, gate_up.rows // 2)
    if apart or not gate_up.paired or not isinstance(part, PackedPart):
        return glu_rows(matmul(half, gate_up, workspace, pdl=pdl, exact=exact), activation, pdl)
    if half.ordered:
        gated = workspace.gated_half(rows, gate_up.rows // 2)
        launch_wgmma_glu(half, part, activation, gated, workspace.scratch, pdl, exact, workspace.fixed)
        return gated
    if half.tiled:
        products = workspace.gated(rows, gate_up.rows // 2)
        launch_fused(
            half, part, True, products, 0, workspace.scratch, activation=activation, pdl=pdl, exact=exact,
            fixed=workspace.fixed,
        )  # fmt: skip
        return half_rows(products, workspace.half_rows(rows, gate_up.rows // 2), pdl)
    out = HalfRows(workspace.wide(rows, gate_up.rows // 2), workspace.gated_unscale(rows))
    # Some gate rows and their up rows at a time, so that neither they nor their products take much memory.
    most = max(16, min(workspace.max_weights // part.cols, _PRODUCTS // rows))
    pieces = -(-part.rows // most)
    tiles = -(-part.tiles // pieces)
    for tile in range(0, part.tiles, tiles):
        count = min(tiles, part.tiles - tile)
        expanded = workspace.expanded(16 * count, part.cols)
        dequantize_part(part, True, expanded, tile, count)
        z = _products(half, expanded, part.gain, workspace.products(rows, 16 * count))
        glu_products(z, activation, reach_of(part), out, 8 * tile)
    return out


def _expands_at_once(x: HalfRows, weight: PackedWeight, workspace: MatmulWorkspace) -> bool:
    """Whether these are rows for cuBLAS, and the whole weight fits the workspace, its rows in their order."""
    if workspace.form(x.rows, weight.cols) is not Form.ROW_MAJOR:
        return False
    packed = all(isinstance(part, PackedPart) for part in weight.parts)
    return packed and not weight.paired and weight.rows * weight.cols <= workspace.max_weights


def _multiply_all(
    x: HalfRows, weight: PackedWeight, workspace: MatmulWorkspace, out: Tensor | None = None
) -> Products:
    """Rows times the whole weight, expanded with the smallest of the parts' gains, so that none leaves fp16's range."""
    expanded = workspace.expanded(weight.rows, weight.cols)
    parts = [part for part in weight.parts if isinstance(part, PackedPart)]
    gain, first = min(part.gain for part in parts), 0
    for part in parts:
        dequantize_part(part, False, expanded[first : first + part.rows], gain=gain)
        first += part.rows
    return _products(x, expanded, gain, out)


def _expand_and_multiply(
    x: HalfRows,
    part: PackedPart | FloatPart,
    paired: bool,
    workspace: MatmulWorkspace,
    residual: Tensor | None,
    out: Tensor,
    first: int,
) -> None:
    """As many weight rows at a time as the workspace holds."""
    at_a_time = workspace.max_weights // part.cols
    if not paired:
        at_a_time = at_a_time // 16 * 16
    if at_a_time < (part.rows if paired else min(16, part.rows)):
        raise ValueError(f"the workspace expands {workspace.max_weights} weights; rows have {part.cols}")
    for row in range(0, part.rows, at_a_time):
        count = min(at_a_time, part.rows - row)
        expanded = workspace.expanded(count, part.cols)
        if isinstance(part, FloatPart):
            expanded.copy_(part.weight[row : row + count])
        else:
            dequantize_part(part, paired, expanded, row // 16, -(-count // 16))
        gain = 1.0 if isinstance(part, FloatPart) else part.gain
        columns = slice(first + row, first + row + count)
        added = None if residual is None else residual[:, columns].contiguous()
        out[:, columns] = _products(x, expanded, gain).finish(added)


def _products(x: HalfRows, expanded: Tensor, gain: float, out: Tensor | None = None) -> Products:
    """fp16 rows [T, K] times gain * weights, fp16 [N, K], with fp32 sums, to `out` where that is given."""
    rows = x.row_major(expanded.shape[1])
    if rows.is_cuda:
        values = torch.mm(rows, expanded.T, out_dtype=torch.float32, out=out)
    else:
        values = torch.mm(rows.float(), expanded.float().T, out=out)
    return Products(values, x.unscale, gain)
