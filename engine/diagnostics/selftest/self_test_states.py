"""Checks the operations of a backend that keep a state, on this machine, against the float64 definition.

A prompt, then a token, then rows of several sequences, over the state that the steps before have left.
"""

from collections.abc import Iterator
from typing import Any

import torch

from quengine.diagnostics.selftest.self_test import ROUNDED, KernelCheck, failure, nmse
from quengine.kernels.backend import Backend, SlotLayer
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import CONV_HISTORY
from quengine.kernels.short_conv import ShortConvSpec, short_conv

CHANNELS, TAPS, PROMPT, SLOTS = 640, 3, 70, 3
_CPU = torch.device("cpu")

STATES = (f"short convolution {CHANNELS}",)
"""The subjects."""


def check_state(backend: Backend[Any], name: str) -> Iterator[KernelCheck]:
    """The checks of one of STATES; an exception on the way is their failure."""
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(TAPS, CHANNELS, generator=random)
    state = torch.randn(SLOTS + 1, CONV_HISTORY, CHANNELS, generator=random)
    ours, layer = state.clone(), SlotLayer((state.to(backend.device),))
    spec = ShortConvSpec(weight.to(backend.device, backend.dtype), 0)
    for test, there, here in _steps(backend.device):
        bcx = torch.randn(len(here), 3 * CHANNELS, generator=random)
        try:
            found = backend.short_conv(there, bcx.to(backend.device, backend.dtype), spec, layer)
            wanted = short_conv(here, bcx.double(), ShortConvSpec(weight.double(), 0), ours)
            yield KernelCheck(name, test, nmse(found.cpu(), wanted), ROUNDED)
        except Exception as error:  # whatever stops a kernel is what this test looks for
            yield failure(name, test, error)


def _steps(device: torch.device) -> Iterator[tuple[str, ForwardBatch, ForwardBatch]]:
    """Each step on the device and on the host."""
    one, three = [[[1]]], [[[1]], [[2]], [[3]]]
    prompt, positions = [[0] * PROMPT], [PROMPT + 1, 0, 1]
    yield "prompt", prefill_batch(prompt, [0], one, device), prefill_batch(prompt, [0], one, _CPU)
    yield "1 token", decode_batch([0], [PROMPT], one, device), decode_batch([0], [PROMPT], one, _CPU)
    ids = [0] * len(three)
    yield "batch", decode_batch(ids, positions, three, device), decode_batch(ids, positions, three, _CPU)
