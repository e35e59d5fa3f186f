"""Keys and values of positions in the cache's first blocks, of all heads, whichever rank has them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quengine.kernels.kv.kv_rows import slot_mapping
from quengine.model_runner import ModelRunner
from quengine.parallel.wire import ReadCache, WriteCache


def read_cached(runner: ModelRunner, start: int, end: int, kv_heads: int) -> list[Tensor]:
    """A copy of what every layer stores of positions start .. end - 1, [n, kv_heads, width] each: keys and values, or
    in q8_0 their codes and scales. On rank 0."""
    with runner.together(ReadCache(start, end)):
        rows = read_rows(runner, start, end)
    # Where there are fewer key/value heads than ranks, some ranks have the same.
    return [tensor[:, :: tensor.shape[1] // kv_heads] for tensor in rows]


def write_cached(runner: ModelRunner, start: int, end: int, rows: Sequence[Tensor]) -> None:
    """Store what `read_cached` gave. On rank 0."""
    kv_heads = rows[0].shape[1]
    with runner.together(WriteCache(start, end, kv_heads)):
        write_rows(runner, start, end, kv_heads, rows)


def read_rows(runner: ModelRunner, start: int, end: int) -> list[Tensor]:
    """Each rank's part of `read_cached`: all have the heads of all, those of a rank side by side, of all layers."""
    communicator, config = runner.decoder.backend.communicator, runner.decoder.config
    gathered = []
    for layer, stored, slots in _stored(runner, start, end):
        held = layer in config.held_layers
        own = stored[slots].contiguous() if held else stored.new_empty(end - start, *stored.shape[1:])
        if config.stage is not None:
            communicator.broadcast(own, config.stage.rank_of(layer))
        elif config.ranks > 1 and config.splits_heads:
            count, heads, width = own.shape
            flat = communicator.all_gather(own.reshape(count, -1), [heads * width] * config.ranks)
            own = flat.view(count, config.ranks * heads, width)
        gathered.append(own)
    return gathered


def write_rows(
    runner: ModelRunner, start: int, end: int, kv_heads: int, rows: Sequence[Tensor] | None
) -> None:
    """Each rank's part of `write_cached`; `rows`: on rank 0."""
    communicator, config = runner.decoder.backend.communicator, runner.decoder.config
    for index, (layer, stored, slots) in enumerate(_stored(runner, start, end)):
        heads = stored.shape[1]
        values = stored.new_empty(end - start, kv_heads, stored.shape[2])
        if rows is not None:
            values.copy_(rows[index])
        communicator.broadcast(values)
        cut = config.ranks > 1 and config.splits_heads
        first = communicator.rank * kv_heads // communicator.size if cut else 0
        if layer in config.held_layers:
            stored[slots] = values[:, first : first + heads]


def _stored(runner: ModelRunner, start: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every layer's tensors, each with the layer and the rows of these positions; empty where another rank has it."""
    cache, device = runner.cache, runner.decoder.backend.device
    positions, slots = torch.arange(start, end), dict[int, Tensor]()
    groups = replace(runner.decoder.config, stage=None).cache_groups
    for group, table in zip(groups, cache.whole_tables, strict=True):
        slots |= dict.fromkeys(group.layers, slot_mapping(positions, torch.tensor(table)).to(device))
    for number, layer in enumerate(cache.layers):
        for stored in layer.tensors:
            yield number, stored, slots[number]
