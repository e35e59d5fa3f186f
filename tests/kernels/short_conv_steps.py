"""Steps of the gated short convolution, as the definition computes them, for the tests of both devices' kernels."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quengine.kernels.forward_batch import (
    ForwardBatch,
    StateCheckpoint,
    decode_batch,
    prefill_batch,
    state_table,
)
from quengine.kernels.kv.cache_types import CONV_HISTORY
from quengine.kernels.short_conv import ShortConvSpec, short_conv

SLOTS = 4


def spec_of(channels: int, taps: int) -> ShortConvSpec:
    return ShortConvSpec(torch.randn(taps, channels, generator=torch.Generator().manual_seed(1)), 1)


def states(channels: int) -> Tensor:
    """Of SLOTS slots, with values that a step must not read but where they are its own."""
    return torch.randn(SLOTS, CONV_HISTORY, channels, generator=torch.Generator().manual_seed(2))


def rows_of(count: int, channels: int, seed: int) -> Tensor:
    return torch.randn(count, 3 * channels, generator=torch.Generator().manual_seed(seed))


def prompt(
    lengths: Sequence[int],
    starts: Sequence[int],
    slots: Sequence[int],
    checkpoints: Sequence[Sequence[StateCheckpoint]] = (),
) -> ForwardBatch:
    """Chunks of sequences with these slots, in the second group of layers, and the first ones' checkpoints."""
    of_slots = [*checkpoints, *([()] * (len(slots) - len(checkpoints)))]
    tables = [
        [list(range(1, 7)), state_table(slot, each)] for slot, each in zip(slots, of_slots, strict=True)
    ]
    return prefill_batch([[0] * length for length in lengths], starts, tables, torch.device("cpu"))


def tokens(positions: Sequence[int], slots: Sequence[int], shares: bool = False) -> ForwardBatch:
    tables = [[list(range(1, 7)), [slot]] for slot in slots]
    return decode_batch([0] * len(positions), positions, tables, torch.device("cpu"), shares)


STEPS: dict[str, ForwardBatch] = {
    "a prompt's first chunk": prompt([150], [0], [2]),
    "a chunk of whole turns of the state": prompt([2 * CONV_HISTORY], [32], [1]),
    "chunks of one and of few tokens": prompt([1, 2, 5, 70], [0, 1, CONV_HISTORY - 1, 7], [1, 2, 3, 0]),
    "first tokens": tokens([0, 1, 2], [1, 2, 3]),
    "tokens": tokens([40, CONV_HISTORY - 1, CONV_HISTORY, 199], [3, 1, 2, 0]),
    "tokens behind drafts": tokens([65, 66, 67, 68, 5, 6], [2, 2, 2, 2, 1, 1], shares=True),
}


CHECKPOINTS: dict[str, ForwardBatch] = {
    "a checkpoint within a chunk of 64": prompt([100], [5], [1], [[StateCheckpoint(5 + 37, 3)]]),
    "at the border of one": prompt([70], [0], [1], [[StateCheckpoint(64, 2)]]),
    "behind rows that are few": prompt([9, 3], [3, 8], [1, 3], [[StateCheckpoint(5, 2)]]),
    "two, one at the end": prompt([96], [32], [2], [[StateCheckpoint(96, 3), StateCheckpoint(128, 1)]]),
    "two in a chunk of 64": prompt(
        [2, 96], [5, 0], [0, 2], [[], [StateCheckpoint(8, 3), StateCheckpoint(40, 1)]]
    ),
}
"""Prompts of which states are kept on the way."""

ALL_STEPS = STEPS | CHECKPOINTS


def stands_for(batch: ForwardBatch) -> dict[int, int]:
    """Of each slot that a step writes, checkpoints included, how many positions its state stands for."""
    ends = {slot: start + rows.stop - rows.start for rows, start, slot in batch.sequences(1)}
    if batch.phase == "prefill":
        for *_, checkpoints in batch.with_checkpoints(1):
            ends |= {block: position for position, block in checkpoints}
    ends.pop(0, None)
    return ends


def prefixes(batch: ForwardBatch) -> Iterator[tuple[ForwardBatch, slice, int, int]]:
    """Of each checkpoint of a prompt's step: its sequence's rows before it as a step of their own, which rows those
    are, the sequence's slot, and the checkpoint's block."""
    row = 0
    for start, length, slot, checkpoints in batch.with_checkpoints(1):
        for position, block in checkpoints:
            rows = position - start
            yield prompt([rows], [start], [slot]), slice(row, row + rows), slot, block
        row += length


def expected(batch: ForwardBatch, bcx: Tensor, spec: ShortConvSpec, state: Tensor) -> tuple[Tensor, Tensor]:
    """y of the definition in fp64, and the state behind the step."""
    after = state.clone()
    y = short_conv(batch, bcx.double(), spec, after)
    return y.float(), after
