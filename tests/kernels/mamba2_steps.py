"""Steps of a Mamba2 layer, as the definition computes them, for the tests of both devices' kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.mamba2 import Mamba2Spec, mamba2
from tests.kernels.gated_delta_steps import SLOTS
from tests.kernels.gated_delta_steps import STEPS as STEPS


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer. rows: of its history. limits: of steps of time."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int = 4
    rows: int = 4
    limits: tuple[float, float] = (0.0, float("inf"))


def spec_of(shape: Shape) -> Mamba2Spec:
    """Heads whose memory fades at different speeds, of some hardly at all."""
    random = torch.Generator().manual_seed(1)
    inner = shape.heads * shape.head_dim
    channels = inner + 2 * shape.groups * shape.state_dim
    return Mamba2Spec(
        conv=torch.randn(shape.taps, channels, generator=random) * shape.taps**-0.5,
        conv_bias=torch.randn(channels, generator=random) * 0.3,
        decay=-torch.empty(shape.heads).uniform_(0.01, 4.0, generator=random),
        bias=torch.randn(shape.heads, generator=random) - 2.0,
        skip=torch.randn(shape.heads, generator=random),
        norm=1.0 + 0.1 * torch.randn(inner, generator=random),
        heads=shape.heads,
        head_dim=shape.head_dim,
        groups=shape.groups,
        state_dim=shape.state_dim,
        step_limits=shape.limits,
        eps=1e-5,
        cache_group=1,
    )


def states(shape: Shape) -> tuple[Tensor, Tensor]:
    """History and memory of SLOTS slots, with values that a step must not read but where they are its own."""
    random, spec = torch.Generator().manual_seed(2), spec_of(shape)
    history = torch.randn(SLOTS, shape.rows, spec.channels, generator=random)
    size = (SLOTS, shape.heads, shape.head_dim, shape.state_dim)
    return history, 0.3 * torch.randn(*size, generator=random)


def rows_of(count: int, shape: Shape, seed: int) -> Tensor:
    return torch.randn(count, sum(spec_of(shape).widths), generator=torch.Generator().manual_seed(seed))


def expected(
    batch: ForwardBatch, x: Tensor, spec: Mamba2Spec, history: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition's result in fp64, and the state after the step."""
    after = history.clone(), memory.clone()
    y = mamba2(batch, x.double(), spec, *after)
    return y.float(), *after
