"""Matmul of many activation rows ("prefill") on weights as stored: in fp32, on int16 or on AMX.

Strips of weight rows are dequantized panel by panel into the caches and multiplied with all activation rows. An element
of the result is the sum over the inner dimension in order, in one accumulator: it depends on its two rows alone, not
on the other rows or the number of threads. AMX, where there is any, takes an fp32 as two bf16
(amx.py); K-quants without them are multiplied as integers where the processor adds up their products
(vnni.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quengine.kernels.cpu.gemm import vnni
from quengine.kernels.cpu.gemm.amx import BLOCK, MOST_BLOCKS, MOST_ROWS, has_amx
from quengine.kernels.cpu.gemm.tiles import DEPTH, MatmulArguments, PackArguments
from quengine.kernels.cpu.gemm.vnni import uses_vnni
from quengine.kernels.cpu.runtime.kernel_table import (
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

_Placed = tuple[int, QuantTensor]  # the first of its columns, and a weight
_Product = tuple[int, int, int, int]  # kernels that multiply and that make panels, strips of a task, tasks
_TASKS = 4  # a thread should get of a weight, before tasks become longer


def tile_matmul_launches(
    x: Tensor, parts: Sequence[QuantTensor], y: Tensor, addend: Tensor | None = None
) -> list[Launch]:
    """y = x times weights [N_i, K], transposed, side by side, plus addend (of y's shape, or one row of it).

    x fp32 [T, K], y fp32 [T, sum of N_i], contiguous; the addend may be y.
    """
    addend = torch.zeros(1, y.shape[1]) if addend is None else addend.contiguous()
    words: list[_Placed] = []
    others: list[_Placed] = []
    for column, w in zip(accumulate((w.rows for w in parts), initial=0), parts, strict=False):
        (words if uses_vnni(w) and not has_amx() else others).append((column, w))
    launches: list[Launch] = []
    for placed, make, most in (
        (words, _vnni_launches, vnni.MOST_ROWS),
        (others, _launches, MOST_ROWS if has_amx() else max(1, x.shape[0])),
    ):
        for first in range(0, x.shape[0] if placed else 0, most):
            rows = slice(first, first + most)
            launches += make(x[rows], placed, y[rows], addend[rows] if addend.shape[0] > 1 else addend)
    return launches


def _launches(x: Tensor, placed: Sequence[_Placed], y: Tensor, addend: Tensor) -> list[Launch]:
    """As `tile_matmul_launches`, of so many rows as a launch takes, in fp32 or on AMX."""
    rows, block = x.shape[0], BLOCK if has_amx() else host_tile().rows
    blocks, panels = -(-rows // block), -(-x.shape[1] // DEPTH)
    packed = torch.empty(panels, blocks, block, DEPTH)
    packing = (amx_pack_kernel(), panels * blocks) if has_amx() else (pack_kernel(), blocks)
    product = _amx_product if has_amx() else _product
    return _packed_and_multiplied(x, packed, packing, blocks, placed, product, y, addend)


def _vnni_launches(x: Tensor, placed: Sequence[_Placed], y: Tensor, addend: Tensor) -> list[Launch]:
    """The same on int16."""
    (rows, cols), block = x.shape, vnni.TILE.rows
    blocks = -(-rows // block)
    packed = torch.empty(cols // DEPTH, blocks, block, vnni.ROW_BYTES, dtype=torch.uint8)
    packing = (vnni_pack_kernel(), blocks)
    return _packed_and_multiplied(x, packed, packing, blocks, placed, _vnni_product, y, addend)


def _packed_and_multiplied(
    x: Tensor,
    packed: Tensor,
    packing: tuple[int, int],
    blocks: int,
    placed: Sequence[_Placed],
    product: Callable[[QuantTensor, int], _Product],
    y: Tensor,
    addend: Tensor,
) -> list[Launch]:
    """The launch that packs x, by a kernel in so many tasks (`packing`), and one for each weight."""
    pack = PackArguments(x.data_ptr(), 4 * x.stride(0), x.shape[0], x.shape[1], packed.data_ptr(), blocks)
    launches = [Launch(packing[0], pack, packing[1], keep=(x, packed))]
    stride = 4 * addend.stride(0) if addend.shape[0] > 1 else 0
    for number, (column, w) in enumerate(placed):
        kernel, panel, task_strips, tasks = product(w, blocks)
        arguments = MatmulArguments(
            *(w.data.data_ptr(), w.data.shape[1], w.rows, w.cols, packed.data_ptr(), x.shape[0]),
            *(addend.data_ptr() + 4 * column, stride, y.data_ptr() + 4 * column, 4 * y.stride(0)),
            panel_kernel=panel,
            block_weights=w.format.block,
            block_bytes=w.format.nbytes,
            task_strips=task_strips,
        )
        launches.append(Launch(kernel, arguments, tasks, number == 0, (w, packed, y, addend)))
    return launches


def _product(w: QuantTensor, blocks: int) -> _Product:
    """In fp32, of so many blocks of activation rows."""
    del blocks
    return tile_matmul_kernel(), panel_kernel(w.format.name), 1, -(-w.rows // host_tile().columns)


def _amx_product(w: QuantTensor, blocks: int) -> _Product:
    """On AMX. The strips of one task share activations in the cache."""
    strips = -(-w.rows // BLOCK)
    of_task = max(1, min(MOST_BLOCKS // blocks, strips // (_TASKS * get_threads())))
    return amx_matmul_kernel(), amx_panel_kernel(w.format.name), of_task, -(-strips // of_task)


def _vnni_product(w: QuantTensor, blocks: int) -> _Product:
    """On int16."""
    tile = vnni.TILE
    strips = -(-w.rows // tile.columns)
    most = min(vnni.MOST_STRIPS, vnni.MOST_SUMS // (blocks * tile.rows * tile.columns))
    of_task = _strips_of_task(strips, most, get_threads())
    panel = vnni_panel_kernel(w.format.name)
    return vnni_matmul_kernel(w.format.name), panel, of_task, -(-strips // of_task)


def _strips_of_task(strips: int, most: int, threads: int) -> int:
    """As many strips a task, up to `most`, as leave no thread at work for long when the others have finished."""
    for size in range(most, 1, -1):
        rounds, alone = divmod(-(-strips // size), threads)
        longest = rounds * size + (strips % size or size) * (alone == 1) + size * (alone > 1)
        if longest * threads <= 1.03 * strips:
            return size
    return 1
