"""How the rows of a step are grouped by expert: (row, expert) pairs in blocks of one expert each, by numbers alone.

A step of T rows with k experts each has P = T * k pairs. Those of an expert are padded to whole blocks, so that a block
is multiplied by one expert's matrix. How many blocks there are is known on the device only; `most_blocks` is a bound.
"""

from bisect import bisect_left

BLOCKS = ((4, 8), (9, 16), (20, 32), (64, 64), (384, 128), (1 << 30, 256))
"""(pairs of an expert on average, up to; rows of a block). A block holds the mean and two standard deviations of it, so
that nearly every expert has one block: a second one dequantizes the expert again. Blocks of 256 rows dequantize half as
often as those of 128, and pay where fewer than every fourth row is padding."""


def default_block(pairs: int, experts: int) -> int:
    """Rows of a block for so many pairs and experts: a power of two from 8 to 256."""
    return BLOCKS[bisect_left([most for most, _ in BLOCKS], -(-pairs // experts))][1]


def most_blocks(pairs: int, experts: int, block: int) -> int:
    """Blocks that so many pairs fill at most: each expert that is chosen leaves up to block - 1 rows empty."""
    return (pairs + min(pairs, experts) * (block - 1)) // block
