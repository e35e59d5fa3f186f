"""The definition of packed planes: the stored integers of rows of blocks, moved to where layout.py says, by torch.

`planes_of` takes a hundred operations for a few million weights; a kernel moves the same bits in one launch a plane, by
a table that is found with the help of this (repack_table.py).
"""

import torch
from torch import Tensor

from quengine.kernels.block_formats import Groups
from quengine.kernels.cuda.weights.book_planes import book_plane, book_scale_plane
from quengine.kernels.cuda.weights.lanes import by_lane, padded
from quengine.kernels.cuda.weights.layout import CODE_PIECES, LANES, PackedLayout, ScaleKind


def planes_of(groups: Groups, layout: PackedLayout) -> tuple[Tensor | None, ...]:
    """The planes low, high, scales and supers of R rows: [tiles, chunks, ...], uint8 or wider, the bytes of a unit in
    order; None for a plane that the format lacks, and for the codebook.
    """
    if layout.book:
        scales = book_scale_plane(groups, layout)
        return book_plane(groups, layout), None, scales, _super_plane(groups, layout)
    codes = groups.codes.view(torch.uint8)
    codes = codes ^ layout.offset if layout.offset else codes
    fragments = to_fragments(padded(codes, layout.chunk), layout)
    high = _high_plane(fragments >> layout.low, layout) if layout.high else None
    low = _low_plane(fragments & ((1 << layout.low) - 1) if layout.high else fragments, layout)
    return low, high, _scale_plane(groups, layout), _super_plane(groups, layout)


def to_fragments(codes: Tensor, layout: PackedLayout) -> Tensor:
    """Reorders uint8 [rows, cols] to [tiles, chunks, steps, 32 lanes, 2 halves, 2 rh, 4 columns]."""
    columns = codes.contiguous().view(torch.int32)  # four at a time
    shape = (-1, 2, 8, codes.shape[1] // layout.chunk, layout.blocks, 4, 4, 2)
    order = (0, 3, 4, 6, 2, 5, 7, 1)  # tile, chunk, block, step, r, q, half, rh
    fragments = columns.view(shape).permute(order)
    tiles, chunks = fragments.shape[:2]
    fragments = fragments.reshape(tiles, chunks, layout.steps, 32, 2, 2, 1).contiguous()
    return fragments.view(torch.uint8)


def _low_plane(codes: Tensor, layout: PackedLayout) -> Tensor:
    if layout.low == 8:
        return codes.transpose(4, 5).transpose(3, 4)  # [.., steps, rh, lane, half, column]
    if layout.low in CODE_PIECES:
        return _pieces_plane(codes, layout)
    if layout.table:
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    return codes[..., 0, :] | (codes[..., 1, :] << 4)


def _pieces_plane(codes: Tensor, layout: PackedLayout) -> Tensor:
    """Packs [tiles, chunks, steps, 32 lanes, 2, 2, 4] into int64 words as bytes, [tiles, chunks, words, 32
    lanes, 2, 4].
    """
    pieces = CODE_PIECES[layout.low]
    tiles, chunks = codes.shape[:2]
    split = codes.view(tiles, chunks, -1, len(pieces) // 4, LANES, 4, 4).transpose(4, 5)
    split = split.reshape(tiles, chunks, -1, len(pieces), LANES, 4)
    words = split.new_zeros(*split.shape[:3], len(pieces) * layout.low // 8, LANES, 4)
    for code, places in enumerate(pieces):
        for word, first, count, place in places:
            words[:, :, :, word] |= ((split[:, :, :, code] >> place) & ((1 << count) - 1)) << first
    return words.view(tiles, chunks, -1, 2, LANES, 4).transpose(3, 4)


def _high_plane(codes: Tensor, layout: PackedLayout) -> Tensor:
    tiles, chunks = codes.shape[:2]
    bits = codes.reshape(tiles, chunks, layout.steps // 2, 2, 32, 4, 4).transpose(3, 4).flatten(4, 5)
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device).view(8, 1)
    return (bits << shifts).sum(4, dtype=torch.uint8)


def _scale_plane(groups: Groups, layout: PackedLayout) -> Tensor:
    kind = layout.scales
    if kind == ScaleKind.E8M0:
        return by_lane(groups.d, layout)
    if kind == ScaleKind.HALF:
        return _half_plane(groups.d, layout)
    if kind == ScaleKind.E4M3:
        return by_lane(groups.d.masked_fill(groups.d == 127, 0), layout)
    if kind == ScaleKind.HALF_MIN:
        assert groups.dmin is not None
        both = torch.cat([by_lane(groups.d, layout), by_lane(groups.dmin, layout)], -1)
        return both.transpose(2, 3).contiguous().view(torch.uint8)
    assert groups.sc is not None
    if kind == ScaleKind.BYTE:
        return by_lane(groups.sc, layout).contiguous().view(torch.uint8)
    if kind == ScaleKind.SIX:
        return _six_bit_plane(by_lane((groups.sc + 32).view(torch.uint8), layout).flatten(-2))
    assert groups.mn is not None
    sc, mn = by_lane(groups.sc, layout), by_lane(groups.mn, layout)
    return sc | (mn << 4) if kind == ScaleKind.NIBBLE_MIN else torch.stack([sc, mn], -1)


def _half_plane(d: Tensor, layout: PackedLayout) -> Tensor:
    """fp16 d [rows, cols/block] as bytes of [tiles, chunks, lanes, sets, 2 rh], once for all that share it."""
    each = layout.chunk if layout.one_scale else 32 << layout.share
    return (
        by_lane(d.repeat_interleave(each // layout.group, 1), layout)[
            :, :, :: 1 << layout.share, : layout.scale_sets
        ]
        .contiguous()
        .view(torch.uint8)
    )


def _six_bit_plane(fields: Tensor) -> Tensor:
    """Packs eight 6-bit fields per lane, [tiles, chunks, 32, 8], to [tiles, chunks, 192]: words, then shorts."""
    wide = fields.to(torch.int32)
    at = torch.arange(0, 30, 6, dtype=torch.int32, device=fields.device)
    words = (wide[..., :5] << at).sum(-1, dtype=torch.int32) | (wide[..., 7] << 30)
    shorts = wide[..., 5] | (wide[..., 6] << 6) | (wide[..., 7] >> 2 << 12)
    halves = torch.where(shorts < 1 << 15, shorts, shorts - (1 << 16)).to(torch.int16)
    return torch.cat([words.view(torch.uint8), halves.view(torch.uint8)], -1)


def _super_plane(groups: Groups, layout: PackedLayout) -> Tensor | None:
    if not layout.super_bytes:
        return None
    if groups.top is not None:
        values = [groups.top]
    else:
        values = [groups.d] if groups.dmin is None else [groups.d, groups.dmin]
    rows = [padded(value, 1).view(-1, 2, 8, value.shape[1]).permute(0, 3, 2, 1) for value in values]
    return torch.stack(rows, -1).contiguous().view(torch.uint8)
