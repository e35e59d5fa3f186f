"""Packed planes of codebook formats read back, bit by bit from the layout's definition."""

import numpy as np
import torch

from quengine.kernels.block_formats import FORMATS, Groups, from_book
from quengine.kernels.cuda.weights.layout import Book, ScaleKind
from quengine.kernels.cuda.weights.packed import PackedPart


def unpack_book(part: PackedPart) -> Groups:
    """The stored integers and scales of a part of a codebook format, rows in the order they were packed."""
    layout, fmt = part.layout, FORMATS[part.layout.format]
    low = part.low.cpu().numpy().reshape(part.tiles, part.chunks, -1).view(np.uint64)
    low = low.reshape(part.tiles, part.chunks, layout.low_words, 32)
    scales = part.scales.cpu().numpy().reshape(part.tiles, part.chunks, -1)
    halves = part.supers.cpu().numpy().reshape(part.tiles, part.chunks, -1).view(np.float16)
    rows, each = 16 * part.tiles, 32 // fmt.width
    index = np.zeros((rows, part.cols // fmt.width), np.int16)
    signs = np.zeros((rows, part.cols // 8), np.uint8)
    sub = np.zeros((rows, part.cols // fmt.group), np.uint8)
    d = np.zeros((rows, part.chunks), np.float16)
    for tile, chunk, lane, run in np.ndindex(part.tiles, part.chunks, 32, 4):
        row = 16 * tile + 8 * (run % 2) + lane // 4
        first = 256 * chunk + 128 * (run // 2) + 32 * (lane % 4)
        words = [int(word) for word in low[tile, chunk, :, lane]]
        entries, bits, fields = _run(layout.book, layout.scales, words, scales[tile, chunk], lane, run)
        index[row, first // fmt.width :][:each] = entries
        sub[row, first // fmt.group :][: 32 // fmt.group] = [2 * field + 1 for field in fields]
        for step in range(4):
            found = [bits >> (4 * k + step) & 1 for k in range(8)]
            if layout.even_signs:
                sums = [0, *found[1:], 0]
                found = [sums[k] ^ sums[k + 1] for k in range(8)]
            if layout.book == Book.IQ3:
                found = [found[(0, 4, 1, 5, 2, 6, 3, 7).index(column)] for column in range(8)]
            signs[row, first // 8 + step] = sum(bit << k for k, bit in enumerate(found))
        d[row, chunk] = halves[tile, chunk].reshape(8, 2)[lane // 4, run % 2]
    stored = torch.from_numpy(index[: part.rows]), torch.from_numpy(signs[: part.rows])
    held = None if layout.book == Book.IQ1 else stored[1].unsqueeze(1)
    fields = torch.from_numpy(sub[: part.rows] >> 1).unsqueeze(1)
    return from_book(fmt, stored[0].unsqueeze(1), held, torch.from_numpy(d[: part.rows]), fields)


def _run(
    book: int, kind: int, words: list[int], scales: np.ndarray, lane: int, run: int
) -> tuple[list[int], int, list[int]]:
    """Indices, 32 bits of signs and stored sub-scales of a run of 32 columns."""
    if book == Book.IQ1:
        low = [words[run // 2] >> (32 * (run % 2) + 8 * k) & 255 for k in range(4)]
        bits = words[2] >> (16 * run) & 0xFFFF
        if kind == ScaleKind.IN_CODES:
            high = [bits >> (3 * k) & 7 | bits >> 15 << 3 for k in range(4)]
            return [a | b << 8 for a, b in zip(low, high, strict=True)], 0, [bits >> 12 & 7]
        word = int(scales[:64].view(np.uint16)[lane]) | int(scales[64:][lane]) << 16
        fields = [word >> (3 * (2 * s + run % 2)) & 7 for s in (run // 2 * 2, run // 2 * 2 + 1)]
        return [a | (bits >> (4 * k) & 15) << 8 for k, a in enumerate(low)], 0, fields
    if book == Book.IQ2:
        low = [words[run] >> (8 * k) & 255 for k in range(4)]
        bits = words[run] >> 32
    else:
        low = [words[run] >> (8 * k) & 255 for k in range(8)]
        bits = words[4 + run // 2] >> (32 * (run % 2)) & 0xFFFFFFFF
    if kind == ScaleKind.FREE:
        return low, bits, [bits & 15]
    if kind == ScaleKind.HIGH_NIBBLE:
        high, nibbles = int(scales[:128].view(np.uint32)[lane]), int(scales[128:].view(np.uint16)[lane])
        entries = [a | (high >> (8 * run + k) & 1) << 8 for k, a in enumerate(low)]
        return entries, bits, [nibbles >> (4 * run) & 15]
    both = scales.view(np.uint64 if kind == ScaleKind.NIBBLE_HIGH else np.uint32)
    nibbles = int(both[lane])
    fields = [nibbles >> (4 * (2 * s + run % 2)) & 15 for s in (run // 2 * 2, run // 2 * 2 + 1)]
    if kind == ScaleKind.NIBBLE:
        return [words[run] >> (9 * k) & 511 for k in range(4)], bits, fields
    return [a | (nibbles >> (32 + 8 * run + 2 * k) & 3) << 8 for k, a in enumerate(low)], bits, fields
