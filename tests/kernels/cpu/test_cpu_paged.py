"""CPU attention over blocks of a paged cache: the bits of a contiguous one, wherever the blocks lie."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_TYPES, CacheType
from quengine.kernels.kv.kv_rows import allocate_layer, slot_mapping, write_rows
from quengine.kernels.rope import RopeSpec, rope_table
from tests.kernels.cpu.cpu_runs import attend_chunk, attend_token, batch_attention
from tests.kernels.weights import randn

LENGTHS = (1, 32, 33, 255, 256, 257, 700)
BLOCKS = 60


def unwritten(rows: int, kv_heads: int, width: int, cache_type: CacheType) -> KVLayer:
    layer = allocate_layer(rows, kv_heads, width, "cpu", cache_type)
    for tensor in layer.tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)  # rows never written are never read
    return layer


@dataclass
class Held:
    """Sequences of LENGTHS, each in a contiguous cache of its own, and all in the blocks of one pool."""

    alone: list[KVLayer]
    pool: KVLayer
    tables: Tensor  # int32 [sequences, most blocks]


def newest(positions: Tensor, tables: Tensor) -> ForwardBatch:
    return decode_batch(
        [0] * len(positions), positions.tolist(), [[table] for table in tables.tolist()], torch.device("cpu")
    )


def chunk(start: int, tokens: int, table: Tensor) -> ForwardBatch:
    return prefill_batch([[0] * tokens], [start], [[table.tolist()]], torch.device("cpu"))


def held(kv_heads: int, width: int, cache_type: CacheType) -> Held:
    free = random.Random(7).sample(range(BLOCKS), BLOCKS)
    most = -(-max(LENGTHS) // BLOCK_SIZE)
    pool = unwritten(BLOCKS * BLOCK_SIZE, kv_heads, width, cache_type)
    alone, tables = [], []
    for length in LENGTHS:
        own = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        table = torch.tensor(own + [free[0]] * (most - len(own)), dtype=torch.int32)
        k, v = (randn(length, kv_heads, width, seed=2 * length + i) for i in range(2))
        layer = unwritten(length, kv_heads, width, cache_type)
        write_rows(layer, 0, k, v)
        write_rows(pool, slot_mapping(torch.arange(length), table), k, v)
        alone.append(layer)
        tables.append(table)
    return Held(alone, pool, torch.stack(tables))


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (5, 1, 32), (7, 7, 96)])
def test_newest_tokens_over_blocks_see_what_each_sees_alone(
    cache_type: CacheType, window: int | None, heads: int, kv_heads: int, width: int
) -> None:
    caches, q = held(kv_heads, width, cache_type), randn(len(LENGTHS), heads, width)
    positions = torch.tensor(LENGTHS, dtype=torch.int32) - 1
    out = batch_attention(q, caches.pool, newest(positions, caches.tables), 0.125, window)
    for row, layer, length, mixed in zip(q, caches.alone, LENGTHS, out, strict=True):
        first = max(0, length - window) if window else 0
        assert torch.equal(mixed, attend_token(row, layer, length, 0.125, first))
    some = [6, 2, 0]
    part = newest(positions[some], caches.tables[some])
    assert torch.equal(batch_attention(q[some], caches.pool, part, 0.125, window), out[some])


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("window", [None, 90])
def test_a_chunk_over_blocks_sees_what_it_sees_in_adjacent_rows(
    cache_type: CacheType, window: int | None
) -> None:
    caches = held(2, 64, cache_type)
    for layer, table, length in zip(caches.alone, caches.tables, LENGTHS, strict=True):
        for tokens in {1, min(length, 50), length}:
            q, start = randn(tokens, 6, 64), length - tokens
            paged = cpu.prefill_attention(q, caches.pool, start, 0.125, window, table)
            assert torch.equal(paged, attend_chunk(q, layer, start, 0.125, window))


def spec_of(ctx: int) -> AttentionSpec:
    cos, sin = rope_table(RopeSpec(64, layout="halves"), ctx)
    return AttentionSpec(
        *(4, 2, 64, 0.125, None, "halves", cos, sin), mask_band=causal_mask_band(8, ctx), eps=1e-6
    )


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_rows_are_written_where_the_tables_say(cache_type: CacheType) -> None:
    spec, qkv = spec_of(128), randn(3, 8 * 64)
    table = torch.tensor([5, 2, 0, 3], dtype=torch.int32)
    tables = torch.stack([table, table.flip(0), table.roll(1)])
    positions = torch.tensor([64, 33, 31], dtype=torch.int32)
    for batch, each in [(chunk(31, 3, table), table.expand(3, 4)), (newest(positions, tables), tables)]:
        places = batch.positions.tolist()
        pool, alone = (unwritten(rows, 2, 64, cache_type) for rows in (6 * BLOCK_SIZE, 128))
        q = cpu.rope_store(qkv.clone(), spec, pool, batch)
        slots = slot_mapping(torch.tensor(places), each)
        for row, position in enumerate(places):
            one = chunk(position, 1, torch.arange(4))
            assert torch.equal(cpu.rope_store(qkv[row : row + 1].clone(), spec, alone, one), q[row : row + 1])
        for written, expected in zip(pool.tensors, alone.tensors, strict=True):
            assert torch.equal(written[slots], expected[places])
            untouched = torch.ones(len(written), dtype=torch.bool)
            untouched[slots] = False
            rest = written[untouched]
            assert bool(rest.isnan().all() if rest.is_floating_point() else (rest == 77).all())


def test_what_lies_outside_is_refused() -> None:
    spec, layer, qkv = spec_of(96), unwritten(4 * BLOCK_SIZE, 2, 64, "f16"), randn(2, 8 * 64)
    table = torch.tensor([0, 4, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="positions 95 to 96 are not in a cache of 96"):
        cpu.rope_store(qkv, spec, layer, chunk(95, 2, table))
    with pytest.raises(ValueError, match="rows 31 to 128 are not in a cache of 128"):
        cpu.rope_store(qkv, spec, layer, chunk(31, 2, table))
    with pytest.raises(ValueError, match="positions 90 to 96 are not in a cache of 96"):
        cpu.prefill_attention(randn(7, 4, 64), layer, 90, 0.125, None, table)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_blocks_before_the_window_are_not_read(cache_type: CacheType) -> None:
    layer, length, window = unwritten(24 * BLOCK_SIZE, 2, 64, cache_type), 700, 100
    table = torch.cat([torch.zeros(18, dtype=torch.int64), torch.arange(1, 5)])  # block 0 holds no numbers
    rows = slot_mapping(torch.arange(576, length), table)
    write_rows(layer, rows, *(randn(length - 576, 2, 64, seed=i) for i in range(2)))
    q = randn(24, 4, 64)
    chunk_of = cpu.prefill_attention(q, layer, length - 24, 0.125, window, table)
    assert chunk_of.isfinite().all()
    everywhere = unwritten(24 * BLOCK_SIZE, 2, 64, cache_type)
    write_rows(everywhere, 0, *(randn(24 * BLOCK_SIZE, 2, 64, seed=2) for _ in range(2)))
    write_rows(everywhere, torch.arange(576, length), *(randn(length - 576, 2, 64, seed=i) for i in range(2)))
    assert torch.equal(chunk_of, attend_chunk(q, everywhere, length - 24, 0.125, window))
    newest_of = batch_attention(q[-1:], layer, newest(torch.tensor([length - 1]), table[None]), 0.125, window)
    assert torch.equal(newest_of[0], attend_token(q[-1], everywhere, length, 0.125, length - window))
