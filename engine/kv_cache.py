"""The KV cache of a model: blocks of keys and values, shared by sequences, and recurrent states; allocated once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quengine.block_pool import BlockCopy, CachePool
from quengine.kernels.backend import KVLayer, LayerState, SlotLayer
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK, CacheType, blocks_for
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.memory import cold_slab, state_pool
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
    """A layer's blocks of keys and values, uninitialized: rows are written before they are read. A layer with a state
    belongs to another rank, and gets no blocks."""
    if isinstance(state, SlotState):
        return SlotLayer(tuple(torch.empty(0, *shape, device=device) for shape in state.shapes))
    rows = blocks * BLOCK_SIZE
    return allocate_layer(rows, state.kv_heads, state.head_dim, device, cache_type, state.latent)


def _allocate_states(
    declared: Sequence[State], layers: Iterable[int], blocks: int, device: torch.device
) -> tuple[list[Tensor], dict[int, LayerState]]:
    """The states of a group's layers, zeros: each part of all layers as [layers, blocks, ...], so that one copy serves
    them all, and the views of each layer by its number."""
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


def _copy_states(part: Tensor, source: int, target: int) -> None:
    """Copies part[:, source] to part[:, target] in states [layers, blocks, ...]. On the CPU a kernel does it: after a
    large copy by torch, torch's threads would spin beside those of the kernels."""
    if part.device.type == "cpu":
        from quengine.kernels.cpu.ops.state_copy import copy_states

        copy_states(part, source, target)
    else:
        part[:, target].copy_(part[:, source])


class ColdStates:
    """Blocks of a group of states in host memory, numbered from 0. A CUDA device copies to and from them while the host
    goes on.

    Memory is allocated when a block is first written, for several at once (`cold_slab`), and pinned if the states are
    on a CUDA device. parts: the group's states, [layers, blocks, ...] each.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = parts
        self._sizes = [part[:, 0].numel() for part in parts]
        self._slab = cold_slab(4 * sum(self._sizes))
        self._slabs = dict[int, Tensor]()

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(slab.nbytes for slab in self._slabs.values())

    def put(self, block: int, source: int) -> None:
        """Copy the device's block `source` to this one."""
        for held, own in self._layers(block, source):
            held.copy_(own, non_blocking=True)

    def get(self, block: int, target: int) -> None:
        """Copy this block to the device's block `target`."""
        for held, own in self._layers(block, target):
            own.copy_(held, non_blocking=True)

    def _layers(self, block: int, on_device: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each part and layer the values here and on the device, both contiguous."""
        slab, row = divmod(block, self._slab)
        if slab not in self._slabs:
            self._slabs[slab] = self._allocated()
        split = self._slabs[slab][row].split_with_sizes(self._sizes)
        for part, held in zip(self._parts, split, strict=True):
            for layer, values in zip(part, held.view(len(part), -1), strict=True):
                yield values, layer[on_device].view(-1)

    def _allocated(self) -> Tensor:
        shape, is_cuda = (self._slab, sum(self._sizes)), self._parts[0].is_cuda
        try:
            return torch.empty(shape, dtype=torch.float32, pin_memory=is_cuda)
        except RuntimeError:  # the system pins no more: copies wait for the device
            return torch.empty(shape, dtype=torch.float32)


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
    cold: dict[int, ColdStates] = field(default_factory=dict)
    """The blocks in host memory (`CachePool.cold`), by group."""

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
        window, with weight 0. `keeps_hidden`: also allocates hidden rows, zeros. Raises EngineError if the model's
        heads cannot be stored in `cache_type`.
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
            cache.keep_hidden(config.embedding_length, torch.float16, device)
        return cache

    def keep_hidden(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates room for hidden rows, zeros."""
        rows = (self.pools[0].num_blocks + 1) * BLOCK_SIZE
        self.hidden = torch.zeros(rows, width, dtype=dtype, device=device)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copies blocks within their groups, in stream order after the steps launched so far; also to and from host
        memory."""
        for group, source, target in copies:
            first_cold = self.pools[group].num_blocks + 1
            if target >= first_cold:
                self._cold_of(group).put(target - first_cold, source)
                continue
            if source >= first_cold:
                self._cold_of(group).get(source - first_cold, target)
                continue
            for part in self.states[group]:
                _copy_states(part, source, target)
            held = (self.layers[layer] for layer in self.groups[group])
            blocks = [block for layer in held if isinstance(layer, KVLayer) for block in layer.blocks]
            if group == 0 and self.hidden is not None:
                blocks.append(self.hidden.view(-1, BLOCK_SIZE, self.hidden.shape[1]))
            for block in blocks:
                block[target].copy_(block[source])

    def _cold_of(self, group: int) -> ColdStates:
        if group not in self.cold:
            self.cold[group] = ColdStates(self.states[group])
        return self.cold[group]

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

    def spare_bytes(self, sequences: int, positions: int) -> int:
        """Bytes of the blocks that `sequences` sequences of `positions` positions never own. Blocks for checkpoints do
        not count."""
        spare = 0
        for group, pool in enumerate(self.pools):
            needed = sequences * pool.most_blocks(positions) + pool.checkpoints
            unused = max(0, pool.num_blocks - needed)
            held = sum(tensor.nbytes for layer in self.groups[group] for tensor in self.layers[layer].tensors)
            held += self.hidden.nbytes if group == 0 and self.hidden is not None else 0
            spare += unused * (held // (pool.num_blocks + 1))
        return spare

    @property
    def nbytes(self) -> int:
        hidden = 0 if self.hidden is None else self.hidden.nbytes
        return hidden + sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)
