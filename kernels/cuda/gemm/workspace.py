"""Memory that the matmuls of one stream reuse, and the matmul for each number of rows.

| rows of a weight            | Hopper                            | other GPUs                               |
|-----------------------------|-----------------------------------|------------------------------------------|
| 1, in a batch of one        | q-dot: gemv/ (not batch-invariant)| q-dot: gemv/ (not batch-invariant)       |
| packed, up to a limit       | WGMMA: matmul_wgmma.py, 4096      | MMA: matmul_fused.py, 64                 |
| packed, more                | dequantized for cuBLAS            | dequantized for cuBLAS                   |
| packed, batch-invariant     | WGMMA, any number                 | MMA, any number                          |
| plain floats                | converted to fp16 for cuBLAS      | converted to fp16 for cuBLAS             |
| plain floats, batch-invariant | matmul_float.py                 | matmul_float.py                          |

The limits are defaults; launch_table.json has measured ones (`wgmma_limit`, `fused_limit`).

The matmul of a mixture of experts, by the average rows of an expert (T rows * k experts each / E experts):

| rows of an expert           | Hopper                            | other GPUs                               |
|-----------------------------|-----------------------------------|------------------------------------------|
| T = 1                       | q-dot: moe/ (not batch-invariant) | q-dot: moe/ (not batch-invariant)        |
| packed, any number          | WGMMA: moe/grouped_wgmma.py       | MMA: moe/grouped_mma.py                  |
| plain floats, any number    | moe/grouped_float.py              | moe/grouped_float.py                     |
| up to 4, 9, 20, 64, 384; more | blocks of 8, 16, 32, 64, 128; 256 | the same, up to 64                     |

The last line is a default too (`grouped_blocks` in launch_table.json). All grouped kernels are batch-invariant.
"""

import math

import torch
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, operand_shape
from quengine.kernels.cuda.gemm.matmul_fused import SplitScratch
from quengine.kernels.cuda.launch.gpu import is_hopper
from quengine.kernels.cuda.weights.launch_table import fused_limit

FEW_ROWS = 128
_MOST_VIEWS = 64


