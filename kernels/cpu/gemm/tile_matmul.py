"""Prefill matmul: many activation rows times weights as stored, in fp32, on AMX, or on int16.

Strips of weight rows are dequantized panel by panel into the caches and multiplied with all activation rows. Each
element of the result is summed over the inner dimension in order, in one accumulator: it depends on its two rows
alone, not on the other rows or the number of threads. K-quants are multiplied as integers, on AMX (amx_bytes.py) or
as int16 (vnni.py). For other types AMX multiplies each fp32 as two bf16 terms (amx.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from quengine.kernels.cpu.gemm import amx_bytes, vnni
from quengine.kernels.cpu.gemm.amx import BLOCK, MOST_BLOCKS, MOST_ROWS, ONE_TERM, has_amx
from quengine.kernels.cpu.gemm.amx_bytes import uses_amx_bytes
from quengine.kernels.cpu.gemm.tiles import DEPTH, MatmulArguments, PackArguments
from quengine.kernels.cpu.gemm.vnni import uses_vnni
from quengine.kernels.cpu.runtime.kernel_table import (
    amx_bytes_matmul_kernel,
    amx_bytes_pack_kernel,
    amx_bytes_panel_kernel,
    amx_matmul_kernel,
    amx_pack_kernel,
    amx_panel_kernel,
    pack_kernel,
    panel_kernel,
    tile_matmul_kernel,
    vnni_matmul_kernel,
    vnni_pack_kernel,
    vnni_panel_kernel,
)
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.cpu.runtime.threads import Launch, get_threads
from quengine.kernels.quant_tensor import QuantTensor

_Placed = tuple[int, QuantTensor]  # first output column, weight
_Product = tuple[int, int, int, int]  # matmul kernel, panel kernel, strips per task, tasks
_TASKS = 4  # per thread that a weight should have, before tasks take more strips


@dataclass(frozen=True, eq=False)
class TileKind:
    """One way to multiply weights with many rows, and the packing of the rows for it.

    strip: weight rows per strip. block: activation rows per block. row_bytes: packed bytes of a row over DEPTH
    columns. most: most rows per launch, or None. reads_ahead: whether the kernel prefetches weights when rows are
    few. pack_kernel: packs one block per task, or with `by_panel` one block over DEPTH columns. product(w, blocks,
    matrices): the kernels and tasks that multiply w with `blocks` blocks of rows, where w is one of `matrices` weights
    of one shape and type that are multiplied at once.
    """

    strip: int
    block: int
    row_bytes: int
    most: int | None
    reads_ahead: bool
    pack_kernel: Callable[[], int]
    by_panel: bool
    product: Callable[[QuantTensor, int, int], _Product]


def tile_kind(w: QuantTensor) -> TileKind:
    """The fastest kind for a weight on this processor."""
    if has_amx():
        return _amx_bytes_kind() if uses_amx_bytes(w) else _amx_kind()
    return _int16_kind() if uses_vnni(w) else _float_kind()


@cache
def _amx_bytes_kind() -> TileKind:
    sizes = (amx_bytes.COLUMNS, amx_bytes.ROWS, amx_bytes.ROW_BYTES, amx_bytes.MOST_ROWS)
    return TileKind(*sizes, True, amx_bytes_pack_kernel, True, _amx_bytes_product)


@cache
def _amx_kind() -> TileKind:
    return TileKind(BLOCK, BLOCK, 4 * DEPTH, MOST_ROWS, False, amx_pack_kernel, True, _amx_product)


@cache
def _int16_kind() -> TileKind:
    tile = vnni.int16_tile()
    sizes = (tile.columns, tile.rows, vnni.ROW_BYTES, vnni.MOST_ROWS)
    return TileKind(*sizes, True, vnni_pack_kernel, False, _vnni_product)


@cache
def _float_kind() -> TileKind:
    tile = host_tile()
    return TileKind(tile.columns, tile.rows, 4 * DEPTH, None, False, pack_kernel, False, _product)


@cache
def _zeros(width: int) -> Tensor:
    """An addend [1, width], never written."""
    return torch.zeros(1, width)


def tile_matmul_launches(
    x: Tensor, parts: Sequence[QuantTensor], y: Tensor, addend: Tensor | None = None
) -> list[Launch]:
    """y = x times weights [N_i, K] transposed, side by side, plus addend (of y's shape, or one row).

    x fp32 [T, K], y fp32 [T, sum of N_i], contiguous; the addend may be y.
    """
    addend = _zeros(y.shape[1]) if addend is None else addend.contiguous()
    by_kind: dict[TileKind, list[_Placed]] = {}
    for column, w in zip(accumulate((w.rows for w in parts), initial=0), parts, strict=False):
        by_kind.setdefault(tile_kind(w), []).append((column, w))
    launches: list[Launch] = []
    for kind, placed in by_kind.items():
        most = kind.most or max(1, x.shape[0])
        for first in range(0, x.shape[0], most):
            rows = slice(first, first + most)
            added = addend[rows] if addend.shape[0] > 1 else addend
            launches += _packed_and_multiplied(x[rows], kind, placed, y[rows], added)
    return launches


def _packed_and_multiplied(
    x: Tensor, kind: TileKind, placed: Sequence[_Placed], y: Tensor, addend: Tensor
) -> list[Launch]:
    """`tile_matmul_launches` of at most `kind.most` rows: a launch that packs x, then one for each weight."""
    (rows, cols), panels = x.shape, -(-x.shape[1] // DEPTH)
    blocks = -(-rows // kind.block)
    packed = torch.empty(panels, blocks, kind.block, kind.row_bytes, dtype=torch.uint8)
    pack = PackArguments(x.data_ptr(), 4 * x.stride(0), rows, cols, packed.data_ptr(), blocks)
    tasks = panels * blocks if kind.by_panel else blocks
    launches = [Launch(kind.pack_kernel(), pack, tasks, keep=(x, packed))]
    stride = 4 * addend.stride(0) if addend.shape[0] > 1 else 0
    for number, (column, w) in enumerate(placed):
        kernel, panel, task_strips, tasks = kind.product(w, blocks, 1)
        arguments = MatmulArguments(
            *(w.data.data_ptr(), w.data.shape[1], w.rows, w.cols, packed.data_ptr(), rows),
            *(addend.data_ptr() + 4 * column, stride, y.data_ptr() + 4 * column, 4 * y.stride(0)),
            panel_kernel=panel,
            block_weights=w.format.block,
            block_bytes=w.format.nbytes,
            task_strips=task_strips,
        )
        launches.append(Launch(kernel, arguments, tasks, number == 0, (w, packed, y, addend)))
    return launches


def _product(w: QuantTensor, blocks: int, matrices: int) -> _Product:
    """The fp32 product; a task is a strip."""
    del blocks, matrices
    return tile_matmul_kernel(), panel_kernel(w.format.name), 1, -(-w.rows // host_tile().columns)


def _amx_product(w: QuantTensor, blocks: int, matrices: int) -> _Product:
    """The AMX product. Strips of one task share activations in the cache."""
    strips = -(-w.rows // BLOCK)
    of_task = max(1, min(MOST_BLOCKS // blocks, strips * matrices // (_TASKS * get_threads())))
    kernel = amx_matmul_kernel(True) if w.format.name in ONE_TERM else amx_matmul_kernel()
    return kernel, amx_panel_kernel(w.format.name), of_task, -(-strips // of_task)


def _amx_bytes_product(w: QuantTensor, blocks: int, matrices: int) -> _Product:
    """The product of bytes on AMX."""
    strips = -(-w.rows // amx_bytes.COLUMNS)
    most = min(amx_bytes.MOST_STRIPS, amx_bytes.MOST_SUMS // (blocks * amx_bytes.ROWS * amx_bytes.COLUMNS))
    of_task = _strips_of_task(strips, _fair(strips, most), get_threads(), matrices)
    panel = amx_bytes_panel_kernel(w.format.name)
    return amx_bytes_matmul_kernel(w.format.name), panel, of_task, -(-strips // of_task)


def _vnni_product(w: QuantTensor, blocks: int, matrices: int) -> _Product:
    """The int16 product."""
    tile = vnni.int16_tile()
    strips = -(-w.rows // tile.columns)
    most = min(vnni.MOST_STRIPS, vnni.MOST_SUMS // (blocks * tile.rows * tile.columns))
    of_task = _strips_of_task(strips, _fair(strips, most), get_threads(), matrices)
    panel = vnni_panel_kernel(w.format.name)
    return vnni_matmul_kernel(w.format.name), panel, of_task, -(-strips // of_task)


def _fair(strips: int, most: int) -> int:
    """The most strips per task, at least two, that leave _TASKS tasks per thread: with one task each, all threads would
    wait for one that another process delays."""
    return min(most, max(2, strips // (_TASKS * get_threads())))


def _strips_of_task(strips: int, most: int, threads: int, matrices: int = 1) -> int:
    """The most strips per task, up to `most`, that keep the slowest thread within 3% of an even share.

    With several matrices, which multiply different numbers of rows, the most that leave _TASKS tasks per thread.
    """
    if matrices > 1:
        return max(1, min(most, strips, strips * matrices // (_TASKS * threads)))
    for size in range(most, 1, -1):
        rounds, alone = divmod(-(-strips // size), threads)
        longest = rounds * size + (strips % size or size) * (alone == 1) + size * (alone > 1)
        if longest * threads <= 1.03 * strips:
            return size
    return 1
