"""Attention over a paged cache: the same bits wherever its blocks lie, alone and in any batch."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention import attention_arguments, attention_tiles, attention_warps
from quengine.kernels.cuda.attention.attention_arguments import DecodeWorkspace
from quengine.kernels.cuda.attention.attention_decode import attention_decode
from quengine.kernels.cuda.attention.rope_store import rope_store
from quengine.kernels.cuda.backend import has_dependent_launch
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CacheType
from tests.kernels.cuda.attention.attention_cases import (
    PagedCache,
    filled_cache,
    make_spec,
    rotate_and_write,
    run_prefill,
)

BLOCKS = 9
"""Of a sequence, at most."""
CONTEXT = BLOCKS * BLOCK_SIZE


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs block after block; 8 a sequence say what 128 would."""
    monkeypatch.setattr(attention_arguments, "_TARGET_PROGRAMS", 8)


def sequences_of(spec: AttentionSpec, sequences: int, cache_type: CacheType = "f16") -> PagedCache:
    return filled_cache(spec.cos.device, sequences, CONTEXT, spec.kv_heads, spec.head_dim, cache_type)


def decode(
    spec: AttentionSpec,
    cache: PagedCache,
    qkv: torch.Tensor,
    positions: list[int],
    coarse: bool = False,
    tables: torch.Tensor | None = None,
    angles: list[int] | None = None,
) -> torch.Tensor:
    """With `tables` in place of the cache's."""
    batch = len(positions)
    at = torch.tensor(positions, dtype=torch.int32, device=qkv.device)
    workspace = DecodeWorkspace.allocate(batch, spec.heads, spec.kv_heads, spec.head_dim, qkv.device)
    out = torch.full((batch, spec.heads * spec.head_dim), float("nan"), device=qkv.device)
    pdl = qkv.device.type == "cuda" and has_dependent_launch(qkv.device)
    tables = cache.tables if tables is None else tables
    turned = None if angles is None else torch.tensor(angles, dtype=torch.int32, device=qkv.device)
    attention_decode(qkv, spec, cache.layer, at, tables, workspace, out, coarse, pdl, turned)
    assert not workspace.arrivals.any()
    return out


def random_qkv(device: torch.device, spec: AttentionSpec, rows: int) -> torch.Tensor:
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(5)).to(device)


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,window,cache_type,coarse",
    [
        (4, 2, 64, None, "f16", False),
        (4, 2, 64, 170, "f16", True),
        (3, 1, 80, None, "f16", False),
        (2, 1, 64, None, "q8_0", True),
        (2, 2, 64, 70, "f16", False),
        (2, 2, 64, 33, "q8_0", False),
        (4, 2, 128, None, "q4_0", True),
        (2, 2, 64, 33, "q4_0", False),
        (2, 1, 256, 200, "f16", True),
    ],
)
def test_decode_is_the_same_wherever_blocks_lie(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    cache_type: CacheType,
    coarse: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_tiles, "COARSE", 96)
    monkeypatch.setattr(attention_warps, "COARSE", attention_warps.SplitShape(2, 128))
    spec = make_spec(device, CONTEXT, heads, kv_heads, head_dim, window)
    positions = [CONTEXT - 1, 0, 103]
    cache = sequences_of(spec, len(positions), cache_type)
    pool = cache.shuffled(2)
    qkv = random_qkv(device, spec, len(positions))
    paged = decode(spec, pool, qkv, positions, coarse)
    assert torch.equal(paged, decode(spec, cache, qkv, positions, coarse))
    for held, expected in zip(pool.planes(), cache.planes(), strict=True):
        assert torch.equal(held, expected), "keys and values went to other rows"


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(64, 64), (64, 32), (80, 80)])
def test_rows_may_be_rotated_by_others_than_their_positions(
    head_dim: int, rope_dim: int, device: torch.device
) -> None:
    """As with tables whose rows at the positions are those; in decode by both kernels, and in prefill."""
    positions, angles = [200, 31, 5], [120, 31, 250]
    spec = make_spec(device, CONTEXT, 2, 1, head_dim, rope_dim=rope_dim)
    cos, sin = (table.clone() for table in (spec.cos, spec.sin))
    for table in (cos, sin):
        table[positions] = table[angles].clone()
    moved = replace(spec, cos=cos, sin=sin)
    qkv, caches = random_qkv(device, spec, 3), [sequences_of(spec, 3) for _ in range(2)]
    found = decode(spec, caches[0], qkv, positions, angles=angles)
    assert torch.equal(found, decode(moved, caches[1], qkv, positions))
    assert not torch.equal(found, decode(spec, sequences_of(spec, 3), qkv, positions))
    at, turned, rows = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in (positions, angles, range(3))
    )
    stored = [
        rope_store(qkv, each, cache.layer, at, cache.tables, rows, angle_rows=given)
        for each, cache, given in ((spec, caches[0], turned), (moved, caches[1], None))
    ]
    assert torch.equal(*stored)
    for held, expected in zip(caches[0].planes(), caches[1].planes(), strict=True):
        assert torch.equal(held, expected)


