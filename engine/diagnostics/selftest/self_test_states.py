"""Checks the operations of a backend that keep a state, on this machine, against the float64 definition.

A prompt, then a token, then rows of several sequences, each over the state that the preceding steps have left.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

from quengine.diagnostics.harness import KernelCheck
from quengine.diagnostics.selftest.self_test import (
    EPS,
    PROMPT,
    ROUNDED,
    STEP_LIMITS,
    check_steps,
    read_rows_of,
)
from quengine.kernels.backend import Backend, Hidden, SlotLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.gated_delta import GatedDeltaSpec, gated_delta
from quengine.kernels.kv.cache_types import CONV_HISTORY
from quengine.kernels.mamba2 import Mamba2Spec, mamba2
from quengine.kernels.short_conv import ShortConvSpec, short_conv

CHANNELS, TAPS, SLOTS = 640, 3, 3
KEY_HEADS, VALUE_HEADS, HEAD_SIZES, DELTA_TAPS = 2, 4, (64, 128), 4
MAMBA_HEADS, MAMBA_SIZE, MAMBA_STATES, MAMBA_TAPS = 4, 64, (64, 128), 4
_TABLES = [[[1]], [[2]], [[3]]]

STATES = (
    f"short convolution {CHANNELS}",
    *(f"gated delta {size}" for size in HEAD_SIZES),
    *(f"Mamba2 {size}" for size in MAMBA_STATES),
)
"""The subjects."""

_Spec = TypeVar("_Spec", GatedDeltaSpec, Mamba2Spec)
Run = Callable[[Backend[Any], ForwardBatch, Hidden, SlotLayer], Tensor]


@dataclass(frozen=True)
class _Subject:
    """An operation. columns: number of columns of its rows. state: the contents of its slots. run: computes it on a
    backend. define: computes it in fp64 from rows and the parts of the state. limits: NMSE of the results of each step.
    """

    columns: int
    state: tuple[Tensor, ...]
    run: Run
    define: Callable[[ForwardBatch, Tensor, tuple[Tensor, ...]], Tensor]
    limits: dict[str, float]


def check_state(backend: Backend[Any], name: str) -> Iterator[KernelCheck]:
    """The checks of one of STATES; an exception on the way is their failure."""
    random = torch.Generator().manual_seed(3)
    kind, size = name.rsplit(maxsplit=1)
    makers = {"gated delta": _gated_delta, "Mamba2": _mamba2}
    subject = makers.get(kind, _short_convolution)(int(size), random)
    ours = tuple(part.clone() for part in subject.state)
    layer = SlotLayer(tuple(part.to(backend.device) for part in subject.state))

    def results(there: ForwardBatch, here: ForwardBatch) -> tuple[Tensor, Tensor]:
        x = torch.randn(len(here), subject.columns, generator=random)
        wanted = subject.define(here, x.double(), ours)
        return subject.run(backend, there, x.to(backend.device, backend.dtype), layer), wanted

    yield from check_steps(name, backend.device, _TABLES, (PROMPT + 1, 0, 1), subject.limits, results)


def _short_convolution(channels: int, random: torch.Generator) -> _Subject:
    weight = torch.randn(TAPS, channels, generator=random)
    state = torch.randn(SLOTS + 1, CONV_HISTORY, channels, generator=random)

    def run(backend: Backend[Any], batch: ForwardBatch, x: Hidden, layer: SlotLayer) -> Tensor:
        spec = ShortConvSpec(weight.to(backend.device, backend.dtype), 0)
        result: Tensor = backend.short_conv(batch, x, spec, layer)
        return result

    def define(batch: ForwardBatch, x: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return short_conv(batch, x, ShortConvSpec(weight.double(), 0), *state)

    limits = dict.fromkeys(("prompt", "1 token", "batch"), ROUNDED)
    return _Subject(3 * channels, (state,), run, define, limits)


def _gated_delta(size: int, random: torch.Generator) -> _Subject:
    """A layer with a state that decays at another rate for each head."""
    channels, width = (2 * KEY_HEADS + VALUE_HEADS) * size, VALUE_HEADS * size
    spec = GatedDeltaSpec(
        conv=torch.randn(DELTA_TAPS, channels, generator=random) / 2,
        decay=-torch.empty(VALUE_HEADS).uniform_(0.01, 4.0, generator=random),
        bias=torch.randn(VALUE_HEADS, generator=random) - 2.0,
        norm=torch.rand(size, generator=random) + 0.5,
        key_heads=KEY_HEADS, value_heads=VALUE_HEADS, head_dim=size, tiled=True, eps=EPS, cache_group=0,
    )  # fmt: skip
    history = torch.randn(SLOTS + 1, DELTA_TAPS, channels, generator=random)
    memory = torch.randn(SLOTS + 1, VALUE_HEADS, size, size, generator=random) * size**-0.5

    def run(backend: Backend[Any], batch: ForwardBatch, x: Hidden, layer: SlotLayer) -> Tensor:
        there = _on(backend, spec, "conv", "decay", "bias", "norm")
        return read_rows_of(backend, batch, lambda: backend.gated_delta(batch, x, there, layer), width)

    def define(batch: ForwardBatch, x: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return gated_delta(batch, x, spec, *state)

    return _Subject(channels + width + 2 * VALUE_HEADS, (history, memory), run, define, STEP_LIMITS)


def _mamba2(state_dim: int, random: torch.Generator) -> _Subject:
    """A layer of two groups, with a state that decays at another rate for each head."""
    inner, groups = MAMBA_HEADS * MAMBA_SIZE, 2
    channels = inner + 2 * groups * state_dim
    spec = Mamba2Spec(
        conv=torch.randn(MAMBA_TAPS, channels, generator=random) / 2,
        conv_bias=torch.randn(channels, generator=random) / 4,
        decay=-torch.empty(MAMBA_HEADS).uniform_(0.01, 4.0, generator=random),
        bias=torch.randn(MAMBA_HEADS, generator=random) - 2.0,
        skip=torch.randn(MAMBA_HEADS, generator=random),
        norm=torch.rand(inner, generator=random) + 0.5,
        heads=MAMBA_HEADS, head_dim=MAMBA_SIZE, groups=groups, state_dim=state_dim,
        step_limits=(0.0, inf), eps=EPS, cache_group=0,
    )  # fmt: skip
    history = torch.randn(SLOTS + 1, MAMBA_TAPS, channels, generator=random)
    memory = torch.randn(SLOTS + 1, MAMBA_HEADS, MAMBA_SIZE, state_dim, generator=random) * state_dim**-0.5

    def run(backend: Backend[Any], batch: ForwardBatch, x: Hidden, layer: SlotLayer) -> Tensor:
        there = _on(backend, spec, "conv", "conv_bias", "decay", "bias", "skip", "norm")
        return read_rows_of(backend, batch, lambda: backend.mamba2(batch, x, there, layer), inner)

    def define(batch: ForwardBatch, x: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return mamba2(batch, x, spec, *state)

    return _Subject(sum(spec.widths), (history, memory), run, define, STEP_LIMITS)


def _on(backend: Backend[Any], spec: _Spec, *names: str) -> _Spec:
    """The spec with these vectors as the backend has them."""
    return replace(spec, **{name: getattr(spec, name).to(backend.device, backend.dtype) for name in names})
