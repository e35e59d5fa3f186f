"""The key/value cache: blocks of positions that sequences share, allocated once."""

from dataclasses import dataclass

import torch

from quengine.kernels.backend import KVLayer
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CacheType
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.models.config import ModelConfig


@dataclass
class KVCache:
    """Keys and values of sequences of at most `ctx_size` positions.

    `num_blocks` blocks of BLOCK_SIZE rows that sequences own, at least as many as one sequence needs, and behind them
    the padding block, which rows without a sequence write to.
    """

    layers: list[KVLayer]
    ctx_size: int
    num_blocks: int

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        ctx_size: int,
        device: torch.device,
        cache_type: CacheType = "f16",
        num_blocks: int | None = None,
    ) -> "KVCache":
        """Reserve the memory now; `num_blocks` None: the blocks of one sequence.

        Rows are written before they are read, so nothing is cleared. Raises EngineError where the model's heads cannot
        be stored in `cache_type`.
        """
        blocks = blocks_for(ctx_size) if num_blocks is None else num_blocks
        heads, head_dim = config.head_count_kv, config.head_dim
        rows = (blocks + 1) * BLOCK_SIZE
        layers = [
            allocate_layer(rows, heads, head_dim, device, cache_type) for _ in range(config.block_count)
        ]
        return cls(layers, ctx_size, blocks)

    @property
    def padding_block(self) -> int:
        """The block that rows without a sequence write to."""
        return self.num_blocks

    @property
    def whole_table(self) -> list[int]:
        """A block table in which position p is row p, for who has the whole cache to himself."""
        return list(range(blocks_for(self.ctx_size)))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)


def blocks_for(positions: int) -> int:
    """Blocks that hold so many positions."""
    return -(-positions // BLOCK_SIZE)
