"""The key/value cache, allocated once: the whole context of one sequence, or blocks that many share."""

from dataclasses import dataclass, field

import torch

from quengine.kernels.backend import BLOCK_SIZE, KVLayer
from quengine.kernels.cache_types import CacheType
from quengine.kernels.kv_rows import allocate_layer
from quengine.models.config import ModelConfig


@dataclass
class KVCache:
    """Keys and values of sequences of at most `ctx_size` positions.

    Contiguous (`num_blocks` is 0): one sequence, position p in row p; `tokens` are the ids whose rows are valid.
    Paged: `num_blocks` blocks of BLOCK_SIZE rows that sequences own, and behind them the spare one, of which no
    sequence knows; there are at least as many as one sequence needs.
    """

    layers: list[KVLayer]
    ctx_size: int
    tokens: list[int] = field(default_factory=list)
    num_blocks: int = 0

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        ctx_size: int,
        device: torch.device,
        cache_type: CacheType = "f16",
        num_blocks: int = 0,
    ) -> "KVCache":
        """Reserve the memory now. Rows are written before they are read, so nothing is cleared.

        Raises EngineError where the model's heads cannot be stored in `cache_type`.
        """
        heads, head_dim = config.head_count_kv, config.head_dim
        rows = (num_blocks + 1) * BLOCK_SIZE if num_blocks else ctx_size
        if device.type == "cuda":  # kernels for blocks take this one too
            rows = -(-rows // BLOCK_SIZE) * BLOCK_SIZE
        layers = [
            allocate_layer(rows, heads, head_dim, device, cache_type) for _ in range(config.block_count)
        ]
        return cls(layers, ctx_size, num_blocks=num_blocks)

    @property
    def spare_block(self) -> int:
        """The block that rows without a sequence write to."""
        return self.num_blocks

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
