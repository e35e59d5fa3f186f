"""Random weights in any stored format: valid blocks whose dequantized values have a given spread.

The integers are drawn and packed straight into blocks, no float matrix is made. Matrices of large models are cut from a
pool of random rows: drawing each anew would take minutes.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from quengine.kernels.block_formats import FORMATS, NVFP4_SCALED, BlockFormat, put_split_half
from quengine.kernels.codebooks import codebook
from quengine.models.blocks.block import Shape

Bytes = NDArray[np.uint8]
_CHUNK_BYTES = 1 << 24


def random_rows(
    name: str, rows: int, cols: int, std: float, rng: np.random.Generator, mean: float = 0.0
) -> Bytes:
    """`rows` rows of `cols` weights of format `name`, uint8 [rows, row_bytes].

    Weights have about mean 0 and standard deviation `std`; scales vary by group and block. `mean`
    is for the float formats only. Raises ValueError for a `cols` that is not whole blocks.
    """
    fmt = FORMATS[name]
    data = np.empty((rows, fmt.row_bytes(cols)), np.uint8)
    step = max(1, _CHUNK_BYTES // data.shape[1])
    for start in range(0, rows, step):
        part = data[start : start + step]
        if fmt.is_quantized:
            part[:] = _random_blocks(fmt, part.size // fmt.nbytes, std, rng).reshape(part.shape)
        else:
            part[:] = _random_floats(name, len(part), cols, mean, std, rng)
    return data


def _random_floats(
    name: str, rows: int, cols: int, mean: float, std: float, rng: np.random.Generator
) -> Bytes:
    values = rng.standard_normal((rows, cols), np.float32) * np.float32(std) + np.float32(mean)
    if name == "F32":
        return values.view(np.uint8)
    if name == "F16":
        return values.astype(np.float16).view(np.uint8)
    # BF16 is the upper half of an F32.
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _random_blocks(fmt: BlockFormat, count: int, std: float, rng: np.random.Generator) -> Bytes:
    """`count` blocks, uint8 [count, nbytes]. Any bits are valid codes, so those are plain noise, but for codes of two
    bits that stand for -1, 0 and 1.
    """
    words = rng.integers(0, 1 << 64, -(-count * fmt.nbytes // 8), np.uint64)
    blocks = words.view(np.uint8)[: count * fmt.nbytes].reshape(count, fmt.nbytes)
    grid = _code_values(fmt)
    if fmt.name == "MXFP4":
        # The scale is 2^(e - 127) over a table of doubled values; e is rounded, and varies by one.
        exponent = np.log2(std / float(np.sqrt(np.mean(grid**2)))) + 128
        _put(blocks, fmt, "d", np.floor(exponent + rng.random((count, 1))).astype(np.uint8))
        return blocks
    jitter = rng.uniform(0.75, 1.25, (count, 1))
    if fmt.name in ("NVFP4", NVFP4_SCALED):
        # With a tensor's scale blocks have scales of about 32; else of whatever size they come to.
        size = 2 * std / np.sqrt(np.mean(grid**2))
        top = size / 32 if "top" in fmt.layout else 1.0
        if "top" in fmt.layout:
            _put(blocks, fmt, "top", np.full((count, 1), top, "<f4").view(np.uint8))
        start, stop = fmt.layout["d"]
        _put(blocks, fmt, "d", _e4m3(size / top * rng.uniform(0.75, 1.25, (count, stop - start))))
        return blocks
    if fmt.book:
        _put_d(blocks, fmt, std * jitter / (fmt.unit * _odd_size(fmt) * np.sqrt(np.mean(grid**2))))
        return blocks
    if fmt.name in ("TQ2_0", "Q2_0"):
        start, stop = fmt.layout["codes"]
        _put(blocks, fmt, "codes", rng.choice(_TERNARY_BYTES, (count, stop - start)))
    if not fmt.sub_scale_bits:
        centre = grid.mean() if fmt.has_min else 0.0
        d = std / np.sqrt(np.mean((grid - centre) ** 2)) * jitter
        _put(blocks, fmt, "d", _half(d))
        if fmt.has_min:
            _put(blocks, fmt, "min", _half(-centre * d))
    elif fmt.has_min:
        _put_scales_and_mins(blocks, fmt, std * jitter / grid.std(), float(grid.mean()), rng)
    else:
        _put_signed_scales(blocks, fmt, std * jitter / np.sqrt(np.mean(grid**2)), rng)
    return blocks


def _code_values(fmt: BlockFormat) -> NDArray[np.float64]:
    """The integers that uniformly drawn codes stand for."""
    if fmt.book:
        values: NDArray[np.float64] = np.array(fmt.table, np.float64)[codebook(fmt.book).numpy().ravel()]
        return values
    if fmt.table is not None:
        return np.array(fmt.table, np.float64)
    if fmt.bits == 2 and fmt.offset:
        return np.array([-1.0, 0.0, 1.0])
    low = -128 if fmt.bits == 8 else -fmt.offset
    return np.arange(low, low + (1 << fmt.bits), dtype=np.float64)


_TERNARY_BYTES = np.array(
    [byte for byte in range(256) if all(byte >> at & 3 < 3 for at in (0, 2, 4, 6))], np.uint8
)
"""Bytes of four codes of two bits, none of them 3."""


def _odd_size(fmt: BlockFormat) -> float:
    """The root mean square of sub-scales 2n + 1."""
    return float(np.sqrt(np.mean((2.0 * np.arange(1 << fmt.sub_scale_bits) + 1) ** 2)))


def _put_d(blocks: Bytes, fmt: BlockFormat, d: NDArray[np.float64]) -> None:
    """Writes super-scales [count, 1] to blocks; in IQ1_M they are the upper four bits of four words."""
    if fmt.name != "IQ1_M":
        _put(blocks, fmt, "d", _half(d))
    else:
        put_split_half(torch.from_numpy(blocks).unsqueeze(0), torch.from_numpy(d).view(1, -1))


def _e4m3(values: NDArray[np.float64]) -> Bytes:
    """Positive numbers in unsigned E4M3, rounded, at most 448."""
    clipped = np.clip(values, 2.0**-9, 448.0)
    exponent = np.maximum(np.floor(np.log2(clipped)), -6)
    code = (exponent + 6) * 8 + np.round(clipped / 2.0 ** (exponent - 3))
    codes: Bytes = np.minimum(code, 126).astype(np.uint8)
    return codes


def _put(blocks: Bytes, fmt: BlockFormat, field: str, values: Bytes) -> None:
    start, stop = fmt.layout[field]
    blocks[:, start:stop] = values


def _half(values: NDArray[np.float64]) -> Bytes:
    return values.astype("<f2").view(np.uint8)


def _nibbles(low: Bytes, high: Bytes) -> Bytes:
    """The low four bits of each value, two to a byte."""
    return (low & 15 | (high & 15) << 4).astype(np.uint8)


def _put_scales_and_mins(
    blocks: Bytes, fmt: BlockFormat, scale: NDArray[np.float64], centre: float, rng: np.random.Generator
) -> None:
    """Sub-scales sc and sub-minimums mn near them: with dmin = centre*d, d*sc*q - dmin*mn has mean 0."""
    limit = 1 << fmt.sub_scale_bits
    groups = fmt.block // fmt.group
    sc = rng.integers(limit // 2, limit, (len(blocks), groups), np.uint8)
    near = sc.astype(np.int16) + rng.integers(-limit // 16, limit // 16 + 1, sc.shape, np.int16)
    mn = near.clip(0, limit - 1).astype(np.uint8)
    d = scale / (0.75 * limit)
    _put(blocks, fmt, "d", _half(d))
    _put(blocks, fmt, "dmin", _half(centre * d))
    _put(blocks, fmt, "scales", _nibbles(sc, mn) if fmt.sub_scale_bits == 4 else _pack_k4(sc, mn))


def _pack_k4(sc: Bytes, mn: Bytes) -> Bytes:
    """Q4_K and Q5_K: 8 + 8 six-bit values in 12 bytes.

    Bytes 0-3 and 4-7 hold sc and mn of groups 0-3 in their low six bits, bytes 8-11 the low nibbles of sc and
    mn of groups 4-7, whose upper two bits are the upper two of bytes 0-7.
    """
    first = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    second = mn[:, :4] | (mn[:, 4:] >> 4) << 6
    third = _nibbles(sc[:, 4:], mn[:, 4:])
    return np.concatenate((first, second, third), axis=1)


def _put_signed_scales(
    blocks: Bytes, fmt: BlockFormat, scale: NDArray[np.float64], rng: np.random.Generator
) -> None:
    """Sub-scales of both signs, from half the largest magnitude up."""
    groups = fmt.block // fmt.group
    top = 1 << (fmt.sub_scale_bits - 1)
    magnitude = rng.integers(top // 2, top, (len(blocks), groups), np.int16)
    signed = np.where(rng.random(magnitude.shape) < 0.5, -magnitude, magnitude).astype(np.int16)
    _put(blocks, fmt, "d", _half(scale / (0.75 * top)))
    if fmt.sub_scale_bits == 8:
        _put(blocks, fmt, "scales", signed.astype(np.int8).view(np.uint8))
        return
    codes = (signed + top).astype(np.uint8)
    if fmt.name == "Q3_K":
        _put(blocks, fmt, "scales", _pack_q3k(codes))
    else:
        # IQ4_XS: nibbles of two groups a byte, then two upper bits a group in one u16.
        _put(blocks, fmt, "scales", _nibbles(codes[:, 0::2], codes[:, 1::2]))
        upper = codes >> 4
        low, high = (
            upper[:, i] | upper[:, i + 1] << 2 | upper[:, i + 2] << 4 | upper[:, i + 3] << 6 for i in (0, 4)
        )
        _put(blocks, fmt, "scales_high", np.stack((low, high), axis=1))


def _pack_q3k(codes: Bytes) -> Bytes:
    """Q3_K: 16 six-bit values in 12 bytes, the low nibbles of groups i and i+8 in byte i.

    Byte 8+i holds the upper two bits of groups i, i+4, i+8 and i+12, from the low end.
    """
    low = _nibbles(codes[:, :8], codes[:, 8:])
    upper = codes >> 4
    high = upper[:, 0:4] | upper[:, 4:8] << 2 | upper[:, 8:12] << 4 | upper[:, 12:16] << 6
    return np.concatenate((low, high), axis=1)


_POOL_BYTES = 1 << 25


class PooledRows:
    """Random rows of every type and width that a model's experts or layers have, each drawn once.

    A matrix begins at a row of its own of the pool, and goes on at the pool's beginning after its end, so that no two
    experts of a tensor are equal. A tensor that is no larger than the pool is drawn whole.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[tuple[str, int], NDArray[np.uint8]] = {}
        self._whole = np.empty(0, np.uint8)

    def tensor(self, kind: str, shape: Shape, rng: np.random.Generator) -> NDArray[np.uint8]:
        """Weights [E, rows, columns] or [rows, columns] of type `kind` and standard deviation columns^-0.5.

        Returns uint8 [E * rows, row bytes].

        Valid until the next call.
        """
        count, rows, cols = shape if len(shape) == 3 else (1, *shape)
        width = FORMATS[kind].row_bytes(cols)
        if count * rows * width <= _POOL_BYTES:
            return random_rows(kind, count * rows, cols, cols**-0.5, rng)
        pool = self._pool(kind, cols)
        if self._whole.size < count * rows * width:
            self._whole = np.empty(count * rows * width, np.uint8)
        whole = self._whole[: count * rows * width].reshape(count, rows, width)
        for matrix, first in zip(whole, rng.choice(len(pool), count, replace=False), strict=True):
            _fill(matrix, pool, int(first))
        return whole.reshape(-1, width)

    def _pool(self, kind: str, cols: int) -> NDArray[np.uint8]:
        if (kind, cols) not in self._pools:
            rng = np.random.default_rng([self._seed, cols, *kind.encode()])
            rows = _POOL_BYTES // FORMATS[kind].row_bytes(cols)
            self._pools[kind, cols] = random_rows(kind, rows, cols, cols**-0.5, rng)
        return self._pools[kind, cols]


def _fill(matrix: NDArray[np.uint8], pool: NDArray[np.uint8], first: int) -> None:
    """Rows of the pool from `first` on, which continue at its beginning after its end."""
    done = 0
    while done < len(matrix):
        part = pool[first : first + len(matrix) - done]
        matrix[done : done + len(part)] = part
        done, first = done + len(part), 0
