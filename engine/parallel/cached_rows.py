"""Keys and values of positions in the cache's first blocks, of the heads of all ranks; and the states of the sequence
that has these blocks, whose channels take the place of heads here.

Several layers are exchanged, and copied between host and device, at a time: as one array of bytes with a row for each
position, in which the tensors of the layers lie side by side.
"""

from collections.abc import Iterator, Sequence
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
"""Bytes of a rank that are exchanged at a time, if more than one tensor."""


class _Stored(NamedTuple):
    """A tensor of a layer, [slots, heads, ...], and the slots of the positions, [n], or of the sequence, [1]; empty if
    not `held`. sections: of the heads, see SlotState."""

    layer: int
    held: bool
    is_state: bool
    tensor: Tensor
    slots: Tensor
    sections: Shape = (1,)

    def row_bytes(self, heads: int) -> int:
        return heads * prod(self.tensor.shape[2:]) * self.tensor.itemsize


def read_cached(runner: ModelRunner, start: int, end: int, whole: ModelConfig) -> list[Tensor]:
    """A copy, on the host, of what every layer stores of positions start .. end - 1, [n, kv_heads, width] each: keys
    and values, or their codes and scales; or of each part of its state, [1, channels, rows] or [1, heads, ...].
    On rank 0. `whole`: the model's configuration, of all ranks."""
    with runner.together(ReadCache(start, end)):
        rows = read_rank_rows(runner, start, end)
    states = [block.state for block in layers_of(whole)]
    pairs = zip(_stored(runner, start, end), rows, strict=True)
    return [_without_copies(rows, states[one.layer]) for one, rows in pairs]


def _without_copies(rows: Tensor, state: State) -> Tensor:
    """Each head once: where there are fewer key/value heads than ranks, some ranks have the same."""
    return rows if isinstance(state, SlotState) else rows[:, :: rows.shape[1] // state.kv_heads]


def write_cached(runner: ModelRunner, start: int, end: int, rows: Sequence[Tensor]) -> None:
    """Store what `read_cached` gave. On rank 0."""
    with runner.together(WriteCache(start, end)):
        write_rank_rows(runner, start, end, rows)


def read_rank_rows(runner: ModelRunner, start: int, end: int) -> list[Tensor]:
    """Each rank's part of `read_cached`: all have the heads of all, those of a rank side by side, of all layers."""
    communicator, config = runner.decoder.backend.communicator, runner.decoder.config
    ranks, rows = config.ranks if config.splits_heads else 1, list[Tensor]()
    for group in _groups(runner, start, end):
        sizes = [one.row_bytes(one.tensor.shape[1]) for one in group]
        if group[0].held:
            own = torch.cat([_bytes(one.tensor[one.slots]) for one in group], dim=1)
        else:
            own = torch.empty(
                len(group[0].slots), sum(sizes), dtype=torch.uint8, device=group[0].tensor.device
            )
        if config.stage is not None:
            communicator.broadcast(own, config.stage.rank_of(group[0].layer))
        elif ranks > 1:
            own = communicator.all_gather(own, [sum(sizes)] * ranks)
        parts = torch.split(own.view(len(own), ranks, sum(sizes)).cpu(), sizes, dim=2)
        for one, part in zip(group, parts, strict=True):
            shape = (len(own), ranks, *one.tensor.shape[1:])
            rows.append(_joined(part.contiguous().view(one.tensor.dtype).view(shape), one.sections))
    return rows


def write_rank_rows(runner: ModelRunner, start: int, end: int, rows: Sequence[Tensor] | None) -> None:
    """Each rank's part of `write_cached`; `rows`: on rank 0."""
    communicator, config, done = runner.decoder.backend.communicator, runner.decoder.config, 0
    ranks = config.ranks if config.splits_heads else 1
    number = communicator.rank if ranks > 1 else 0
    for group in _groups(runner, start, end):
        heads = [ranks * one.tensor.shape[1] for one in group]
        sizes = [one.row_bytes(every) for one, every in zip(group, heads, strict=True)]
        count = len(group[0].slots)
        values = torch.empty(count, sum(sizes), dtype=torch.uint8, device=group[0].tensor.device)
        if rows is not None:
            each = zip(rows[done : done + len(group)], heads, strict=True)
            values.copy_(torch.cat([_bytes(_with_copies(one, every)) for one, every in each], dim=1))
        done += len(group)
        communicator.broadcast(values)
        for one, every, part in zip(group, heads, torch.split(values, sizes, dim=1), strict=True):
            if one.held:
                given = part.contiguous().view(one.tensor.dtype).view(count, every, *one.tensor.shape[2:])
                one.tensor[one.slots] = _own_part(given, number, ranks, one)


def _with_copies(rows: Tensor, heads: int) -> Tensor:
    """As the ranks have them side by side, [n, heads, ...]: what `_without_copies` was given."""
    return rows.repeat_interleave(heads // rows.shape[1], dim=1)


def _joined(parts: Tensor, sections: Shape) -> Tensor:
    """The heads of all ranks [n, heads, ...] from what each has of them, [n, ranks, heads of a rank, ...]."""
    unit = parts.shape[2] // sum(sections)
    pieces = torch.split(parts, [unit * length for length in sections], dim=2)
    return torch.cat([piece.flatten(1, 2) for piece in pieces], dim=1)


def _own_part(rows: Tensor, rank: int, ranks: int, stored: _Stored) -> Tensor:
    """What a rank has of the heads of all, [n, heads, ...]."""
    unit, pieces = rows.shape[1] // sum(stored.sections), list[Tensor]()
    for piece in torch.split(rows, [unit * length for length in stored.sections], dim=1):
        own = piece.shape[1] // ranks
        pieces.append(piece[:, rank * own : (rank + 1) * own])
    return torch.cat(pieces, dim=1)


def _bytes(rows: Tensor) -> Tensor:
    """[n, heads, ...] of any type as uint8 [n, bytes]."""
    return rows.contiguous().flatten(1).view(torch.uint8)


def _groups(runner: ModelRunner, start: int, end: int) -> Iterator[list[_Stored]]:
    """Every layer's tensors, in groups that are exchanged at once; where layers are shared out, those of one rank."""
    stage, group, size = runner.decoder.config.stage, list[_Stored](), 0
    for one in _stored(runner, start, end):
        more = (end - start) * one.row_bytes(one.tensor.shape[1])
        moves = group and stage is not None and stage.rank_of(one.layer) != stage.rank_of(group[0].layer)
        moves = moves or (group and one.is_state != group[0].is_state)
        if group and (moves or size + more > _MOST_BYTES):
            yield group
            group, size = [], 0
        group.append(one)
        size += more
    yield group


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
