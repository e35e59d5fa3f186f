"""Checks a backend's norms and attention on this machine against the float64 definition, one operation a line.

Attention is checked with its rotation and with the rows that it writes to the cache: a prompt, then one more token
over it. Over a paged cache: prompts of several sequences, whose blocks lie in no order, then a token more of one of
them, and of all in a batch. Knows the Backend protocol; not how a backend computes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quengine.diagnostics.selftest.self_test import (
    EPS,
    HALF,
    ROUNDED,
    KernelCheck,
    failure,
    floats,
    nmse,
    rows_on,
)
from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec, Backend, Hidden, KVLayer
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_TYPES, CacheType
from quengine.kernels.kv.kv_rows import allocate_layer, read_rows, slot_mapping
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.rope import RopeSpec, rope_table

PROMPT, CONTEXT = 70, 96
HEADS, KV_HEADS = 4, 2
HEAD_SIZES = (64, 128)
NORM_WIDTHS = (576, 4096)
STORED = 1e-6
"""Largest NMSE of cached rows: both sides round them, and where a value lies between two codes they may part."""

LIMITS = {
    "f16": {"prompt": HALF, "1 token": ROUNDED, "batch": HALF},
    "q8_0": {"prompt": 1e-4, "1 token": 1e-4, "batch": 1e-4},
}
"""A q8_0 code that falls the other way moves the result by its share of 1/127."""

PROMPTS = (70, 64, 31)
"""Tokens of each sequence of the paged cache; the one behind them lies within a block, begins one, and ends one."""

TABLES = ((5, 7, 0), (2, 6, 1), (4, 8, 3))
POOL = 9 * BLOCK_SIZE
_WHOLE = tuple(range(CONTEXT // BLOCK_SIZE))

OPERATIONS = (
    *(f"RMSNorm {width}" for width in NORM_WIDTHS),
    *(f"attention {cache} {size}" for cache in CACHE_TYPES for size in HEAD_SIZES),
)

PAGED = tuple(f"paged {cache} {HEAD_SIZES[-1]}" for cache in CACHE_TYPES)
"""Operations of a GPU only: the CPU computes batches inside steps of its own."""


def check_operation(backend: Backend[Any], name: str) -> Iterator[KernelCheck]:
    """The checks of one of OPERATIONS or PAGED; an exception on the way is their failure."""
    kind, *rest = name.split()
    try:
        if kind == "RMSNorm":
            yield from _check_norm(backend, name, int(rest[0]))
        else:
            cache_type: CacheType = "q8_0" if rest[0] == "q8_0" else "f16"
            check = _check_paged if kind == "paged" else _check_attention
            yield from check(backend, name, cache_type, int(rest[1]))
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
    batch = _chunk(backend, 0, tokens, _WHOLE)
    weights = RMSNorm(backend.vector([floats(norm)]), EPS)
    return backend.norm_linear(batch, x, weights, backend.weight([floats(matrix)]))


def _check_attention(
    backend: Backend[Any], name: str, cache_type: CacheType, size: int
) -> Iterator[KernelCheck]:
    reference = ReferenceBackend(keep=True)
    sides = [
        (side, _spec(size, side.device), _empty_layer(CONTEXT, size, side.device, cache_type))
        for side in (backend, reference)
    ]
    for test, start, end in (("prompt", 0, PROMPT), ("1 token", PROMPT, PROMPT + 1)):
        found, wanted = (
            _attended(side, spec, layer, _qkv(side, size, 6, start, end), _chunk(side, start, end, _WHOLE))
            for side, spec, layer in sides
        )
        yield KernelCheck(name, test, nmse(found, wanted), LIMITS[cache_type][test])
        yield _check_cache(name, test, [layer for _, _, layer in sides], torch.arange(start, end))
        _give(sides[1][2], sides[0][2])


def _check_paged(backend: Backend[Any], name: str, cache_type: CacheType, size: int) -> Iterator[KernelCheck]:
    reference = ReferenceBackend(keep=True)
    sides = [
        (side, _spec(size, side.device), _empty_layer(POOL, size, side.device, cache_type))
        for side in (backend, reference)
    ]
    layers = [layer for _, _, layer in sides]
    found, wanted = (torch.cat(_prompts(*side)) for side in sides)
    yield KernelCheck(name, "prompt", nmse(found, wanted), LIMITS[cache_type]["prompt"])
    written = [slot_mapping(torch.arange(n), _table(i)) for i, n in enumerate(PROMPTS)]
    yield _check_cache(name, "prompt", layers, torch.cat(written))
    for test, members in (("1 token", [0]), ("batch", [0, 1, 2])):
        _give(layers[1], layers[0])
        found, wanted = (_newest(*side, members) for side in sides)
        yield KernelCheck(name, test, nmse(found, wanted), LIMITS[cache_type][test])
        rows = [slot_mapping(torch.tensor([PROMPTS[i]]), _table(i)) for i in members]
        yield _check_cache(name, test, layers, torch.cat(rows))


def _prompts(backend: Backend[Any], spec: AttentionSpec, layer: KVLayer) -> list[Tensor]:
    """Attention of every sequence's prompt."""
    return [
        _attended(
            backend,
            spec,
            layer,
            _qkv(backend, spec.head_dim, i, 0, length),
            _chunk(backend, 0, length, TABLES[i]),
        ).cpu()
        for i, length in enumerate(PROMPTS)
    ]


