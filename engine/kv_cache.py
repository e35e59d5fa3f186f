"""The key/value cache of one sequence, allocated once for the whole context."""

from dataclasses import dataclass, field

import torch

from quengine.kernels.backend import KVLayer
from quengine.kernels.cache_types import CacheType
from quengine.kernels.kv_rows import allocate_layer
from quengine.models.config import ModelConfig


@dataclass
class KVCache:
    """`layers[i]` holds keys and values of `ctx_size` positions; `tokens` are the ids whose rows are valid."""

    layers: list[KVLayer]
    ctx_size: int
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def allocate(
        cls, config: ModelConfig, ctx_size: int, device: torch.device, cache_type: CacheType = "f16"
    ) -> "KVCache":
        """Reserve the memory now. Rows are written before they are read, so nothing is cleared.

        Raises EngineError where the model's heads cannot be stored in `cache_type`.
        """
        heads, head_dim = config.head_count_kv, config.head_dim
        layers = [
            allocate_layer(ctx_size, heads, head_dim, device, cache_type) for _ in range(config.block_count)
        ]
        return cls(layers, ctx_size)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)

    def common_prefix(self, ids: list[int]) -> int:
        """How many leading ids of a new sequence are already held."""
        count = 0
        for held, wanted in zip(self.tokens, ids, strict=False):
            if held != wanted:
                break
            count += 1
        return count
