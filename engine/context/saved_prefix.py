"""Keys and values of a prefix outside of the cache: copied from its blocks, and put back into free ones.

Between two steps, in torch, so that they are the same on every device and for every type of cache. Blocks that a prompt
can share are full and never written again, so what runs meanwhile does not matter.
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
    """A prefix, and what a cache held of its whole blocks.

    Attributes:
        token_ids: of the prefix. Those behind its last whole block have no keys and values here: only whole blocks are
            found by prompts.
        held: of each group of layers the indices of its blocks; one with a window has the last ones alone.
        layers: of each layer its tensors as `LayerState.blocks`, on the host: [blocks, BLOCK_SIZE, kv_heads, width], or
            its state at the end, [1, ...].
    """

    token_ids: list[int]
    held: list[list[int]]
    layers: list[list[Tensor]]

    @property
    def reusable_tokens(self) -> int:
        """Those that are not computed again: of whole blocks."""
        return len(self.token_ids) // BLOCK_SIZE * BLOCK_SIZE

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)


def save_prefix(scheduler: Scheduler, config: ModelConfig, token_ids: list[int]) -> SavedPrefix:
    """What the cache still holds of the beginning of these tokens, in whole blocks.

    Its tokens are all of these, or those of the blocks that are still held where some are not.
    """
    blocks = scheduler.blocks.held(_keys(token_ids))
    layers = [list[Tensor]() for _ in scheduler.cache.layers]
    for layer, values in read_blocks(scheduler, config, blocks):
        layers[layer].append(values.cpu())
    return SavedPrefix(
        token_ids[: _tokens(blocks, token_ids)], [list(of_group) for of_group in blocks], layers
    )


def restore_prefix(scheduler: Scheduler, config: ModelConfig, saved: SavedPrefix) -> None:
    """Put a prefix where prompts that begin with it find it; the least recently used blocks make room.

    Raises:
        EngineError: sequences that run leave too few blocks.
    """
    restore_blocks(scheduler, config, _keys(saved.token_ids), saved.held, saved.layers)


def read_blocks(
    scheduler: Scheduler, config: ModelConfig, blocks: Seq[Mapping[int, int]]
) -> Iterator[tuple[int, Tensor]]:
    """Of each group's blocks (by index, their numbers) each layer with each of its tensors [blocks, BLOCK_SIZE,
    kv_heads, width], on the device."""
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
    """Put blocks of the prefix with these keys, of each group those of the indices `held`, into free ones.

    Raises:
        EngineError: sequences that run leave too few blocks.
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
    """Let no prompt find the blocks of these tokens; how many tokens were there, as `save_prefix` counts them."""
    keys = _keys(token_ids)
    found = _tokens(scheduler.blocks.held(keys), token_ids)
    scheduler.blocks.discard(keys)
    return found


def _on_device(scheduler: Scheduler, numbers: Iterable[int]) -> Tensor:
    """Int64, where the cache is."""
    device = scheduler.cache.layers[0].tensors[0].device
    return torch.tensor(list(numbers), dtype=torch.int64).to(device)


def _tokens(blocks: Iterable[Iterable[int]], token_ids: list[int]) -> int:
    """How many of the tokens the blocks with these indices hold; all, where no whole block is missing."""
    held = max((index + 1 for of_group in blocks for index in of_group), default=0)
    return len(token_ids) if held == len(token_ids) // BLOCK_SIZE else held * BLOCK_SIZE


def _keys(token_ids: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, token_ids)
    return keys
