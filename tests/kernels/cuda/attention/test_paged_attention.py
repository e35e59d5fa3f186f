"""Attention over blocks of a pool: the same bits as over a sequence's own cache, alone and in any batch."""

import pytest
import torch

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention import attention_arguments, attention_tiles, attention_warps
from quengine.kernels.cuda.attention.attention_arguments import DecodeWorkspace
from quengine.kernels.cuda.attention.attention_decode import (
    attention_decode,
    attention_decode_half,
    attention_decode_round,
)
from quengine.kernels.cuda.attention.attention_prefill import attention_prefill
from quengine.kernels.cuda.attention.kv_store import KVStore
from quengine.kernels.cuda.attention.rope import rope_store
from quengine.kernels.cuda.backend import has_dependent_launch
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from tests.kernels.cuda.attention.attention_cases import filled_cache, make_spec

BLOCKS = 9
"""Of a sequence, at most."""
CONTEXT = BLOCKS * BLOCK_SIZE


@pytest.fixture(autouse=True)
def _few_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs block after block; 8 a sequence say what 128 would."""
    monkeypatch.setattr(attention_arguments, "_TARGET_BLOCKS", 8)


def planes(cache: KVStore) -> list[torch.Tensor]:
    return [t for t in (cache.k, cache.v, cache.k_scale, cache.v_scale) if t is not None]


def sequences_of(spec: AttentionSpec, sequences: int, q8_0: bool) -> KVStore:
    return filled_cache(spec.cos.device, sequences, CONTEXT, spec.kv_heads, spec.head_dim, q8_0)


def as_pool(cache: KVStore, spare: int) -> tuple[KVStore, torch.Tensor]:
    """The sequences' rows in blocks of one pool, in no order and with `spare` blocks besides; their block tables."""
    sequences = cache.k.shape[0]
    order = torch.randperm(sequences * BLOCKS + spare, generator=torch.Generator().manual_seed(4))
    tables = order[: sequences * BLOCKS].view(sequences, BLOCKS).to(cache.k.device)
    pooled = []
    for plane in planes(cache):
        heads, width = plane.shape[1], plane.shape[3]
        pool = torch.full((heads, len(order), BLOCK_SIZE, width), 77, dtype=plane.dtype, device=plane.device)
        pool[:, tables] = plane.view(sequences, heads, BLOCKS, BLOCK_SIZE, width).transpose(0, 1)
        pooled.append(pool.view(1, heads, -1, width))
    return KVStore(*pooled), tables.to(torch.int32)


def as_sequences(pool: KVStore, tables: torch.Tensor) -> list[torch.Tensor]:
    """The planes of a pool as [sequences, kv_heads, context, ...]."""
    blocks = tables.long()
    return [
        plane[0].unflatten(1, (-1, BLOCK_SIZE))[:, blocks].transpose(0, 1).flatten(2, 3)
        for plane in planes(pool)
    ]


def decode(
    spec: AttentionSpec,
    cache: KVStore,
    qkv: torch.Tensor,
    positions: list[int],
    tables: torch.Tensor | None,
    coarse: bool = False,
) -> torch.Tensor:
    batch = len(positions)
    at = torch.tensor(positions, dtype=torch.int32, device=qkv.device)
    workspace = DecodeWorkspace.allocate(batch, spec.heads, spec.kv_heads, spec.head_dim, qkv.device)
    out = torch.full((batch, spec.heads * spec.head_dim), float("nan"), device=qkv.device)
    pdl = qkv.device.type == "cuda" and has_dependent_launch(qkv.device)
    attention_decode(qkv, spec, cache, at, workspace, out, pdl, tables, coarse)
    assert not workspace.arrived.any()
    return out


