"""Planes of the codebook formats, IQ1 to IQ3: indices, signs and sub-scales as `Book` and `ScaleKind` describe."""

from functools import cache

import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS, Groups
from quengine.kernels.codebooks import codebook
from quengine.kernels.cuda.weights.lanes import by_lane, by_run
from quengine.kernels.cuda.weights.layout import Book, PackedLayout, ScaleKind

_BYTES_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Columns of a step in the order of IQ3's sign bits, see `Book`."""


def device_book(name: str, device: torch.device | str) -> Tensor:
    """A codebook as kernels read it, uint8, four bytes per entry: a nibble per code, or IQ3's magnitudes."""
    return _device_book(name, torch.device(device))


@cache
def _device_book(name: str, device: torch.device) -> Tensor:
    codes = codebook(name)
    if Book[name.split("_")[0]] == Book.IQ3:
        levels = torch.tensor(FORMATS[name].table, dtype=torch.int8)
        return levels[codes.int()].view(torch.uint8).contiguous().view(-1).to(device)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous().view(-1).to(device)


def book_plane(groups: Groups, layout: PackedLayout) -> Tensor:
    """The low plane, [tiles, chunks, words, 32 lanes] as bytes."""
    index = _index(groups, layout)
    low = _word(index & 255, 8)
    if layout.book == Book.IQ1:
        pairs = _word(low.unflatten(-1, (2, 2)), 32)
        words = torch.cat([pairs, _iq1_bits(groups, index, layout).unsqueeze(-1)], -1)
    elif layout.book == Book.IQ2:
        low = _word(index & ((1 << layout.index_bits) - 1), layout.index_bits)
        words = low | (_signs(groups, layout) << 32)
    else:
        signs = _signs(groups, layout).unflatten(-1, (2, 2))
        words = torch.cat([low, _word(signs, 32)], -1)
    return words.movedim(-1, 2).contiguous().view(torch.uint8)


def book_scale_plane(groups: Groups, layout: PackedLayout) -> Tensor | None:
    """The scale plane, [tiles, chunks, bytes], or None."""
    kind = layout.scales
    if kind in (ScaleKind.FREE, ScaleKind.IN_CODES):
        return None
    assert groups.sc is not None
    fields = by_lane(groups.sc, layout).flatten(-2) >> 1
    if kind == ScaleKind.THREE:
        word = _word(fields, 3)
        return torch.cat([_bytes(word, 2), _bytes(word >> 16, 1)], -1)
    nibbles = _word(fields, 4)
    if kind == ScaleKind.NIBBLE:
        return _bytes(nibbles, 4)
    upper = _index(groups, layout) >> 8
    if kind == ScaleKind.NIBBLE_HIGH:
        return _bytes(nibbles | (_word(_word(upper, 2), 8) << 32), 8)
    return torch.cat([_bytes(_word(_word(upper, 1), 8), 4), _bytes(nibbles, 2)], -1)


def _index(groups: Groups, layout: PackedLayout) -> Tensor:
    """Indices, int64 [tiles, chunks, 32 lanes, runs, entries of a run]."""
    assert groups.index is not None
    return by_run(groups.index, groups.format.width, layout).long()


def _word(values: Tensor, width: int) -> Tensor:
    """Fields of `width` bits on the last axis, the first one lowest, as int64."""
    at = torch.arange(0, width * values.shape[-1], width, dtype=torch.int64, device=values.device)
    return (values.long() << at).sum(-1)


def _bytes(words: Tensor, count: int) -> Tensor:
    """The lower `count` bytes of each lane's word: [tiles, chunks, 32 * count]."""
    return words.unsqueeze(-1).view(torch.uint8)[..., :count].flatten(-2)


def _signs(groups: Groups, layout: PackedLayout) -> Tensor:
    """The 32 bits of signs of each run, with sub-scales in the free nibble: int64 [.., runs]."""
    assert groups.signs is not None and groups.sc is not None
    steps = by_run(groups.signs, 8, layout)
    if layout.book == Book.IQ3:
        steps = sum(((steps >> column) & 1) << place for place, column in enumerate(_BYTES_ORDER))
    if layout.even_signs:
        steps = _sums_before(steps)
    columns = torch.arange(8, dtype=torch.uint8, device=steps.device).view(8, 1)
    words = _word(((steps.unsqueeze(-2) >> columns) & 1).flatten(-2), 1)
    if layout.scales == ScaleKind.FREE:
        words = words | (by_run(groups.sc, 32, layout).squeeze(-1).long() >> 1)
    return words


def _sums_before(bits: Tensor) -> Tensor:
    """Bit k: the sum modulo 2 of bits 0 .. k-1 of a byte."""
    sums = bits ^ (bits << 1)
    sums = sums ^ (sums << 2)
    return (sums ^ (sums << 4)) << 1


def _iq1_bits(groups: Groups, index: Tensor, layout: PackedLayout) -> Tensor:
    """The 16 bits of each of the four runs: upper index bits and eighths, and IQ1_S's sub-scales."""
    upper = index >> 8
    if layout.scales == ScaleKind.THREE:
        return _word(_word(upper, 4), 16)
    assert groups.sc is not None
    sub = by_run(groups.sc, 32, layout).squeeze(-1).long() >> 1
    return _word(_word(upper & 7, 3) | (sub << 12) | (upper[..., 0] >> 3 << 15), 16)
