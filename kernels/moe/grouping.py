"""Grouping of a step's rows by expert: (row, expert) pairs in blocks of one expert each.

A step of T rows with k experts each has P = T * k pairs. The pairs of an expert are padded to whole blocks, so that
each block is multiplied by one expert's matrix. The number of blocks is known on the device only; `most_blocks` is a
bound.
"""

from bisect import bisect_left

BLOCKS = ((4, 8), (9, 16), (20, 32), (64, 64), (384, 128), (1 << 30, 256))
"""(largest mean number of pairs per expert; rows of a block). A block holds the mean plus two standard
deviations, so that nearly every expert has one block: a second one dequantizes the expert again. Blocks of
256 rows dequantize half as often as those of 128, and pay off if less than a quarter of the rows are padding.
"""


def default_block(pairs: int, experts: int) -> int:
    """Number of rows of a block for `pairs` pairs of `experts` experts: a power of two from 8 to 256."""
    return BLOCKS[bisect_left([most for most, _ in BLOCKS], -(-pairs // experts))][1]


def most_blocks(pairs: int, experts: int, block: int) -> int:
    """Maximum number of blocks of `pairs` pairs: each selected expert leaves up to block - 1 rows empty."""
    return (pairs + min(pairs, experts) * (block - 1)) // block
