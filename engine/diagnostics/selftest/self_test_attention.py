"""Checks a backend's norms and attention on this machine against the float64 definition, one operation a line.

Attention is checked with its rotation and with the rows that it writes to the cache: a prompt, then one more token
over it. Over a paged cache it is checked with prompts of several sequences, whose blocks lie in no order, then with one
more token of one of them, and with one of each in a batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quengine.diagnostics.harness import KernelCheck, failure, nmse
from quengine.diagnostics.selftest.self_test import (
    EPS,
    HALF,
    PROMPT,
    ROUNDED,
    STEP_LIMITS,
    floats,
    read_rows_of,
    rows_on,
)
from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec, Backend, Hidden
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_TYPES, CacheType
from quengine.kernels.kv.kv_rows import allocate_layer, read_rows, slot_mapping
from quengine.kernels.layer_norm import LayerNorm, Norm
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.rope import RopeSpec, rope_table

CONTEXT = 96
HEADS, KV_HEADS = 4, 2
HEAD_SIZES = (64, 128)
NORM_WIDTHS = (576, 4096)
STORED = 1e-6
"""Largest NMSE of cached rows: both sides round them, and where a value lies between two codes they may part."""

LIMITS = {
    "f16": STEP_LIMITS,
    "q8_0": dict.fromkeys(STEP_LIMITS, 1e-4),
    "q4_0": dict.fromkeys(STEP_LIMITS, 1e-2),
}
"""A code that falls the other way moves the result by its share of 1/127 of a group's largest value, in q4_0 of 1/8."""

PROMPTS = (70, 64, 31)
"""Tokens of each sequence of the paged cache; the token after them lies within a block, begins one, or ends one."""

