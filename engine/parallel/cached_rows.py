"""Reads and writes keys and values in the cache's first blocks, with the heads of all ranks, and the states of the
sequence that has these blocks (channels take the place of heads).

Tensors of one shape and type, from many layers, are exchanged between ranks and copied between host and device as one
array, in which they lie side by side, with a row for each position.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from quengine.kernels.kv.kv_rows import slot_mapping
from quengine.model_runner import ModelRunner
from quengine.models.architectures import layers_of
from quengine.models.blocks.block import Shape, SlotState, State
from quengine.models.config import ModelConfig
from quengine.parallel.wire import ReadCache, WriteCache

_MOST_BYTES = 32 << 20
"""The most bytes of a rank in one exchange of several tensors; one tensor may have more."""


class _Stored(NamedTuple):
    """A tensor of a layer, [slots, heads, ...], and the slots of the positions, [n], or of the sequence, [1]; empty if
    not `held`. sections: of the heads, see SlotState."""

    layer: int
    held: bool
    is_state: bool
    tensor: Tensor
    slots: Tensor
    sections: Shape = (1,)

    @property
    def row_bytes(self) -> int:
        return prod(self.tensor.shape[1:]) * self.tensor.itemsize


def read_cached(runner: ModelRunner, start: int, end: int, whole: ModelConfig) -> list[Tensor]:
    """A copy on the host of the cache at positions start .. end - 1, for rank 0 to call.

    For each layer: keys and values, or their codes and scales, [n, kv_heads, width] each; or each part of its state,
    [1, channels, rows] or [1, heads, ...]. whole: the configuration of the whole model, not of one rank.
    """
    stored, states = list(_stored(runner, start, end)), [block.state for block in layers_of(whole)]
    rows = dict[int, Tensor]()
    with runner.together(ReadCache(start, end)):
        for group, parts in _gathered(runner, stored, end - start):
            rows |= zip(group, _joined(parts.cpu(), stored[group[0]].sections).unbind(1), strict=True)
    return [_without_copies(rows[number], states[one.layer]) for number, one in enumerate(stored)]


def _without_copies(rows: Tensor, state: State) -> Tensor:
    """The rows with each head once. With fewer key/value heads than ranks, several ranks have the same head."""
    return rows if isinstance(state, SlotState) else rows[:, :: rows.shape[1] // state.kv_heads]


def write_cached(runner: ModelRunner, start: int, end: int, rows: Sequence[Tensor]) -> None:
    """Stores the tensors that `read_cached` gave. For rank 0 to call."""
    with runner.together(WriteCache(start, end)):
        write_rank_rows(runner, start, end, rows)


def send_cached(runner: ModelRunner, start: int, end: int) -> None:
    """Does the part in `read_cached` of a rank other than rank 0."""
    for _ in _gathered(runner, list(_stored(runner, start, end)), end - start):
        pass


def _gathered(
    runner: ModelRunner, stored: Sequence[_Stored], positions: int
) -> Iterator[tuple[list[int], Tensor]]:
    """For each group of tensors their numbers, and what every rank has of them: [n, ranks, tensors, heads of a rank,
    ...], on the device; of whole layers [n, 1, tensors, heads, ...]."""
    communicator, config = runner.decoder.backend.communicator, runner.decoder.config
    ranks = config.ranks if config.splits_heads else 1
    for group in _groups(stored, config, positions):
        first, count = stored[group[0]], len(stored[group[0]].slots)
        shape = (len(group), *first.tensor.shape[1:])
        own = first.tensor.new_empty(count, *shape)
        if first.held:
            own = torch.stack([stored[number].tensor[stored[number].slots] for number in group], dim=1)
        values = _bytes(own)
        if config.stage is not None:
            communicator.broadcast(values, config.stage.rank_of(first.layer))
        elif ranks > 1:
            values = communicator.all_gather(values, [values.shape[1]] * ranks)
        yield group, values.view(own.dtype).view(count, ranks, *shape)


def write_rank_rows(runner: ModelRunner, start: int, end: int, rows: Sequence[Tensor] | None) -> None:
    """Each rank's part of `write_cached`. Only rank 0 has `rows`."""
    communicator, config = runner.decoder.backend.communicator, runner.decoder.config
    ranks, stored = config.ranks if config.splits_heads else 1, list(_stored(runner, start, end))
    number = communicator.rank if ranks > 1 else 0
    for group in _groups(stored, config, end - start):
        first, count = stored[group[0]], len(stored[group[0]].slots)
        heads = ranks * first.tensor.shape[1]
        values = first.tensor.new_empty(count, len(group), heads, *first.tensor.shape[2:])
        if rows is not None:
            values.copy_(torch.stack([_with_copies(rows[one], heads) for one in group], dim=1))
        communicator.broadcast(_bytes(values))
        if first.held:
            for one, given in zip(group, _own_part(values, number, ranks, first).unbind(1), strict=True):
                stored[one].tensor[stored[one].slots] = given


