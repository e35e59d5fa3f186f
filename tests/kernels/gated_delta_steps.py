"""Steps of the gated delta net, as the definition computes them, for the tests of both devices' kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.gated_delta import GatedDeltaSpec, gated_delta
from tests.kernels.short_conv_steps import prompt, tokens

SLOTS = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer. rows: of its history."""

    key_heads: int
    value_heads: int
    head_dim: int
    taps: int = 4
    tiled: bool = True
    rows: int = 4


def spec_of(shape: Shape) -> GatedDeltaSpec:
    """Heads whose memory fades at different speeds, of some hardly at all."""
    random = torch.Generator().manual_seed(1)
    channels = (2 * shape.key_heads + shape.value_heads) * shape.head_dim
    return GatedDeltaSpec(
        conv=torch.randn(shape.taps, channels, generator=random) * shape.taps**-0.5,
        decay=-torch.empty(shape.value_heads).uniform_(0.01, 4.0, generator=random),
        bias=torch.randn(shape.value_heads, generator=random) - 2.0,
        norm=1.0 + 0.1 * torch.randn(shape.head_dim, generator=random),
        key_heads=shape.key_heads,
        value_heads=shape.value_heads,
        head_dim=shape.head_dim,
        tiled=shape.tiled,
        eps=1e-6,
        cache_group=1,
    )


def states(shape: Shape) -> tuple[Tensor, Tensor]:
    """History and memory of SLOTS slots, with values that a step must not read but where they are its own."""
    random, spec = torch.Generator().manual_seed(2), spec_of(shape)
    history = torch.randn(SLOTS, shape.rows, spec.channels, generator=random)
    size = (SLOTS, shape.value_heads, shape.head_dim, shape.head_dim)
    return history, 0.3 * torch.randn(*size, generator=random)


def rows_of(count: int, shape: Shape, seed: int) -> Tensor:
    return torch.randn(count, sum(spec_of(shape).widths), generator=torch.Generator().manual_seed(seed))


STEPS: dict[str, ForwardBatch] = {
    "a prompt's first chunk": prompt([150], [0], [2]),
    "a chunk of whole turns of the history": prompt([64], [32], [1]),
    "chunks of one and of few tokens": prompt([1, 2, 5, 70], [0, 1, 63, 7], [1, 2, 3, 0]),
    "first tokens": tokens([0, 1, 2], [1, 2, 3]),
    "tokens": tokens([40, 63, 64, 199], [3, 1, 2, 0]),
    "several tokens of a sequence": tokens([65, 66, 67, 68, 5, 6], [2, 2, 2, 2, 1, 1], shares=True),
}


def expected(
    batch: ForwardBatch, x: Tensor, spec: GatedDeltaSpec, history: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y of the definition in fp64, and the state after the step."""
    after = history.clone(), memory.clone()
    y = gated_delta(batch, x.double(), spec, *after)
    return y.float(), *after