def test_a_row_is_the_same_alone_and_in_any_batch(device: torch.device) -> None:
    spec = make_spec(device, CONTEXT, 4, 2, 64)
    positions = [200, 31, 287, 64, 5]
    cache = sequences_of(spec, len(positions))
    qkv = random_qkv(device, spec, len(positions))
    alone = []
    for row, position in enumerate(positions):
        pool = cache.shuffled(1)
        alone.append(decode(spec, pool, qkv[row : row + 1], [position], tables=pool.sequence(row)))
    for batch in ([4, 2], [2, 0, 1, 3, 4], [1, 3, 2]):
        pool = cache.shuffled(1)
        tables = pool.tables[batch].contiguous()
        out = decode(spec, pool, qkv[batch], [positions[row] for row in batch], tables=tables)
        for at, row in enumerate(batch):
            assert torch.equal(out[at], alone[row][0])


def test_coarse_splits_are_the_same_sums(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split, two of them, and what is longer than the splits there are; few programs, and many, of fewer
    registers."""
    monkeypatch.setattr(attention_warps, "FEW_PROGRAMS", 4)
    monkeypatch.setattr(attention_tiles, "COARSE", 64)
    monkeypatch.setattr(attention_warps, "COARSE", attention_warps.SplitShape(2, 64))
    spec = make_spec(device, CONTEXT, 4, 2, 64)
    positions = [40, 100, 287]
    pool = sequences_of(spec, 3).shuffled(1)
    qkv = random_qkv(device, spec, 3)
    fine = decode(spec, pool, qkv, positions)
    coarse = decode(spec, pool, qkv, positions, coarse=True)
    torch.testing.assert_close(coarse, fine, rtol=1e-5, atol=1e-5)
    assert not torch.equal(coarse[1], fine[1])
    alone = decode(spec, pool, qkv[1:2], positions[1:2], coarse=True, tables=pool.sequence(1))
    assert torch.equal(alone[0], coarse[1])


@pytest.mark.parametrize("form", [OperandLayout.WGMMA, OperandLayout.MMA])
def test_a_batch_may_leave_an_fp16_operand(
    form: OperandLayout, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One split, and two that are combined."""
    monkeypatch.setattr(attention_tiles, "COARSE", 64)
    monkeypatch.setattr(attention_warps, "COARSE", attention_warps.SplitShape(2, 64))
    spec = make_spec(device, CONTEXT, 2, 1, 64)
    positions = torch.tensor([40, 100], dtype=torch.int32, device=device)
    pool = sequences_of(spec, 2).shuffled(1)
    qkv = random_qkv(device, spec, 2)
    plain = decode(spec, pool, qkv, positions.tolist(), coarse=True)
    rows = Fp16Operand.empty(2, 128, device, form)
    rows.values.fill_(float("nan"))
    rows.row_scale.fill_(1)
    workspace = DecodeWorkspace.allocate(2, spec.heads, spec.kv_heads, spec.head_dim, device)
    attention_decode(qkv, spec, pool.layer, positions, pool.tables, workspace, rows, coarse=True)
    assert torch.equal(rows.dequantize(128), plain.half().float())


def test_padding_rows_touch_the_padding_block_only(device: torch.device) -> None:
    spec = make_spec(device, CONTEXT, 2, 1, 64)
    cache = sequences_of(spec, 2)
    pool = cache.shuffled(1)
    (unused,) = set(range(2 * BLOCKS + 1)) - set(pool.tables.flatten().tolist())
    padding = torch.full((3, BLOCKS), unused, dtype=torch.int32, device=device)
    qkv = random_qkv(device, spec, 5)
    qkv[2:] = float("nan")
    out = decode(spec, pool, qkv, [50, 90, 0, 0, 0], tables=torch.cat((pool.tables, padding)))
    assert torch.equal(out[:2], decode(spec, cache, qkv[:2], [50, 90]))
    for held, expected in zip(pool.planes(), cache.planes(), strict=True):
        assert torch.equal(held, expected)


def test_a_position_past_the_table_is_not_written(device: torch.device) -> None:
    spec = make_spec(device, CONTEXT, 2, 1, 64)
    pool = sequences_of(spec, 1).shuffled(3)
    before = pool.layer.k.clone(), pool.layer.v.clone()
    qkv = random_qkv(device, spec, 1)
    short = pool.tables[:, :2].contiguous()
    decode(spec, pool, qkv, [64], tables=short)
    past = torch.tensor([64], dtype=torch.int32, device=device)
    rope_store(qkv, spec, pool.layer, past, short, torch.zeros_like(past))
    assert torch.equal(pool.layer.k, before[0]) and torch.equal(pool.layer.v, before[1])


@pytest.mark.parametrize("head_dim", [64, 80])
def test_quantized_output_is_the_same_too(head_dim: int, device: torch.device) -> None:
    """A head of 80 takes a launch of its own for the quantization."""
    spec = make_spec(device, CONTEXT, 2, 2, head_dim)
    cache = sequences_of(spec, 2)
    qkv = random_qkv(device, spec, 2)
    positions = torch.tensor([70, 3], dtype=torch.int32, device=device)
    workspace = DecodeWorkspace.allocate(2, 2, 2, head_dim, device)
    results = []
    for held in (cache, cache.shuffled()):
        out = QuantizedActivations.empty(2, 2 * head_dim, device)
        attention_decode(qkv, spec, held.layer, positions, held.tables, workspace, out)
        results.append(out)
    assert torch.equal(results[0].dequantize(), results[1].dequantize())
    assert torch.equal(results[0].sums, results[1].sums)


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,chunks,window,cache_type",
    [
        (2, 1, 64, [66, 5], None, "f16"),
        (2, 1, 96, [33, 12], 20, "f16"),
        (2, 1, 64, [66, 20], 67, "q8_0"),
        (2, 1, 64, [66, 20], 67, "q4_0"),
        *[(1, 1, 256, [40, 30], None, "f16")] * torch.cuda.is_available(),
    ],
)
def test_prefill_is_the_same_wherever_blocks_lie(
    heads: int,
    kv_heads: int,
    head_dim: int,
    chunks: list[int],
    window: int | None,
    cache_type: CacheType,
    device: torch.device,
) -> None:
    spec = make_spec(device, CONTEXT, heads, kv_heads, head_dim, window)
    cache = sequences_of(spec, 1, cache_type)
    pool = cache.shuffled(2)
    table = pool.tables[:, : -(-sum(chunks) // BLOCK_SIZE)]  # no longer than the sequence
    qkv = random_qkv(device, spec, sum(chunks))
    start = 0
    for size in chunks:
        part = qkv[start : start + size]
        q, expected = run_prefill(spec, cache.layer, part, [start], [size], cache.tables)
        paged_q, paged = run_prefill(spec, pool.layer, part, [start], [size], table)
        assert torch.equal(q, paged_q) and torch.equal(paged, expected)
        start += size
    for held, expected in zip(pool.planes(), cache.planes(), strict=True):
        assert torch.equal(held, expected)


def released(cache: PagedCache, keep_from: int) -> torch.Tensor:
    """Block tables whose entries before position `keep_from`'s name a padding block that holds NaN."""
    for tensor in cache.layer.tensors:
        if tensor.dtype == torch.float16:
            tensor[-BLOCK_SIZE:] = float("nan")
    tables = cache.tables.clone()
    tables[:, : keep_from // BLOCK_SIZE] = cache.layer.k.shape[0] // BLOCK_SIZE - 1
    return tables


def with_padding_block(cache: PagedCache) -> PagedCache:
    """The same in order, with a padding block at the end."""
    sequences, blocks = cache.tables.shape
    layer, context = cache.layer, blocks * BLOCK_SIZE
    made = PagedCache.empty(
        cache.tables.device, sequences, context, layer.k.shape[1], layer.head_dim, layer.cache_type, 1
    )
    for tensor, held in zip(made.layer.tensors, cache.layer.tensors, strict=True):
        tensor[: held.shape[0]] = held
    return made


@pytest.mark.parametrize(
    "head_dim,window,cache_type,coarse,position",
    [
        (64, 33, "f16", False, 200),
        (64, 100, "q8_0", True, 287),
        (256, 40, "f16", False, 129),
        (96, 32, "q8_0", False, 160),
        (64, 100, "q4_0", True, 287),
        (128, 65, "f16", True, 224),
    ],
)
def test_decode_reads_no_block_behind_the_window(
    head_dim: int, window: int, cache_type: CacheType, coarse: bool, position: int, device: torch.device
) -> None:
    spec = make_spec(device, CONTEXT, 2, 1, head_dim, window)
    qkv = random_qkv(device, spec, 1)
    cache = with_padding_block(sequences_of(spec, 1, cache_type))
    expected = decode(spec, cache, qkv, [position], coarse)
    tables = released(cache, position + 1 - window)
    assert not torch.equal(tables, cache.tables)
    assert torch.equal(decode(spec, cache, qkv, [position], coarse, tables), expected)


@pytest.mark.parametrize(
    "head_dim,window,cache_type,start,rows,batch_invariant",
    [
        (64, 33, "f16", 200, 40, False),
        (64, 100, "q8_0", 160, 70, False),
        (96, 40, "f16", 129, 3, True),
        (256, 70, "q8_0", 150, 20, False),
        (96, 70, "q4_0", 150, 20, False),
        (64, 1, "q8_0", 100, 66, True),
    ],
)
def test_prefill_reads_no_block_behind_the_window(
    head_dim: int,
    window: int,
    cache_type: CacheType,
    start: int,
    rows: int,
    batch_invariant: bool,
    device: torch.device,
) -> None:
    """Key tiles begin at multiples of their size, before the first key that a row sees."""
    spec = make_spec(device, CONTEXT, 2, 1, head_dim, window)
    qkv = random_qkv(device, spec, rows)
    cache = with_padding_block(sequences_of(spec, 1, cache_type))
    _, expected = run_prefill(
        spec, cache.layer, qkv, [start], [rows], cache.tables, batch_invariant, rotate_and_write
    )
    tables = released(cache, start + 1 - window)
    assert not torch.equal(tables, cache.tables)
    _, out = run_prefill(spec, cache.layer, qkv, [start], [rows], tables, batch_invariant, rotate_and_write)
    assert torch.equal(out, expected)
