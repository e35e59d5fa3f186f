"""The constants of one layer's latent attention, which kernels/latent_attention.py defines."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quengine.kernels.rope import RopeLayout


@dataclass(frozen=True)
class LatentSpec:
    """The constants of one layer's latent attention.

    heads: query heads. rank: elements of the latent. plain, rotated: a query has `plain` elements that are not rotated,
    then `rotated` elements that are. values: elements of a head's value. `cos`, `sin`, `rope_layout`, `mask_band`,
    `query_scale`, `cache_group`: as in AttentionSpec. norm [rank], eps: of the latent. absorb, expand: the matrices
    [rank, plain] and [values, rank] of the heads, in the backend's form (`Backend.down_experts`).
    """

    heads: int
    rank: int
    plain: int
    rotated: int
    values: int
    scale: float
    rope_layout: RopeLayout
    cos: Tensor
    sin: Tensor
    mask_band: Tensor
    norm: Tensor
    eps: float
    absorb: Any
    expand: Any
    query_scale: Tensor | None = None
    cache_group: int = 0

    @property
    def row(self) -> int:
        """Elements of a cached row."""
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        """Elements of a query before its matrix is applied."""
        return self.plain + self.rotated
