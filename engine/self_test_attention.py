"""Checks a backend's norms and attention on this machine against the float64 definition, one operation a line.

Attention is checked with its rotation and with the rows that it writes to the cache: a prompt, then one more token
over it. Knows the Backend protocol; not how a backend computes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec, Backend, Hidden, KVLayer
from quengine.kernels.cache_types import CACHE_TYPES, CacheType
from quengine.kernels.kv_rows import allocate_layer, read_rows
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rope import RopeSpec, rope_table
from quengine.self_test import EPS, HALF, ROUNDED, KernelCheck, failure, floats, nmse, rows_on

PROMPT, CONTEXT = 70, 96
HEADS, KV_HEADS = 4, 2
HEAD_SIZES = (64, 128)
NORM_WIDTHS = (576, 4096)
STORED = 1e-6
"""Largest NMSE of cached rows: both sides round them, and where a value lies between two codes they may part."""

LIMITS = {"f16": {"prompt": HALF, "1 token": ROUNDED}, "q8_0": {"prompt": 1e-4, "1 token": 1e-4}}
"""A q8_0 code that falls the other way moves the result by its share of 1/127."""

OPERATIONS = (
    *(f"RMSNorm {width}" for width in NORM_WIDTHS),
    *(f"attention {cache} {size}" for cache in CACHE_TYPES for size in HEAD_SIZES),
)


def check_operation(backend: Backend[Any], name: str) -> Iterator[KernelCheck]:
    """The checks of one of OPERATIONS; an exception on the way is their failure."""
    kind, *rest = name.split()
    try:
        if kind == "RMSNorm":
            yield from _check_norm(backend, name, int(rest[0]))
        else:
            cache_type: CacheType = "q8_0" if rest[0] == "q8_0" else "f16"
            yield from _check_attention(backend, name, cache_type, int(rest[1]))
    except Exception as error:  # whatever stops a kernel is what this test looks for
        yield failure(name, "run", error)


def _check_norm(backend: Backend[Any], name: str, width: int) -> Iterator[KernelCheck]:
    """Through a plain matrix of few rows, as no backend gives a norm away alone."""
    reference = ReferenceBackend(keep=True)
    for test, tokens, limit in (("1 token", 1, ROUNDED), ("prompt", PROMPT, HALF)):
        found, wanted = (_normed(side, width, tokens) for side in (backend, reference))
        yield KernelCheck(name, test, nmse(found, wanted), limit)


def _normed(backend: Backend[Any], width: int, tokens: int) -> Hidden:
    random = torch.Generator().manual_seed(width)
    norm, matrix = torch.rand(width, generator=random) + 0.5, torch.randn(48, width, generator=random)
    x = rows_on(backend, tokens, width, 5)
    return backend.norm_linear(x, backend.vector([floats(norm)]), EPS, backend.weight([floats(matrix)]))


def _check_attention(
    backend: Backend[Any], name: str, cache_type: CacheType, size: int
) -> Iterator[KernelCheck]:
    reference = ReferenceBackend(keep=True)
    sides = [
        (side, _spec(size, side.device), allocate_layer(CONTEXT, KV_HEADS, size, side.device, cache_type))
        for side in (backend, reference)
    ]
    for test, start, end in (("prompt", 0, PROMPT), ("1 token", PROMPT, PROMPT + 1)):
        found, wanted = (_attended(side, spec, layer, start, end) for side, spec, layer in sides)
        yield KernelCheck(name, test, nmse(found, wanted), LIMITS[cache_type][test])
        (mine, exact) = (_cached(layer, start, end) for _, _, layer in sides)
        limit = STORED if cache_type == "f16" else 1e-4
        yield KernelCheck(name, f"{test}: cache", nmse(mine, exact), limit)
        _give(sides[1][2], sides[0][2])


def _attended(backend: Backend[Any], spec: AttentionSpec, layer: KVLayer, start: int, end: int) -> Tensor:
    width = (HEADS + 2 * KV_HEADS) * spec.head_dim
    qkv = rows_on(backend, CONTEXT, width, 6)[start:end].contiguous()
    mixed = backend.attention(qkv, spec, layer, start)
    # Decode may give rounded planes, which only a matrix reads: one row of it for each output.
    identity = backend.weight([floats(torch.eye(HEADS * spec.head_dim))])
    zero = torch.zeros(end - start, HEADS * spec.head_dim, dtype=backend.dtype, device=backend.device)
    result: Tensor = backend.linear_add(mixed, identity, zero)
    return result


def _cached(layer: KVLayer, start: int, end: int) -> Tensor:
    return torch.cat([rows.cpu() for rows in read_rows(layer, slice(start, end))])


def _give(source: KVLayer, target: KVLayer) -> None:
    for rows, held in zip(source.tensors, target.tensors, strict=True):
        held.copy_(rows)


def _spec(size: int, device: torch.device) -> AttentionSpec:
    cos, sin = rope_table(RopeSpec(dim=size), CONTEXT, device)
    return AttentionSpec(
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=size,
        scale=size**-0.5,
        window=None,
        rope_layout="pairs" if size == HEAD_SIZES[0] else "halves",
        cos=cos,
        sin=sin,
        mask_band=causal_mask_band(CONTEXT, CONTEXT, None, device),
        eps=EPS,
    )