def random_qkv(device: torch.device, spec: AttentionSpec, rows: int) -> torch.Tensor:
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(5)).to(device)


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,window,q8_0,coarse",
    [
        (4, 2, 64, None, False, False),
        (4, 2, 64, 170, False, True),
        (3, 1, 80, None, False, False),
        (2, 1, 64, None, True, True),
        (2, 2, 64, 70, False, False),
        (2, 2, 64, 33, True, False),
        (2, 1, 256, 200, False, True),
    ],
)
def test_decode_over_blocks_is_decode_over_rows(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    q8_0: bool,
    coarse: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_tiles, "COARSE", 96)
    monkeypatch.setattr(attention_warps, "COARSE", attention_warps.Slices(2, 128))
    spec = make_spec(device, CONTEXT, heads, kv_heads, head_dim, window)
    positions = [CONTEXT - 1, 0, 103]
    cache = sequences_of(spec, len(positions), q8_0)
    pool, tables = as_pool(cache, 2)
    qkv = random_qkv(device, spec, len(positions))
    paged = decode(spec, pool, qkv, positions, tables, coarse)
    assert torch.equal(paged, decode(spec, cache, qkv, positions, None, coarse))
    for held, expected in zip(as_sequences(pool, tables), planes(cache), strict=True):
        assert torch.equal(held, expected), "keys and values went to other rows"


def test_a_row_is_the_same_alone_and_in_any_batch(device: torch.device) -> None:
    spec = make_spec(device, CONTEXT, 4, 2, 64)
    positions = [200, 31, 287, 64, 5]
    cache = sequences_of(spec, len(positions), False)
    qkv = random_qkv(device, spec, len(positions))
    alone = []
    for row, position in enumerate(positions):
        pool, tables = as_pool(cache, 1)
        alone.append(decode(spec, pool, qkv[row : row + 1], [position], tables[row : row + 1]))
    for batch in ([4, 2], [2, 0, 1, 3, 4], [1, 3, 2]):
        pool, tables = as_pool(cache, 1)
        out = decode(spec, pool, qkv[batch], [positions[row] for row in batch], tables[batch].contiguous())
        for place, row in enumerate(batch):
            assert torch.equal(out[place], alone[row][0])