def _with_copies(rows: Tensor, heads: int) -> Tensor:
    """The rows as the ranks have them side by side, [n, heads, ...]: the inverse of `_without_copies`."""
    return rows.repeat_interleave(heads // rows.shape[1], dim=1) if heads > rows.shape[1] else rows


def _joined(parts: Tensor, sections: Shape) -> Tensor:
    """The heads of all ranks [n, tensors, heads, ...] from what each has, [n, ranks, tensors, heads of a rank, ...]."""
    unit = parts.shape[3] // sum(sections)
    pieces = torch.split(parts, [unit * length for length in sections], dim=3)
    return torch.cat([piece.movedim(1, 2).flatten(2, 3) for piece in pieces], dim=2)


def _own_part(rows: Tensor, rank: int, ranks: int, stored: _Stored) -> Tensor:
    """The part of a rank, from the heads of all ranks [n, tensors, heads, ...]."""
    unit, pieces = rows.shape[2] // sum(stored.sections), list[Tensor]()
    for piece in torch.split(rows, [unit * length for length in stored.sections], dim=2):
        own = piece.shape[2] // ranks
        pieces.append(piece[:, :, rank * own : (rank + 1) * own])
    return torch.cat(pieces, dim=2)


def _bytes(rows: Tensor) -> Tensor:
    """[n, ...] of any type, contiguous, as uint8 [n, bytes], in the same memory."""
    return rows.flatten(1).view(torch.uint8)


def _groups(stored: Sequence[_Stored], config: ModelConfig, positions: int) -> Iterator[list[int]]:
    """The numbers of all tensors, in groups that are exchanged at once: of one shape and type, and of layers of one
    rank where ranks have whole layers."""
    alike = dict[Hashable, list[int]]()
    for number, one in enumerate(stored):
        owner = None if config.stage is None else config.stage.rank_of(one.layer)
        key = owner, one.is_state, one.tensor.shape[1:], one.tensor.dtype, one.sections
        alike.setdefault(key, []).append(number)
    for group in alike.values():
        most = max(1, _MOST_BYTES // max(1, positions * stored[group[0]].row_bytes))
        yield from (group[first : first + most] for first in range(0, len(group), most))


def _stored(runner: ModelRunner, start: int, end: int) -> Iterator[_Stored]:
    cache, device, config = runner.cache, runner.decoder.backend.device, runner.decoder.config
    positions, slots, declared = torch.arange(start, end), dict[int, Tensor](), layers_of(config)
    groups = replace(config, stage=None).cache_groups
    for group, table in zip(groups, cache.whole_tables, strict=True):
        blocks = torch.tensor(table)
        found = blocks[:1] if group.is_state else slot_mapping(positions, blocks)
        slots |= dict.fromkeys(group.layers, found.to(device))
    for number, layer in enumerate(cache.layers):
        if number not in slots:  # it keeps nothing
            continue
        held, where = number in config.held_layers, slots[number]
        state = declared[number].state
        if not isinstance(state, SlotState):
            yield from (_Stored(number, held, False, stored, where) for stored in layer.tensors)
            continue
        for stored, sections in zip(layer.tensors, state.sections or repeat((1,)), strict=False):
            heads_first = stored.transpose(1, 2) if stored.ndim == 3 else stored
            yield _Stored(number, held, True, heads_first, where, sections)
