"""The factors of changes, in the orders in which Hopper's kernels for several rows read them.

A is wgmma's left operand, as words of two fp16. Places of columns in the WGMMA layout (fp16_operand.py) form blocks of
16. For each tile of 16 ranks and 128 columns, word number 4 * block + 2 * p + rh of lane q of quad g holds rank
8 * rh + g at places 8 * p + 2 * q and 8 * p + 2 * q + 1 of the block. B has a row for each rank. Columns
2 * p + 16 * h + e of 128 are in the order p, h, e, in which a thread has them when it writes a normed row
(rms_norm_wgmma.py).
"""

import torch
from torch import Tensor

from quengine.kernels.lora.low_rank import RANKS_AT_ONCE

WORD_COLUMNS = 256
"""A's columns are padded to a multiple of this, with zeros: the most that a matmul stages at a time."""
_BLOCK = 128


def rank_words(a: Tensor) -> Tensor:
    """A, fp16 [any, K], a multiple of 16 ranks, as int32 [tiles, chunks of 128 columns, 32 words, 32 lanes]."""
    ranks, cols = a.shape
    tiles, padded = ranks // RANKS_AT_ONCE, -(-cols // WORD_COLUMNS) * WORD_COLUMNS
    if a.is_meta:
        return torch.empty(tiles, padded // _BLOCK, 32, 32, dtype=torch.int32, device=a.device)
    whole = torch.nn.functional.pad(a, (0, padded - cols))
    split = whole.view(tiles, 2, 8, padded // _BLOCK, 4, 4, 2, 2, 2)  # tile, rh, g, chunk, q, j, h, p, e
    ordered = split.permute(0, 3, 5, 6, 7, 1, 2, 4, 8).contiguous()
    return ordered.view(torch.int32).view(tiles, padded // _BLOCK, 32, 32)


def rank_rows(b: Tensor) -> Tensor:
    """B, fp16 [N, ranks], as fp16 [ranks, N padded to 128], the columns of a rank in the order of a normed row."""
    rows, ranks = b.shape
    blocks = -(-rows // _BLOCK)
    if b.is_meta:
        return torch.empty(ranks, blocks * _BLOCK, dtype=b.dtype, device=b.device)
    whole = torch.nn.functional.pad(b.T, (0, blocks * _BLOCK - rows))
    split = whole.view(ranks, blocks, 8, 8, 2)  # rank, block, h, p, e
    return split.permute(0, 1, 3, 2, 4).reshape(ranks, blocks * _BLOCK).contiguous()