class MatmulWorkspace:
    """Buffers of rows, which grow with the longest chunk, and of up to `max_weights` fp16 weights, allocated at first
    use.

    Up to FEW_ROWS rows have separate buffers: CUDA graphs of batched decode keep the addresses of these, whatever
    chunks run in between. An outgrown one stays allocated for the graphs captured with it. `rooms_left` counts how
    often a buffer of many rows was replaced by a larger one: graphs of prompts are valid until it changes.

    `batch_invariant`: a row's result is bit-identical for any number of rows; nothing is dequantized to a buffer.
    `packed`: whether some weights are packed; if all are plain floats, many rows stay row-major for cuBLAS.
    """

    def __init__(
        self,
        max_weights: int,
        device: torch.device | str,
        batch_invariant: bool = False,
        packed: bool = True,
    ) -> None:
        self.batch_invariant = batch_invariant
        self.packed = packed
        self.max_weights = 0 if batch_invariant else max_weights
        self.device = torch.device(device)
        self.scratch = SplitScratch(device)
        self.rooms_left = 0
        self._weights: Tensor | None = None
        self._buffers: dict[str, Tensor] = {}
        self._outgrown = list[Tensor]()  # of few rows: graphs that were captured with them write there
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._few_ones = torch.ones(FEW_ROWS, dtype=torch.float32, device=device)
        self._ones = self._few_ones

    def layout(self, rows: int) -> OperandLayout:
        """The layout of rows for a matmul; row-major means cuBLAS."""
        wgmma = is_hopper(self.device)
        limit = fused_limit(wgmma) if self.packed else min(fused_limit(wgmma), FEW_ROWS)
        if not self.batch_invariant and rows > limit:
            return OperandLayout.ROW_MAJOR
        return OperandLayout.WGMMA if wgmma else OperandLayout.MMA

    def fp16_operand(self, rows: int, cols: int) -> Fp16Operand:
        """The input of a matmul, in its layout; only one is in use at a time."""
        layout = self.layout(rows)
        values = self._take("rows", torch.float16, rows, *operand_shape(rows, cols, layout))
        return Fp16Operand(values, self._take("row_scale", torch.float32, rows, rows), layout)

    def glu_rows(self, rows: int, width: int) -> Tensor:
        """fp32 rows of a gated linear unit."""
        return self._take("gated", torch.float32, rows, rows, width)

    def glu_operand(self, rows: int, width: int) -> Fp16Operand:
        """Rows of a gated linear unit in the WGMMA layout."""
        shape = operand_shape(rows, width, OperandLayout.WGMMA)
        values = self._take("gated half", torch.float16, rows, *shape)
        return Fp16Operand(values, self.glu_row_scale(rows), OperandLayout.WGMMA)

    def glu_row_scale(self, rows: int) -> Tensor:
        return self._take("gated row_scale", torch.float32, rows, rows)

    def wide(self, rows: int, width: int) -> Tensor:
        """fp16 [rows, width], contiguous: queries and attention's result; later in a layer, rows of a gated
        linear unit. Each is valid until the matmul that reads it.
        """
        return self._take("wide", torch.float16, rows, rows, width)

    def product(self, rows: int, width: int) -> Tensor:
        """fp32 [rows, width], contiguous: a product that the next launch reads."""
        return self._take("product", torch.float32, rows, rows, width)

    def of_experts(
        self, name: str, dtype: torch.dtype, tokens: int, shape: tuple[int, ...], least: int
    ) -> Tensor:
        """A buffer of at least `least` bytes for results of `tokens` rows grouped by expert. It is valid
        across a layer's other matmuls; buffers of one name share their memory.
        """
        few = tokens <= FEW_ROWS
        key = f"few experts' {name}" if few else f"experts' {name}"
        view = self._views.get((f"{key} {dtype}", shape))
        if view is not None:
            return view
        size = max(math.prod(shape) * dtype.itemsize, least)
        held = self._hold(key, torch.uint8, -(-size // 16) * 16, few)
        return self._view(f"{key} {dtype}", held.view(dtype), shape)

    def without_row_scales(
        self, values: Tensor, rows: int, layout: OperandLayout = OperandLayout.ROW_MAJOR
    ) -> Fp16Operand:
        """`rows` fp16 rows as an operand whose row scales are ones."""
        return Fp16Operand(values, self.ones(rows), layout)

    def ones(self, rows: int) -> Tensor:
        """fp32 [rows] of ones, as row scales."""
        if self._ones.shape[0] < rows:
            self.rooms_left += 1
            self._ones = torch.ones(rows, dtype=torch.float32, device=self.device)
        return (self._few_ones if rows <= FEW_ROWS else self._ones)[:rows]

    def dequantized(self, rows: int, cols: int) -> Tensor:
        """The buffer of dequantized weights: fp16 [rows, cols]."""
        view = self._views.get(("weights", (rows, cols)))
        if view is not None:
            return view
        if self._weights is None:
            self._weights = torch.empty(self.max_weights, dtype=torch.float16, device=self.device)
        return self._view("weights", self._weights, (rows, cols))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of rows and weights."""
        held = [*self._buffers.values(), *self._outgrown, *([] if self._weights is None else [self._weights])]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def _take(self, name: str, dtype: torch.dtype, rows: int, *shape: int) -> Tensor:
        view = self._views.get((name, shape))
        if view is not None:
            return view
        size = math.prod(shape)
        key = f"few {name}" if rows <= FEW_ROWS else name
        held = self._buffers.get(key)
        if held is None or held.numel() < size:
            wanted = FEW_ROWS * -(-size // rows) if rows <= FEW_ROWS else size
            held = self._hold(key, dtype, wanted, rows <= FEW_ROWS)
        return self._view(name, held, shape)

    def _hold(self, key: str, dtype: torch.dtype, size: int, few: bool) -> Tensor:
        """A buffer of at least `size` elements."""
        held = self._buffers.get(key)
        if held is None or held.numel() < size:
            self._views.clear()
            self.rooms_left += not few and key in self._buffers
            smaller = self._buffers.pop(key, None)
            if few and smaller is not None:
                self._outgrown.append(smaller)
            del held, smaller  # the smaller one of many rows is freed first
            if self.device.type == "cuda" and not few:
                # no other allocation has its size: cached, it would only take memory
                torch.cuda.empty_cache()
            held = self._buffers[key] = torch.empty(size, dtype=dtype, device=self.device)
        return held

    def _view(self, name: str, held: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The start of a buffer in a shape, cached for all layers: making a view takes the host some microseconds."""
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        view = self._views[name, shape] = held[: math.prod(shape)].view(shape)
        return view
