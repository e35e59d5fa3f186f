"""Checks latent attention of a backend, on this machine, against the float64 definition: a prompt, then a token, then
tokens of several sequences, over the rows that the steps before have cached."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quengine.diagnostics.harness import KernelCheck
from quengine.diagnostics.selftest.self_test import EPS, PROMPT, STEP_LIMITS, check_steps, random_tensor
from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import Backend, KVLayer
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_TYPES, CacheType, can_store
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rope import RopeSpec, rope_table

HEADS, RANK, PLAIN, ROTATED, VALUES = 4, 512, 128, 64, 128
CONTEXT = 96
_TABLES = [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]

LATENTS = tuple(f"latent attention {t}" for t in CACHE_TYPES if can_store(t, RANK + ROTATED, latent=True))
"""The subjects."""


def check_latent(backend: Backend[Any], name: str) -> Iterator[KernelCheck]:
    """The checks of one of LATENTS; an exception on the way is their failure."""
    cache_type: CacheType = "q8_0" if name.endswith("q8_0") else "f16"
    random = torch.Generator().manual_seed(7)
    reference, sides = ReferenceBackend(keep=True), list[tuple[LatentSpec, KVLayer]]()

    def results(there: ForwardBatch, here: ForwardBatch) -> tuple[Tensor, Tensor]:
        q = torch.randn(len(here), HEADS * (PLAIN + ROTATED), generator=random) * 0.3
        latent = torch.randn(len(here), RANK + ROTATED, generator=random)
        if not sides:
            sides.extend((_spec(side), _layer(side, cache_type)) for side in (reference, backend))
        wanted = reference.latent_attention(here, q.double(), latent.double(), *sides[0])
        rows, latents = (x.to(backend.device, backend.dtype) for x in (q, latent))
        return backend.latent_attention(there, rows, latents, *sides[1]), wanted

    yield from check_steps(name, backend.device, _TABLES, (PROMPT + 1, 40, 0), STEP_LIMITS, results)


def _spec(backend: Backend[Any]) -> LatentSpec:
    """The same constants on each backend."""
    random = torch.Generator().manual_seed(8)
    fmt = FORMATS["Q8_0"]
    absorb = [random_tensor(fmt, RANK, PLAIN, random) for _ in range(HEADS)]
    expand = [random_tensor(fmt, VALUES, RANK, random) for _ in range(HEADS)]
    cos, sin = rope_table(RopeSpec(ROTATED), CONTEXT, backend.device)
    spec = LatentSpec(
        heads=HEADS, rank=RANK, plain=PLAIN, rotated=ROTATED, values=VALUES, scale=(PLAIN + ROTATED) ** -0.5,
        rope_layout="pairs", cos=cos, sin=sin, mask_band=causal_mask_band(CONTEXT, CONTEXT, device=backend.device),
        norm=(torch.rand(RANK, generator=random) + 0.5).to(backend.device, backend.dtype), eps=EPS,
        absorb=backend.down_experts(absorb), expand=backend.down_experts(expand),
    )  # fmt: skip
    backend.check_latent(spec)
    return spec


def _layer(backend: Backend[Any], cache_type: CacheType) -> KVLayer:
    """A layer whose rows have equal values on all backends where no step of this test writes."""
    rows = 10 * BLOCK_SIZE
    layer = allocate_layer(rows, 1, RANK + ROTATED, backend.device, cache_type, latent=True)
    for held in layer.tensors:
        held.fill_(1)
    return layer
