"""Steps of the gated short convolution, as the definition computes them, for the tests of both devices' kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
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


def prompt(lengths: Sequence[int], starts: Sequence[int], slots: Sequence[int]) -> ForwardBatch:
    """Chunks of sequences with these slots, in the second group of layers."""
    tables = [[list(range(1, 7)), [slot]] for slot in slots]
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


def expected(batch: ForwardBatch, bcx: Tensor, spec: ShortConvSpec, state: Tensor) -> tuple[Tensor, Tensor]:
    """y of the definition in fp64, and the state behind the step."""
    after = state.clone()
    y = short_conv(batch, bcx.double(), spec, after)
    return y.float(), after