def _newest(backend: Backend[Any], spec: AttentionSpec, layer: KVLayer, members: Sequence[int]) -> Tensor:
    """Attention of the token behind the prompts of these sequences, in one step."""
    rows = [_qkv(backend, spec.head_dim, i, PROMPTS[i], PROMPTS[i] + 1) for i in members]
    positions, tables = [PROMPTS[i] for i in members], [TABLES[i] for i in members]
    batch = decode_batch([0] * len(members), positions, tables, backend.device)
    return _attended(backend, spec, layer, torch.cat(rows), batch)


def _chunk(backend: Backend[Any], start: int, end: int, table: Sequence[int]) -> ForwardBatch:
    """Positions start .. end - 1 of a sequence: a single one is a decode step."""
    if end - start == 1:
        return decode_batch([0], [start], [table], backend.device)
    return prefill_batch([[0] * (end - start)], [start], [table], backend.device)


def _table(sequence: int) -> Tensor:
    return torch.tensor(TABLES[sequence], dtype=torch.int32)


def _qkv(backend: Backend[Any], size: int, seed: int, start: int, end: int) -> Tensor:
    """Rows start .. end - 1 of a sequence's queries, keys and values."""
    rows: Tensor = rows_on(backend, CONTEXT, (HEADS + 2 * KV_HEADS) * size, seed)
    return rows[start:end].contiguous()


def _attended(
    backend: Backend[Any], spec: AttentionSpec, layer: KVLayer, qkv: Tensor, batch: ForwardBatch
) -> Tensor:
    mixed = backend.attention(batch, qkv, spec, layer)
    # Decode may give rounded planes, which only a matrix reads: one row of it for each output.
    identity = backend.weight([floats(torch.eye(HEADS * spec.head_dim))])
    zero = torch.zeros(len(qkv), HEADS * spec.head_dim, dtype=backend.dtype, device=backend.device)
    result: Tensor = backend.linear_add(batch, mixed, identity, zero)
    return result


def _check_cache(name: str, test: str, layers: Sequence[KVLayer], rows: Tensor) -> KernelCheck:
    """Of the rows written by both sides, the second being the reference."""
    mine, exact = (torch.cat([part.cpu() for part in read_rows(layer, rows)]) for layer in layers)
    limit = STORED if layers[0].k_scale is None else 1e-4
    return KernelCheck(name, f"{test}: cache", nmse(mine, exact), limit)


def _empty_layer(rows: int, size: int, device: torch.device, cache_type: CacheType) -> KVLayer:
    """With what no check expects in it: memory that was freed may hold what an earlier check left, all of it right."""
    layer = allocate_layer(rows, KV_HEADS, size, device, cache_type)
    for held in layer.tensors:
        held.fill_(3)
    return layer


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
