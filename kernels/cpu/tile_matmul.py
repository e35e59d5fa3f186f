"""Matmul of many activation rows ("prefill") on weights as stored, in fp32.

Strips of weight rows are dequantized panel by panel into the caches and multiplied with all activation rows. An element
of the result is the sum over the inner dimension in order, in one accumulator: it depends on its two rows alone, not
on the other rows or the number of threads.

Does not know: the model, what is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.kernels.cpu.compiled import host_tile
from quengine.kernels.cpu.threads import Launch
from quengine.kernels.cpu.tile_kernels import pack_kernel, panel_kernel, tile_matmul_kernel
from quengine.kernels.cpu.tiles import DEPTH
from quengine.kernels.quant_tensor import QuantTensor


def tile_matmul_launches(
    x: Tensor, parts: Sequence[QuantTensor], y: Tensor, addend: Tensor | None = None
) -> list[Launch]:
    """y = x times weights [N_i, K], transposed, side by side, plus addend (of y's shape, or one row of it).

    x fp32 [T, K], y fp32 [T, sum of N_i], contiguous; the addend may be y.
    """
    rows, tile = x.shape[0], host_tile()
    blocks = -(-rows // tile.rows)
    packed = torch.empty(-(-x.shape[1] // DEPTH), blocks, tile.rows, DEPTH)
    pack = (x.data_ptr(), 4 * x.stride(0), rows, x.shape[1], packed.data_ptr(), blocks)
    launches = [Launch(pack_kernel(), pack, blocks, keep=(x, packed))]
    addend = torch.zeros(1, y.shape[1]) if addend is None else addend.contiguous()
    stride = 4 * addend.stride(0) if addend.shape[0] > 1 else 0
    column = 0
    for w in parts:
        parameters = (
            *(w.data.data_ptr(), w.data.shape[1], w.rows, w.cols, packed.data_ptr(), rows),
            *(addend.data_ptr() + 4 * column, stride, y.data_ptr() + 4 * column, 4 * y.stride(0)),
            *(panel_kernel(w.format.name), w.format.block, w.format.nbytes),
        )
        tasks = -(-w.rows // tile.columns)
        launches.append(Launch(tile_matmul_kernel(), parameters, tasks, column == 0, (w, packed, y, addend)))
        column += w.rows
    return launches
