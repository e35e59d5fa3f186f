"""The key/value cache: blocks of positions that sequences share, allocated once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quengine.block_manager import CachePool
from quengine.kernels.backend import KVLayer
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK, CacheType, blocks_for
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.models.config import ModelConfig


@dataclass
class KVCache:
    """Keys and values of sequences of at most `ctx_size` positions.

    `pools`: the blocks of each group of layers (ModelConfig.cache_groups), at least as many as one sequence needs. A
    layer has (num_blocks + 1) * BLOCK_SIZE rows: those of the padding block, then those that sequences own.
    """

    layers: list[KVLayer]
    ctx_size: int
    pools: tuple[CachePool, ...]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        ctx_size: int,
        device: torch.device,
        cache_type: CacheType = "f16",
        pools: Sequence[CachePool] | None = None,
    ) -> "KVCache":
        """Reserve the memory now.

        `pools`: one per group of layers; without them every group has the blocks of one sequence, and keeps all
        positions. Rows are written before they are read, so nothing is cleared but the padding block:
        kernels read it behind a window, with a weight of 0. Raises EngineError where the model's heads cannot be stored
        in `cache_type`.
        """
        if pools is None:
            pools = [CachePool(blocks_for(ctx_size)) for _ in config.cache_groups]
        rows = [0] * config.block_count
        for group, pool in zip(config.cache_groups, pools, strict=True):
            for layer in group.layers:
                rows[layer] = (pool.num_blocks + 1) * BLOCK_SIZE
        heads, head_dim = config.head_count_kv, config.head_dim
        layers = [allocate_layer(count, heads, head_dim, device, cache_type) for count in rows]
        padding = slice(PADDING_BLOCK * BLOCK_SIZE, (PADDING_BLOCK + 1) * BLOCK_SIZE)
        for tensor in (tensor for layer in layers for tensor in layer.tensors):
            tensor[padding].zero_()
        return cls(layers, ctx_size, tuple(pools))

    @property
    def whole_tables(self) -> tuple[list[int], ...]:
        """Block tables for one sequence that has the whole cache to itself, in order from block 1 on.

        Where a pool has fewer blocks than the context, they are used again behind the window.
        """
        return tuple(
            [1 + index % pool.num_blocks for index in range(blocks_for(self.ctx_size))] for pool in self.pools
        )

    def most_sequences(self, positions: int) -> int:
        """How many sequences of so many positions the cache holds at once."""
        return min(pool.num_blocks // pool.most_blocks(positions) for pool in self.pools)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)
