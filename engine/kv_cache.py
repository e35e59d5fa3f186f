"""The KV cache of a model: blocks of keys and values, shared by sequences, and recurrent states; allocated once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.block_manager import BlockCopy, CachePool
from quengine.kernels.backend import KVLayer, LayerState, SlotLayer
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK, CacheType, blocks_for
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.memory import state_pool
from quengine.models.architectures import layers_of
from quengine.models.blocks.block import SlotState, State
from quengine.models.config import ModelConfig


def pools_of_one(config: ModelConfig, ctx_size: int) -> list[CachePool]:
    """For each cache group, a pool with the blocks of one sequence that keeps all positions."""
    blocks = blocks_for(ctx_size)
    return [
        state_pool(config, group, 1) if group.is_state else CachePool(blocks) for group in config.cache_groups
    ]


def _allocate(state: State, blocks: int, device: torch.device, cache_type: CacheType) -> LayerState:
    """A layer's blocks of keys and values, whose rows are written before they are read; of a state, that some other
    rank keeps, none."""
    if isinstance(state, SlotState):
        return SlotLayer(tuple(torch.empty(0, *shape, device=device) for shape in state.shapes))
    rows = blocks * BLOCK_SIZE
    return allocate_layer(rows, state.kv_heads, state.head_dim, device, cache_type, state.latent)


def _allocate_states(
    declared: Sequence[State], layers: Iterable[int], blocks: int, device: torch.device
) -> tuple[list[Tensor], dict[int, LayerState]]:
    """States of a group's layers, zeros: of each part [layers, blocks, ...], so that a state is copied in all layers
    at once, and each layer's own."""
    alike: dict[SlotState, list[int]] = {}
    for layer in layers:
        if isinstance(state := declared[layer], SlotState):
            alike.setdefault(state, []).append(layer)
    stacks, of_layers = list[Tensor](), dict[int, LayerState]()
    for state, numbers in alike.items():
        parts = [
            torch.zeros(len(numbers), blocks, *shape, dtype=torch.float32, device=device)
            for shape in state.shapes
        ]
        stacks += parts
        of_layers |= {layer: SlotLayer(tuple(part[n] for part in parts)) for n, layer in enumerate(numbers)}
    return stacks, of_layers


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
    states: tuple[tuple[Tensor, ...], ...] = ()
    """For each group whose layers keep states: the states of all its layers, as tensors [layers, blocks, ...]."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The layers of each group."""
    hidden: Tensor | None = None
    """Hidden rows for a layer that drafts tokens, in blocks of the first group (kernels/hidden_rows.py)."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        ctx_size: int,
        device: torch.device,
        cache_type: CacheType = "f16",
        pools: Sequence[CachePool] | None = None,
        keeps_hidden: bool = False,
    ) -> "KVCache":
        """Allocates the cache.

        `pools`: one per cache group; None: every group has the blocks of one sequence, and keeps all positions. Keys
        and values are written before they are read, so only the padding block is cleared: kernels read it outside a
        window, with weight 0. `keeps_hidden`: with room for hidden rows, zeros. Raises EngineError if the model's heads
        cannot be stored in `cache_type`.
        """
        if pools is None:
            pools = pools_of_one(config, ctx_size)
        declared = [block.state for block in layers_of(config)]
        blocks, kept, states = [0] * len(declared), dict[int, LayerState](), list[tuple[Tensor, ...]]()
        for group, pool in zip(config.cache_groups, pools, strict=True):
            for layer in group.layers:
                blocks[layer] = pool.num_blocks + 1
            stacks, of_layers = _allocate_states(declared, group.layers, pool.num_blocks + 1, device)
            states.append(tuple(stacks))
            kept |= of_layers
        layers = [
            kept[layer] if layer in kept else _allocate(state, blocks[layer], device, cache_type)
            for layer, state in enumerate(declared)
        ]
        for tensor in (tensor for layer in layers for tensor in layer.blocks if len(tensor)):
            tensor[PADDING_BLOCK].zero_()
        groups = tuple(tuple(group.layers) for group in config.cache_groups)
        cache = cls(layers, ctx_size, tuple(pools), tuple(states), groups)
        if keeps_hidden:
            rows = (pools[0].num_blocks + 1) * BLOCK_SIZE
            width = config.embedding_length
            cache.hidden = torch.zeros(rows, width, dtype=torch.float16, device=device)
        return cache

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks within their groups, behind the steps that were launched before."""
        for group, source, target in copies:
            for part in self.states[group]:
                part[:, target].copy_(part[:, source])
            held = (self.layers[layer] for layer in self.groups[group])
            blocks = [block for layer in held if isinstance(layer, KVLayer) for block in layer.blocks]
            if group == 0 and self.hidden is not None:
                blocks.append(self.hidden.view(-1, BLOCK_SIZE, self.hidden.shape[1]))
            for block in blocks:
                block[target].copy_(block[source])

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
        hidden = 0 if self.hidden is None else self.hidden.nbytes
        return hidden + sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)
