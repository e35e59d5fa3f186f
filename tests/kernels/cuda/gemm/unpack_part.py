"""Packed planes read back: what `packed.pack` has stored, by the layout's definition."""

import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS, Groups
from quengine.kernels.cuda.weights.layout import TILE_ROWS, PackedLayout, ScaleKind
from quengine.kernels.cuda.weights.packed import PackedPart


def unpack_part(part: PackedPart) -> Groups:
    """The stored integers and scales of a packed part, rows in the order they were packed."""
    layout, shape = part.layout, (part.tiles, part.chunks)
    fmt = FORMATS[layout.format]
    codes = _read_codes(part)[: part.rows, : part.cols] ^ layout.offset
    if layout.low == 8:
        codes = codes.view(torch.int8)
    group_count, kind = part.cols // layout.group, layout.scales

    def by_row(values: Tensor) -> Tensor:
        split = values.reshape(*shape, 8, 4, layout.blocks, layout.sets_per_block, 2)
        rows = split.permute(0, 6, 2, 1, 4, 3, 5).reshape(part.tiles * TILE_ROWS, -1)
        return rows[: part.rows, :group_count].contiguous()

    if kind == ScaleKind.E8M0:
        return Groups(fmt, codes, by_row(part.scales))
    if kind == ScaleKind.HALF:
        return Groups(fmt, codes, by_row(part.scales.view(torch.float16)))
    if kind == ScaleKind.HALF_MIN:
        halves = part.scales.view(torch.float16).view(*shape, layout.sets, 32, 4).transpose(2, 3)
        return Groups(fmt, codes, by_row(halves[..., :2]), dmin=by_row(halves[..., 2:]))
    supers = part.supers.view(torch.float16).view(*shape, 8, 2, -1).permute(4, 0, 3, 2, 1)
    supers = supers.reshape(-1, part.tiles * TILE_ROWS, part.chunks)[:, : part.rows].contiguous()
    if kind == ScaleKind.BYTE:
        return Groups(fmt, codes, supers[0], by_row(part.scales.view(torch.int8)))
    if kind == ScaleKind.SIX:
        return Groups(fmt, codes, supers[0], by_row(_read_six(part.scales)).view(torch.int8) - 32)
    if kind == ScaleKind.NIBBLE_MIN:
        sc, mn = part.scales & 15, part.scales >> 4
    else:
        sc, mn = part.scales.view(-1, 2).unbind(-1)
    return Groups(fmt, codes, supers[0], by_row(sc), supers[1], by_row(mn))


def _read_six(scales: Tensor) -> Tensor:
    """The inverse of `packed._six_bit_plane`: [tiles, chunks, 32, 8]."""
    low = torch.stack([scales[..., :128] & 15, scales[..., :128] >> 4], -1).unflatten(2, (32, 4)).flatten(-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=scales.device)
    top = ((scales[..., 128:, None] >> shifts) & 3).unflatten(2, (32, 2)).flatten(-2)
    return torch.bitwise_or(low, top << 4)


def _read_fields(plane: Tensor) -> Tensor:
    """The inverse of `packed._fields`: [.., lane, 4 bytes] -> [.., lane, half, rh, 4]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=plane.device).view(4, 1)
    return torch.unflatten((plane.unsqueeze(-2) >> shifts) & 3, -2, (2, 2))


def _read_codes(part: PackedPart) -> Tensor:
    """Codes as stored (top bit flipped where the format has an offset), with the padding: uint8 [R, K]."""
    layout, steps = part.layout, (part.tiles, part.chunks, part.layout.steps)
    if layout.low == 8:
        codes = part.low.view(*steps, 2, 32, 2, 4).transpose(3, 4).transpose(4, 5)
    elif layout.low == 2:
        codes = _read_fields(part.low.view(*steps, 32, 4))
    elif layout.table:
        nibbles = part.low.view(*steps, 32, 2, 2, 2)
        codes = torch.stack([nibbles & 15, nibbles >> 4], -1).flatten(-2)
    else:
        words = part.low.view(*steps, 32, 2, 4)
        codes = torch.stack([words & 15, words >> 4], -2)
    if layout.high == 2:
        codes = codes | (_read_fields(part.high.view(*steps, 32, 4)) << layout.low)
    elif layout.high == 1:
        shifts = torch.arange(8, dtype=torch.uint8, device=part.high.device).view(8, 1)
        words = part.high.view(part.tiles, part.chunks, layout.steps // 2, 32, 1, 4)
        bits = ((words >> shifts) & 1).unflatten(4, (2, 4)).transpose(3, 4)
        codes = codes | (bits.reshape(*steps, 32, 2, 2, 4) << layout.low)
    return _from_fragments(codes, layout)


def _from_fragments(fragments: Tensor, layout: PackedLayout) -> Tensor:
    """The inverse of `packed._to_fragments`."""
    tiles, chunks = fragments.shape[:2]
    shape = (tiles, chunks, layout.blocks, 4, 8, 4, 2, 2, 4)
    return (
        fragments.reshape(shape)
        .permute(0, 7, 4, 1, 2, 5, 3, 6, 8)
        .reshape(tiles * TILE_ROWS, chunks * layout.chunk)
    )
