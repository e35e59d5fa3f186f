"""The KV cache of a model: blocks of keys and values, shared by sequences, and recurrent states; allocated once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from quengine.block_manager import CachePool, StateCopy
from quengine.kernels.backend import LayerState, SlotLayer
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK, CacheType, blocks_for
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.memory import state_pool
from quengine.models.architectures import layers_of
from quengine.models.blocks.block import SlotState, State
from quengine.models.config import CacheGroup, ModelConfig


def pools_of_one(config: ModelConfig, ctx_size: int) -> list[CachePool]:
    """For each cache group, a pool with the blocks of one sequence that keeps all positions."""
    blocks = blocks_for(ctx_size)
    return [
        state_pool(config, group, 1) if group.is_state else CachePool(blocks) for group in config.cache_groups
    ]


def _allocate(state: State, blocks: int, device: torch.device, cache_type: CacheType) -> LayerState:
    """Allocates a layer's blocks. Keys and values are written before they are read; states begin as zeros."""
    if isinstance(state, SlotState):
        return SlotLayer(torch.zeros(blocks, *state.shape, dtype=torch.float32, device=device))
    return allocate_layer(blocks * BLOCK_SIZE, state.kv_heads, state.head_dim, device, cache_type)


@dataclass
class KVCache:
    """Keys and values, and recurrent states, of sequences of at most `ctx_size` positions each.

    `pools`: the pool of each cache group (ModelConfig.cache_groups), each with at least the blocks that one sequence
    needs. Each layer holds the padding block and then `num_blocks` blocks, each of BLOCK_SIZE rows of keys and values,
    or of one state.
    """

    layers: list[LayerState]
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
        """Allocates the cache.

        `pools`: one per cache group; None: every group has the blocks of one sequence, and keeps all positions. Keys
        and values are written before they are read, so only the padding block is cleared: kernels read it outside a
        window, with weight 0. Raises EngineError if the model's heads cannot be stored in `cache_type`.
        """
        if pools is None:
            pools = pools_of_one(config, ctx_size)
        blocks = [0] * config.block_count
        for group, pool in zip(config.cache_groups, pools, strict=True):
            for layer in group.layers:
                blocks[layer] = pool.num_blocks + 1
        layers = [
            _allocate(block.mixer.state, count, device, cache_type)
            for block, count in zip(layers_of(config), blocks, strict=True)
        ]
        for tensor in (tensor for layer in layers for tensor in layer.blocks if len(tensor)):
            tensor[PADDING_BLOCK].zero_()
        return cls(layers, ctx_size, tuple(pools))

    def copy_states(self, copies: Iterable[StateCopy], groups: Sequence[CacheGroup]) -> None:
        """Copies states between blocks of their cache groups, in stream order after the steps launched so far.

        `groups`: the model's.
        """
        for group, source, target in copies:
            for layer in groups[group].layers:
                for tensor in self.layers[layer].blocks:
                    tensor[target].copy_(tensor[source])

    @property
    def whole_tables(self) -> tuple[list[int], ...]:
        """Block tables of one sequence that has the whole cache to itself, in order from block 1 on.

        With a pool of fewer blocks than the context, blocks outside the window are used again.
        """
        blocks = blocks_for(self.ctx_size)
        return tuple(
            [1 + index % pool.num_blocks for index in range(1 if pool.is_state else blocks)]
            for pool in self.pools
        )

    def most_sequences(self, positions: int) -> int:
        """Number of sequences of `positions` positions that the cache holds at once."""
        return min(pool.num_blocks // pool.most_blocks(positions) for pool in self.pools)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)