def test_coarse_slices_are_the_same_sums(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slice, two of them, and what is longer than the slices there are; few programs, and many, of fewer
    registers."""
    monkeypatch.setattr(attention_warps, "FEW_PROGRAMS", 4)
    monkeypatch.setattr(attention_tiles, "COARSE", 64)
    monkeypatch.setattr(attention_warps, "COARSE", attention_warps.Slices(2, 64))
    spec = make_spec(device, CONTEXT, 4, 2, 64)
    positions = [40, 100, 287]
    pool, tables = as_pool(sequences_of(spec, 3, False), 1)
    qkv = random_qkv(device, spec, 3)
    fine = decode(spec, pool, qkv, positions, tables)
    coarse = decode(spec, pool, qkv, positions, tables, coarse=True)
    torch.testing.assert_close(coarse, fine, rtol=1e-5, atol=1e-5)
    assert not torch.equal(coarse[1], fine[1])
    alone = decode(spec, pool, qkv[1:2], positions[1:2], tables[1:2].contiguous(), coarse=True)
    assert torch.equal(alone[0], coarse[1])


@pytest.mark.parametrize("form", [OperandLayout.WGMMA, OperandLayout.MMA])
def test_a_batch_may_leave_half_rows(
    form: OperandLayout, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slice, and two that are combined."""
    monkeypatch.setattr(attention_tiles, "COARSE", 64)
    monkeypatch.setattr(attention_warps, "COARSE", attention_warps.Slices(2, 64))
    spec = make_spec(device, CONTEXT, 2, 1, 64)
    positions = torch.tensor([40, 100], dtype=torch.int32, device=device)
    pool, tables = as_pool(sequences_of(spec, 2, False), 1)
    qkv = random_qkv(device, spec, 2)
    plain = decode(spec, pool, qkv, positions.tolist(), tables, coarse=True)
    rows = Fp16Operand.empty(2, 128, device, form)
    rows.values.fill_(float("nan"))
    rows.row_scale.fill_(1)
    workspace = DecodeWorkspace.allocate(2, spec.heads, spec.kv_heads, spec.head_dim, device)
    attention_decode_half(qkv, spec, pool, positions, workspace, rows, block_tables=tables)
    assert torch.equal(rows.dequantize(128), plain.half().float())


def test_rows_that_fill_a_batch_up_touch_the_padding_block_only(device: torch.device) -> None:
    spec = make_spec(device, CONTEXT, 2, 1, 64)
    cache = sequences_of(spec, 2, False)
    pool, tables = as_pool(cache, 1)
    (spare,) = set(range(2 * BLOCKS + 1)) - set(tables.flatten().tolist())
    padding = torch.full((3, BLOCKS), spare, dtype=torch.int32, device=device)
    qkv = random_qkv(device, spec, 5)
    qkv[2:] = float("nan")
    out = decode(spec, pool, qkv, [50, 90, 0, 0, 0], torch.cat((tables, padding)))
    assert torch.equal(out[:2], decode(spec, cache, qkv[:2], [50, 90], None))
    for held, expected in zip(as_sequences(pool, tables), planes(cache), strict=True):
        assert torch.equal(held, expected)


def test_a_position_past_the_table_is_not_written(device: torch.device) -> None:
    spec = make_spec(device, CONTEXT, 2, 1, 64)
    pool, tables = as_pool(sequences_of(spec, 1, False), 3)
    before = pool.k.clone(), pool.v.clone()
    qkv = random_qkv(device, spec, 1)
    decode(spec, pool, qkv, [64], tables[:, :2].contiguous())
    past = torch.tensor([64], dtype=torch.int32, device=device)
    rope_store(qkv, spec, pool, 0, past, block_table=tables[0, :2].contiguous())
    assert torch.equal(pool.k, before[0]) and torch.equal(pool.v, before[1])


@pytest.mark.parametrize("head_dim", [64, 80])
def test_rounded_output_is_the_same_too(head_dim: int, device: torch.device) -> None:
    """A head of 80 takes a launch of its own for the rounding."""
    spec = make_spec(device, CONTEXT, 2, 2, head_dim)
    cache = sequences_of(spec, 2, False)
    pool, tables = as_pool(cache, 0)
    qkv = random_qkv(device, spec, 2)
    positions = torch.tensor([70, 3], dtype=torch.int32, device=device)
    workspace = DecodeWorkspace.allocate(2, 2, 2, head_dim, device)
    results = []
    for held, block_tables in ((cache, None), (pool, tables)):
        out = QuantizedActivations.empty(2, 2 * head_dim, device)
        attention_decode_round(qkv, spec, held, positions, workspace, out, False, block_tables)
        results.append(out)
    assert torch.equal(results[0].dequantize(), results[1].dequantize())
    assert torch.equal(results[0].sums, results[1].sums)


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,chunks,window,q8_0",
    [
        (2, 1, 64, [70, 35], None, False),
        (2, 1, 96, [33, 40], 20, False),
        (2, 1, 64, [66, 70], 67, True),
        *[(1, 1, 256, [40, 30], None, False)] * torch.cuda.is_available(),
    ],
)
def test_prefill_over_blocks_is_prefill_over_rows(
    heads: int,
    kv_heads: int,
    head_dim: int,
    chunks: list[int],
    window: int | None,
    q8_0: bool,
    device: torch.device,
) -> None:
    spec = make_spec(device, CONTEXT, heads, kv_heads, head_dim, window)
    cache = sequences_of(spec, 1, q8_0)
    pool, tables = as_pool(cache, 2)
    table = tables[0, : -(-sum(chunks) // BLOCK_SIZE)].contiguous()  # no longer than the sequence
    qkv = random_qkv(device, spec, sum(chunks))
    start = 0
    for size in chunks:
        positions = torch.arange(start, start + size, dtype=torch.int32, device=device)
        part = qkv[start : start + size]
        q = rope_store(part, spec, cache, 0, positions)
        paged_q = rope_store(part, spec, pool, 0, positions, block_table=table)
        assert torch.equal(q, paged_q)
        expected = attention_prefill(q, spec, cache, 0, start, torch.float32)
        assert torch.equal(
            attention_prefill(q, spec, pool, 0, start, torch.float32, block_table=table), expected
        )
        start += size
    for held, contiguous in zip(as_sequences(pool, tables), planes(cache), strict=True):
        assert torch.equal(held, contiguous)
