"""The data types of a KV cache, the bytes of a row in each, and the rows of a block.

A row is one head's key, or value, at one position.
"""

from typing import Literal, get_args

from quengine.errors import EngineError

CacheType = Literal["f16", "q8_0"]
CACHE_TYPES: tuple[CacheType, ...] = get_args(CacheType)

Q8_0_GROUP = 32
"""Number of values that share one scale in a q8_0 row."""

BLOCK_SIZE = 32
"""Number of positions in a block of a paged cache."""

CONV_HISTORY = 2 * BLOCK_SIZE
"""Number of positions that a short convolution's state holds, the newest ones: those that the next step
reads, those of drafted tokens, which are overwritten if the draft is rejected, and those after the last full
block.
"""

PADDING_BLOCK = 0
"""The block that no sequence owns: rows without a sequence write to it, and tables list it for unread positions."""


def blocks_for(positions: int) -> int:
    """Number of blocks that hold `positions` positions."""
    return -(-positions // BLOCK_SIZE)


def row_bytes(cache_type: CacheType, head_dim: int) -> int:
    """Bytes of one row: in f16 2 per value; in q8_0 a code of 1 byte per value and an fp16 scale per 32 values.

    Raises EngineError if a head is not a whole number of q8_0 groups.
    """
    if cache_type == "f16":
        return 2 * head_dim
    check_head_dim(head_dim)
    return head_dim + 2 * head_dim // Q8_0_GROUP


def can_store(cache_type: CacheType, head_dim: int) -> bool:
    """Whether heads of this size can be stored in `cache_type`."""
    return cache_type == "f16" or head_dim % Q8_0_GROUP == 0


def check_head_dim(head_dim: int) -> None:
    """Raises EngineError if a head is not a whole number of q8_0 groups."""
    if not can_store("q8_0", head_dim):
        raise EngineError(
            f"a q8_0 cache needs a head size that is a multiple of {Q8_0_GROUP}, and this model's is {head_dim}; "
            "use --cache-type f16"
        )
