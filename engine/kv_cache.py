"""The key/value cache of one sequence, allocated once for the whole context."""

from dataclasses import dataclass, field

import torch

from quengine.kernels.backend import KVLayer
from quengine.models.config import ModelConfig

CACHE_DTYPE = torch.float16


@dataclass
class KVCache:
    """`layers[i]` holds k and v as [ctx_size, kv_heads, head_dim]; `tokens` are the ids whose rows are valid."""

    layers: list[KVLayer]
    ctx_size: int
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def allocate(cls, config: ModelConfig, ctx_size: int, device: torch.device) -> "KVCache":
        """Reserve the memory now. Rows are written before they are read, so nothing is cleared."""
        shape = (ctx_size, config.head_count_kv, config.head_dim)

        def buffer() -> torch.Tensor:
            return torch.empty(shape, dtype=CACHE_DTYPE, device=device)

        return cls([KVLayer(buffer(), buffer()) for _ in range(config.block_count)], ctx_size)

    @property
    def nbytes(self) -> int:
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)

    def common_prefix(self, ids: list[int]) -> int:
        """How many leading ids of a new sequence are already held."""
        count = 0
        for held, wanted in zip(self.tokens, ids, strict=False):
            if held != wanted:
                break
            count += 1
        return count
