"""Packed planes read back: what `packed.pack` has stored, by the layout's definition."""

import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS, Groups
from quengine.kernels.cuda.weights.layout import CODE_PIECES, TILE_ROWS, PackedLayout, ScaleKind
from quengine.kernels.cuda.weights.packed import PackedPart
from tests.kernels.cuda.gemm.unpack_book import unpack_book


def unpack_part(part: PackedPart) -> Groups:
    """The stored integers and scales of a packed part, rows in the order they were packed."""
    layout, shape = part.layout, (part.tiles, part.chunks)
    fmt = FORMATS[layout.format]
    if layout.book:
        return unpack_book(part)
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
    if kind == ScaleKind.E4M3:
        top = None
        if part.supers.numel():
            tops = part.supers.view(torch.float32).view(*shape, 8, 2).permute(0, 3, 2, 1)
            top = tops.reshape(part.tiles * TILE_ROWS, part.chunks)[: part.rows].contiguous()
        return Groups(fmt, codes, by_row(part.scales), top=top)
    if kind == ScaleKind.HALF:
        lanes = part.scales.view(torch.float16).view(*shape, 32 >> layout.share, layout.scale_sets, 2)
        lanes = lanes.repeat_interleave(1 << layout.share, 2).expand(*shape, 32, layout.sets, 2)
        return Groups(fmt, codes, by_row(lanes)[:, :: fmt.block // fmt.group].contiguous())
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
    """The inverse of `planes._six_bit_plane`: [tiles, chunks, 32, 8]."""
    words = scales[..., :128].contiguous().view(torch.int32)
    shorts = scales[..., 128:].contiguous().view(torch.int16).int()
    fields = [(words >> (6 * field)) & 63 for field in range(5)]
    fields += [shorts & 63, (shorts >> 6) & 63, ((words >> 30) & 3) | ((shorts >> 10) & 60)]
    return torch.stack(fields, -1).to(torch.uint8)


def _read_pieces(part: PackedPart) -> Tensor:
    """The inverse of `planes._pieces_plane`: [tiles, chunks, steps, 32 lanes, half, rh, 4]."""
    layout = part.layout
    pieces = CODE_PIECES[layout.low]
    words = part.low.view(part.tiles, part.chunks, -1, 32, 2, 4).transpose(3, 4)
    words = words.reshape(part.tiles, part.chunks, -1, len(pieces) * layout.low // 8, 32, 4)
    read = [
        sum(
            ((words[..., word, :, :] >> first) & ((1 << bits) - 1)) << place
            for word, first, bits, place in code
        )
        for code in pieces
    ]
    codes = torch.stack([torch.as_tensor(code) for code in read], 3).unflatten(3, (-1, 4)).transpose(4, 5)
    return codes.reshape(part.tiles, part.chunks, layout.steps, 32, 2, 2, 4)


def _read_codes(part: PackedPart) -> Tensor:
    """Codes as stored (top bit flipped where the format has an offset), with the padding: uint8 [R, K]."""
    layout, steps = part.layout, (part.tiles, part.chunks, part.layout.steps)
    if layout.low == 8:
        codes = part.low.view(*steps, 2, 32, 2, 4).transpose(3, 4).transpose(4, 5)
    elif layout.low in CODE_PIECES:
        codes = _read_pieces(part)
    elif layout.table:
        nibbles = part.low.view(*steps, 32, 2, 2, 2)
        codes = torch.stack([nibbles & 15, nibbles >> 4], -1).flatten(-2)
    else:
        words = part.low.view(*steps, 32, 2, 4)
        codes = torch.stack([words & 15, words >> 4], -2)
    if layout.high == 1:
        shifts = torch.arange(8, dtype=torch.uint8, device=part.high.device).view(8, 1)
        words = part.high.view(part.tiles, part.chunks, layout.steps // 2, 32, 1, 4)
        bits = ((words >> shifts) & 1).unflatten(4, (2, 4)).transpose(3, 4)
        codes = codes | (bits.reshape(*steps, 32, 2, 2, 4) << layout.low)
    return _from_fragments(codes, layout)


def _from_fragments(fragments: Tensor, layout: PackedLayout) -> Tensor:
    """The inverse of `planes.to_fragments`."""
    tiles, chunks = fragments.shape[:2]
    shape = (tiles, chunks, layout.blocks, 4, 8, 4, 2, 2, 4)
    return (
        fragments.reshape(shape)
        .permute(0, 7, 4, 1, 2, 5, 3, 6, 8)
        .reshape(tiles * TILE_ROWS, chunks * layout.chunk)
    )
