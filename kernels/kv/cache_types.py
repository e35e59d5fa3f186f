"""The types a key-value cache can be stored in, how many bytes a row of each takes, and how many rows a block has.

A row is one head's key, or value, at one position.
"""

from typing import Literal, get_args

from quengine.errors import EngineError

CacheType = Literal["f16", "q8_0"]
CACHE_TYPES: tuple[CacheType, ...] = get_args(CacheType)

Q8_0_GROUP = 32
"""Values that share one scale in a q8_0 row."""

BLOCK_SIZE = 32
"""Positions in a block of a paged cache."""

CONV_HISTORY = 2 * BLOCK_SIZE
"""Positions that a short convolution's state holds, the newest ones: those that it reads next, those of drafted tokens,
which are written over when a draft is not accepted, and those behind the last full block."""

PADDING_BLOCK = 0
"""The block that no sequence owns: rows without a sequence write to it, and entries of a block table whose positions
are not read name it."""


def blocks_for(positions: int) -> int:
    """Blocks that hold so many positions."""
    return -(-positions // BLOCK_SIZE)


def row_bytes(cache_type: CacheType, head_dim: int) -> int:
    """Bytes of one row: 2 a value in f16; a code of 1 and a sixteenth of a scale, 2 for every 32, in q8_0.

    Raises EngineError where a head is not a whole number of q8_0 groups.
    """
    if cache_type == "f16":
        return 2 * head_dim
    check_head_dim(head_dim)
    return head_dim + 2 * head_dim // Q8_0_GROUP


def can_store(cache_type: CacheType, head_dim: int) -> bool:
    """Whether heads of this size can be stored in `cache_type`."""
    return cache_type == "f16" or head_dim % Q8_0_GROUP == 0


def check_head_dim(head_dim: int) -> None:
    """Raises EngineError where a head is not a whole number of q8_0 groups."""
    if not can_store("q8_0", head_dim):
        raise EngineError(
            f"a q8_0 cache needs a head size that is a multiple of {Q8_0_GROUP}, and this model's is {head_dim}; "
            "use --cache-type f16"
        )
