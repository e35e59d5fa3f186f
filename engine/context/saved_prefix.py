"""Keys and values of a prefix, copied out of the cache's blocks and restored into free ones.

Both happen between two steps, in torch, so that they work alike on every device and with every cache type. Blocks in
the prefix cache are full and never written again, so running sequences do not matter.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.block_manager import extend_keys
from quengine.errors import EngineError
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.models.config import ModelConfig
from quengine.scheduler import Scheduler


@dataclass(frozen=True)
class SavedPrefix:
    """A prefix, with the cached content of its full blocks.

    Attributes:
        token_ids: the prefix. Tokens after its last full block have no keys and values here: prompts find only full
            blocks.
        held: for each cache group the indices of its blocks; a group with a window has only the last ones.
        layers: for each layer its tensors as in `LayerState.blocks`, on the host: [blocks, BLOCK_SIZE, kv_heads,
            width], or its state at the end, [1, ...].
    """

    token_ids: list[int]
    held: list[list[int]]
    layers: list[list[Tensor]]

    @property
    def reusable_tokens(self) -> int:
        """Number of tokens in full blocks, which are not recomputed."""
        return len(self.token_ids) // BLOCK_SIZE * BLOCK_SIZE

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)


def save_prefix(scheduler: Scheduler, config: ModelConfig, token_ids: list[int]) -> SavedPrefix:
    """The cached beginning of these tokens, in full blocks.

    If all of its full blocks are cached, the prefix has all of these tokens, otherwise those of the cached blocks.
    """
    blocks = scheduler.blocks.held(_keys(token_ids))
    layers = [list[Tensor]() for _ in scheduler.cache.layers]
    for layer, values in read_blocks(scheduler, config, blocks):
        layers[layer].append(values.cpu())
    return SavedPrefix(
        token_ids[: _tokens(blocks, token_ids)], [list(of_group) for of_group in blocks], layers
    )


def restore_prefix(scheduler: Scheduler, config: ModelConfig, saved: SavedPrefix) -> None:
    """Restores a prefix into the prefix cache; the least recently used blocks are replaced.

    Raises:
        EngineError: running sequences leave too few blocks.
    """
    restore_blocks(scheduler, config, _keys(saved.token_ids), saved.held, saved.layers)


def read_blocks(
    scheduler: Scheduler, config: ModelConfig, blocks: Seq[Mapping[int, int]]
) -> Iterator[tuple[int, Tensor]]:
    """Yields each layer with each of its tensors [blocks, BLOCK_SIZE, kv_heads, width], on the device.

    `blocks`: for each cache group the numbers of its blocks by index.
    """
    for group, of_group in zip(config.cache_groups, blocks, strict=True):
        numbers = _on_device(scheduler, of_group.values())
        for layer in group.layers:
            for tensor in scheduler.cache.layers[layer].blocks:
                yield layer, tensor[numbers]


def restore_blocks(
    scheduler: Scheduler,
    config: ModelConfig,
    keys: Seq[bytes],
    held: Seq[Seq[int]],
    layers: Seq[Seq[Tensor]],
) -> None:
    """Restores the prefix blocks at the indices `held` of each cache group into free blocks, under `keys`.

    Raises:
        EngineError: running sequences leave too few blocks.
    """
    taken = scheduler.blocks.take_back(keys, held)
    if taken is None:
        raise EngineError(
            f"the cache has no room for its {len(keys) * BLOCK_SIZE} tokens: {scheduler.cache_used} of "
            f"{scheduler.cache_size} are in use"
        )
    for group, of_group, indices in zip(config.cache_groups, taken, held, strict=True):
        wanted = {row: of_group[index] for row, index in enumerate(indices) if index in of_group}
        numbers = _on_device(scheduler, wanted.values())
        rows = None if len(wanted) == len(indices) else _on_device(scheduler, wanted)
        for layer in group.layers:
            for tensor, values in zip(scheduler.cache.layers[layer].blocks, layers[layer], strict=True):
                there = values.to(tensor.device, non_blocking=True)
                tensor[numbers] = there if rows is None else there[rows]
    scheduler.blocks.given_back(keys, taken)


def erase_prefix(scheduler: Scheduler, token_ids: list[int]) -> int:
    """Removes these tokens from the prefix cache; returns how many were cached, counted as by `save_prefix`."""
    keys = _keys(token_ids)
    found = _tokens(scheduler.blocks.held(keys), token_ids)
    scheduler.blocks.discard(keys, token_ids)
    return found


def _on_device(scheduler: Scheduler, numbers: Iterable[int]) -> Tensor:
    """The numbers as an int64 tensor on the cache's device."""
    device = scheduler.cache.layers[0].tensors[0].device
    return torch.tensor(list(numbers), dtype=torch.int64).to(device)


def _tokens(blocks: Iterable[Iterable[int]], token_ids: list[int]) -> int:
    """Number of tokens that the blocks with these indices hold; all tokens if no full block is missing."""
    held = max((index + 1 for of_group in blocks for index in of_group), default=0)
    return len(token_ids) if held == len(token_ids) // BLOCK_SIZE else held * BLOCK_SIZE


def _keys(token_ids: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, token_ids)
    return keys