TABLES = ((5, 7, 0), (2, 6, 1), (4, 8, 3))
_WHOLE = tuple(range(CONTEXT // BLOCK_SIZE))

OPERATIONS = (
    *(f"{kind} {width}" for kind in ("RMSNorm", "LayerNorm") for width in NORM_WIDTHS),
    *(f"attention {cache} {size}" for cache in CACHE_TYPES for size in HEAD_SIZES),
)

PAGED = tuple(f"paged {cache} {HEAD_SIZES[-1]}" for cache in CACHE_TYPES)
"""Operations of a GPU only: the CPU computes batches in steps of its own."""


def check_operation(backend: Backend[Any], name: str) -> Iterator[KernelCheck]:
    """The checks of one of OPERATIONS or PAGED; an exception on the way is their failure."""
    kind, *rest = name.split()
    try:
        if kind in ("RMSNorm", "LayerNorm"):
            yield from _check_norm(backend, name, int(rest[0]))
            return
        (cache_type,) = (known for known in CACHE_TYPES if known == rest[0])
        sequences = [_Sequence(PROMPT, _WHOLE, 6)]
        if kind == "paged":
            sequences = [_Sequence(PROMPTS[i], TABLES[i], i) for i in range(len(PROMPTS))]
        yield from _check_attention(backend, name, cache_type, int(rest[1]), sequences)
    except Exception as error:  # anything that stops a kernel
        yield failure(name, "run", error)


def _check_norm(backend: Backend[Any], name: str, width: int) -> Iterator[KernelCheck]:
    """Check a norm with a plain matrix of few rows after it, since backends have no operation for a norm alone."""
    reference = ReferenceBackend(keep=True)
    for test, tokens, limit in (("1 token", 1, ROUNDED), ("prompt", PROMPT, HALF)):
        found, wanted = (_normed(side, name, width, tokens) for side in (backend, reference))
        yield KernelCheck(name, test, nmse(found, wanted), limit)


def _normed(backend: Backend[Any], name: str, width: int, tokens: int) -> Hidden:
    random = torch.Generator().manual_seed(width)
    norm, matrix = torch.rand(width, generator=random) + 0.5, torch.randn(48, width, generator=random)
    x = rows_on(backend, tokens, width, 5)
    batch = _prompt_batch(backend, tokens, _WHOLE)
    weights: Norm = RMSNorm(backend.vector([floats(norm)]), EPS)
    if name.startswith("LayerNorm"):
        weights = LayerNorm(weights.weight, backend.vector([floats(norm.flip(0))]), EPS)
    return backend.norm_linear(batch, x, weights, backend.weight([floats(matrix)]))


@dataclass(frozen=True)
class _Sequence:
    """A prompt of `length` tokens and one token more, of random numbers of `seed`; `table` has its blocks."""

    length: int
    table: Sequence[int]
    seed: int

    def slots(self, start: int, end: int) -> Tensor:
        """The cache's rows of positions start .. end - 1."""
        return slot_mapping(torch.arange(start, end), torch.tensor(self.table, dtype=torch.int32))


class _Side:
    """A backend with a cache layer of its own, of `blocks` blocks."""

    def __init__(self, backend: Backend[Any], cache_type: CacheType, size: int, blocks: int) -> None:
        self.backend = backend
        self.spec = _spec(size, backend.device)
        self.layer = allocate_layer(blocks * BLOCK_SIZE, KV_HEADS, size, backend.device, cache_type)
        for held in self.layer.tensors:  # freed memory may hold the right results of an earlier check
            held.fill_(3)

    def prompt(self, sequence: _Sequence) -> Tensor:
        """Attention of the prompt."""
        batch = _prompt_batch(self.backend, sequence.length, sequence.table)
        return self._attended(self._qkv(sequence, 0, sequence.length), batch).cpu()

    def newest(self, sequences: Sequence[_Sequence]) -> Tensor:
        """Attention of the token after the prompts of these sequences, in one step."""
        rows = [self._qkv(each, each.length, each.length + 1) for each in sequences]
        positions, tables = [each.length for each in sequences], [[each.table] for each in sequences]
        batch = decode_batch([0] * len(rows), positions, tables, self.backend.device)
        return self._attended(torch.cat(rows), batch)

    def _qkv(self, sequence: _Sequence, start: int, end: int) -> Tensor:
        """Rows start .. end - 1 of a sequence's queries, keys and values."""
        width = (HEADS + 2 * KV_HEADS) * self.spec.head_dim
        rows: Tensor = rows_on(self.backend, CONTEXT, width, sequence.seed)
        return rows[start:end].contiguous()

    def _attended(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        backend = self.backend
        width = HEADS * self.spec.head_dim
        return read_rows_of(
            backend, batch, lambda: backend.attention(batch, qkv, self.spec, self.layer), width
        )


def _check_attention(
    backend: Backend[Any], name: str, cache_type: CacheType, size: int, sequences: Sequence[_Sequence]
) -> Iterator[KernelCheck]:
    """The prompts, then one token more of the first sequence, then of all in a batch where there are several."""
    blocks = 1 + max(block for each in sequences for block in each.table)
    sides = [_Side(each, cache_type, size, blocks) for each in (backend, ReferenceBackend(keep=True))]

    def checks(test: str, results: Iterable[Tensor], slots: list[Tensor]) -> Iterator[KernelCheck]:
        found, wanted = results
        yield KernelCheck(name, test, nmse(found, wanted), LIMITS[cache_type][test])
        mine, exact = (
            torch.cat([part.cpu() for part in read_rows(side.layer, torch.cat(slots))]) for side in sides
        )
        limit = STORED if cache_type == "f16" else LIMITS[cache_type][test]
        yield KernelCheck(name, f"{test}: cache", nmse(mine, exact), limit)
        for rows, held in zip(sides[1].layer.tensors, sides[0].layer.tensors, strict=True):
            held.copy_(rows)

    prompts = (torch.cat([side.prompt(each) for each in sequences]) for side in sides)
    yield from checks("prompt", prompts, [each.slots(0, each.length) for each in sequences])
    for test, members in (("1 token", sequences[:1]), ("batch", sequences))[: len(sequences)]:
        newest = (side.newest(members) for side in sides)
        yield from checks(test, newest, [each.slots(each.length, each.length + 1) for each in members])


def _prompt_batch(backend: Backend[Any], length: int, table: Sequence[int]) -> ForwardBatch:
    """A prompt; one of a single token is a decode step."""
    if length == 1:
        return decode_batch([0], [0], [[table]], backend.device)
    return prefill_batch([[0] * length], [0], [[table]], backend.device)


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
