"""Weights on a CUDA device: the blocks of a GGUF tensor repacked once, at load, into the planes of layout.py.

Repacking is lossless: the planes hold the stored integers and scales, and take at most 3% more than the file (plus
padding: rows to 16, columns to 128). Plain floats are stored unchanged.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quengine.kernels.block_formats import unpack, unpack_scales
from quengine.kernels.cuda.weights.book_planes import device_book
from quengine.kernels.cuda.weights.bounds import PartBounds, WeightBounds
from quengine.kernels.cuda.weights.layout import TILE_ROWS, PackedLayout, packed_layout
from quengine.kernels.cuda.weights.planes import planes_of
from quengine.kernels.cuda.weights.repack import repack
from quengine.kernels.cuda.weights.repack_table import RepackTable, repack_table
from quengine.kernels.cuda.weights.row_change import RowChange
from quengine.kernels.quant_tensor import QuantTensor

_WEIGHTS_AT_A_TIME, _MOVED_AT_A_TIME = 1 << 25, 1 << 27
"""The most weights repacked at a time: where torch computes codes, with four to six temporary bytes each; and where
kernels move bits, with one byte each. More weights at a time take fewer launches.
"""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class PackedPart:
    """N rows of K weights of one format. Planes are uint8, tiles outermost, as in layout.py; planes that a format
    lacks are empty.

    weight_scale: a power of two; weight_scale * weights use fp16's range well (for prefill, fp16_operand.py). norm: a
    bound on the 2-norm of every row.
    """

    layout: PackedLayout
    rows: int
    cols: int
    low: Tensor
    high: Tensor
    scales: Tensor
    supers: Tensor
    weight_scale: float
    norm: float

    @property
    def planes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.low, self.high, self.scales, self.supers

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE_ROWS)

    @property
    def chunks(self) -> int:
        return -(-self.cols // self.layout.chunk)

    @property
    def nbytes(self) -> int:
        return self.tiles * self.chunks * self.layout.chunk_bytes


@dataclass(frozen=True)
class FloatPart:
    """N rows of K plain floats."""

    weight: Tensor

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def cols(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [rows, cols] applied to one input: parts side by side along the rows, in order.

    `paired`: rows r and r + 8 of a tile are row i of the first half and row i of the second half of the matrix (gate
    and up), so that one thread holds both. Outputs are in the original order. `change`: what adapters add to the
    product, of a weight that is multiplied by one row.
    """

    parts: tuple[PackedPart | FloatPart, ...]
    paired: bool = False
    change: RowChange | None = None

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, which a pass over it reads once."""
        return sum(part.nbytes for part in self.parts)


def first_rows(weight: PackedWeight, rows: int) -> PackedWeight:
    """The first `rows` rows, whole tiles, of an unpaired weight of one part, as views."""
    (part,) = weight.parts
    if weight.paired or rows % TILE_ROWS or rows > part.rows:
        raise ValueError(f"{rows} rows are not whole tiles of a matrix of {part.rows}")
    if isinstance(part, FloatPart):
        return PackedWeight((FloatPart(part.weight[:rows]),))
    tiles = rows // TILE_ROWS
    high = part.high if part.layout.book else part.high[:tiles]
    low, scales, supers = (plane[:tiles] for plane in (part.low, part.scales, part.supers))
    return PackedWeight((replace(part, rows=rows, low=low, high=high, scales=scales, supers=supers),))


def pack(
    weights: QuantTensor | Sequence[QuantTensor], device: torch.device | str, paired: bool = False
) -> PackedWeight:
    """Repacks matrices [N_i, K], applied to the same input, on `device`.

    Neighbours of one format become one part. `paired` (see PackedWeight) requires two tensors of one format and shape,
    with a multiple of 8 rows; otherwise the result is unpaired. Raises ValueError if the K differ.
    """
    tensors = [weights] if isinstance(weights, QuantTensor) else list(weights)
    if len({tensor.cols for tensor in tensors}) != 1:
        raise ValueError(f"merged weights need one width, not {[tensor.cols for tensor in tensors]}")
    if paired and can_pair(tensors):
        return PackedWeight((_pack_pair(tensors[0], tensors[1], device),), paired=True)
    runs: list[list[QuantTensor]] = []
    for tensor in tensors:
        if runs and runs[-1][0].format == tensor.format:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return PackedWeight(tuple(_pack_run(run, device) for run in runs))


def pack_on_host(table: QuantTensor, device: torch.device) -> PackedWeight:
    """As `pack` of one matrix, repacked on `device` some rows at a time, with its planes in host memory.

    For a CUDA device it is page-locked: kernels read it over the bus.
    """
    data = table.data.view(table.rows, -1)
    if not table.format.is_quantized:
        held = _host_memory(data.shape, device)
        held.copy_(data)
        return PackedWeight((FloatPart(held.view(_FLOATS[table.format.name])),))
    planes = _Planes(table, table.rows, device, on_host=True)
    for block in _tile_rows([data], rows_at_a_time(table)):
        planes.append(block)
    return PackedWeight((planes.finish(),))


def _host_memory(shape: Sequence[int], device: torch.device) -> Tensor:
    """An uninitialised uint8 tensor in host memory that kernels of `device` read, or on `device` if that is no GPU."""
    if device.type == "cuda":
        return torch.empty(*shape, dtype=torch.uint8, pin_memory=True)
    return torch.empty(*shape, dtype=torch.uint8, device=device)


def can_pair(tensors: Sequence[QuantTensor]) -> bool:
    """Whether two matrices can share tiles, row by row."""
    if len(tensors) != 2:
        return False
    gate, up = tensors
    return (
        gate.format == up.format and gate.rows == up.rows and gate.rows % 8 == 0 and gate.format.is_quantized
    )


def _pack_run(run: Sequence[QuantTensor], device: torch.device | str) -> PackedPart | FloatPart:
    fmt = run[0].format
    data = [tensor.data.view(tensor.rows, -1) for tensor in run]
    if not fmt.is_quantized:
        stored = torch.cat([block.to(device, non_blocking=True) for block in data])
        return FloatPart(stored.view(_FLOATS[fmt.name]))
    rows = sum(tensor.rows for tensor in run)
    return pack_blocks(run[0], rows, _tile_rows(data, rows_at_a_time(run[0], device)), device)


def _pack_pair(gate: QuantTensor, up: QuantTensor, device: torch.device | str) -> PackedPart:
    half = rows_at_a_time(gate, device) // 2
    starts = range(0, gate.rows, half)
    blocks = (pair_rows(gate.data[row : row + half], up.data[row : row + half]) for row in starts)
    return pack_blocks(gate, 2 * gate.rows, blocks, device)


def pair_rows(gate: Tensor, up: Tensor) -> Tensor:
    """Rows [n, bytes] of two matrices, n a multiple of 8, in the order of a paired part: [2n, bytes]."""
    width = gate.shape[1]
    return torch.stack([block.view(-1, 8, width) for block in (gate, up)], 1).view(-1, width)


def pack_blocks(
    like: QuantTensor, rows: int, blocks: Iterable[Tensor], device: torch.device | str
) -> PackedPart:
    """Packs `rows` rows in the format and width of `like`, given in blocks [n, bytes], n a multiple of 16
    except in the last. Blocks of about `rows_at_a_time` rows take little memory besides the result.
    """
    planes = _Planes(like, rows, device)
    for block in blocks:
        planes.append(block)
    return planes.finish()


def rows_at_a_time(like: QuantTensor, device: torch.device | str = "cpu") -> int:
    """The number of rows of such a matrix that are repacked at a time on a device, a multiple of 16. In formats without
    plain scales torch computes the bounds, and unpacks codes too for that."""
    table = _table_of(like, device)
    most = _WEIGHTS_AT_A_TIME if table is None or table.plain is None else _MOVED_AT_A_TIME
    return max(1, most // (like.cols * TILE_ROWS)) * TILE_ROWS


def _table_of(like: QuantTensor, device: torch.device | str) -> RepackTable | None:
    """The table by which a kernel repacks such a matrix; None where torch does it."""
    on_gpu = torch.device(device).type == "cuda" and like.format.is_quantized
    return repack_table(like.format, like.cols, device) if on_gpu else None


def _tile_rows(data: Sequence[Tensor], count: int) -> list[Tensor]:
    """Blocks of `count` rows, a multiple of 16, from tensors concatenated by rows; the last may be short."""
    together = sum(map(len, data)) <= count
    if len(data) > 1 and (together or any(len(block) % TILE_ROWS for block in data[:-1])):
        data = [torch.cat(list(data))]
    return [block[row : row + count] for block in data for row in range(0, len(block), count)]


def empty_part(
    like: QuantTensor,
    rows: int,
    bounds: PartBounds,
    allocate: Callable[[int], Tensor],
    device: torch.device,
) -> PackedPart | FloatPart:
    """A part of `rows` rows in the format and width of `like`, in memory from `allocate`, which takes a number of bytes
    and returns uint8 on the device. Zeros there are weights of 0."""
    if not like.format.is_quantized:
        kind = _FLOATS[like.format.name]
        return FloatPart(allocate(rows * like.cols * kind.itemsize).view(kind).view(rows, like.cols))
    layout = packed_layout(like.format, like.cols)
    tiles, chunks = -(-rows // TILE_ROWS), -(-like.cols // layout.chunk)
    low, high, scales, supers = (
        allocate(tiles * chunks * size).view(tiles, chunks, size) for size in layout.plane_bytes
    )
    high = device_book(like.format.book, device) if layout.book else high
    return PackedPart(layout, rows, like.cols, low, high, scales, supers, *bounds)


class _Planes:
    """The planes of one part, filled some rows at a time to limit temporary memory. on_host: see `pack_on_host`."""

    def __init__(
        self, like: QuantTensor, rows: int, device: torch.device | str, on_host: bool = False
    ) -> None:
        self.format, self.rows, self.cols, self.device = like.format, rows, like.cols, device
        self.layout = packed_layout(like.format, like.cols)
        self.chunks = -(-self.cols // self.layout.chunk)
        self.tiles = -(-rows // TILE_ROWS)
        self.filled = 0
        self.bounds = WeightBounds.none(device)
        shapes = [(self.tiles, self.chunks, size) for size in self.layout.plane_bytes]
        if on_host:
            self.planes = [_host_memory(shape, torch.device(device)) for shape in shapes]
        else:
            self.planes = [torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes]
        self.table = None if on_host else _table_of(like, device)
        self.first_place = torch.zeros(1, dtype=torch.int32, device=device)

    def append(self, data: Tensor) -> None:
        stored = data.to(self.device, non_blocking=True)
        tiles = -(-len(data) // TILE_ROWS)
        filled = slice(self.filled, self.filled + tiles)
        here = [plane[filled] for plane in self.planes]
        if self.table is None:
            groups = unpack(self.format, stored)
            for plane, values in zip(here, planes_of(groups, self.layout), strict=True):
                if values is not None:
                    plane.copy_(values.reshape(tiles, self.chunks, -1))
            self.bounds |= WeightBounds.of(groups)
        else:
            plain = self._plain_room(tiles)
            repack([*here, plain], stored.unsqueeze(0), None, self.first_place, self.table)
            if plain is None:
                self.bounds |= WeightBounds.of(unpack_scales(self.format, stored))
            else:
                self.bounds.include(plain, self.format)
        self.filled += tiles

    def _plain_room(self, tiles: int) -> Tensor | None:
        """Room for the plain scales of `tiles` tiles, if a kernel moves their bits; else None."""
        if self.table is None or self.table.plain is None:
            return None
        shape = (tiles, self.chunks, self.table.plain.shape[1])
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def finish(self) -> PackedPart:
        if self.filled != self.tiles:
            raise ValueError(f"packed {self.filled} of {self.tiles} tiles")
        low, high, scales, supers = self.planes
        if self.layout.book:
            high = device_book(self.format.book, self.device)
        return PackedPart(
            self.layout,
            self.rows,
            self.cols,
            low,
            high,
            scales,
            supers,
            *self.bounds.read(),
        )
