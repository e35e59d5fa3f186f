"""The data types of a KV cache, the bytes of a row in each, and the rows of a block.

A row is one head's key, or value, at one position.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from quengine.errors import EngineError

CacheType = Literal["f16", "q8_0", "q4_0"]
CACHE_TYPES: tuple[CacheType, ...] = get_args(CacheType)


@dataclass(frozen=True)
class CacheFormat:
    """How rows are stored: bits of a value, whether values are codes with a scale for every CODE_GROUP, and whether
    rows are transformed first (kernels/hadamard.py), as are queries, and the output transformed back."""

    bits: int
    coded: bool = False
    hadamard: bool = False


CACHE_FORMATS: dict[CacheType, CacheFormat] = {
    "f16": CacheFormat(16),
    "q8_0": CacheFormat(8, coded=True),
    "q4_0": CacheFormat(4, coded=True, hadamard=True),
}

CODE_GROUP = 32
"""Number of values that share one scale in a row of codes."""

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


def row_bytes(cache_type: CacheType, head_dim: int, latent: bool = False) -> int:
    """Bytes of one row: its values and, for codes, an fp16 scale for every CODE_GROUP values.

    Raises EngineError for rows that cannot be stored in `cache_type`.
    """
    check_rows(cache_type, head_dim, latent)
    held = CACHE_FORMATS[cache_type]
    return held.bits * head_dim // 8 + (2 * head_dim // CODE_GROUP if held.coded else 0)


def can_store(cache_type: CacheType, head_dim: int, latent: bool = False) -> bool:
    """Whether heads of this size can be stored in `cache_type`, or latents (kernels/latent_attention.py)."""
    return not refusal(cache_type, head_dim, latent)


def refusal(cache_type: CacheType, head_dim: int, latent: bool = False) -> str:
    """Why such rows cannot be stored in `cache_type`; empty: they can."""
    held = CACHE_FORMATS[cache_type]
    if held.coded and head_dim % CODE_GROUP:
        return f"a head size that is a multiple of {CODE_GROUP}, and this model's is {head_dim}"
    if held.hadamard and latent:
        return "a key and a value of each head, and this model keeps one latent for all"
    return ""


def check_rows(cache_type: CacheType, head_dim: int, latent: bool = False) -> None:
    """Raises EngineError for rows that cannot be stored in `cache_type`."""
    if why := refusal(cache_type, head_dim, latent):
        others = " or ".join(t for t in CACHE_TYPES if can_store(t, head_dim, latent))
        raise EngineError(f"a {cache_type} cache needs {why}; use --cache-type {others}")
