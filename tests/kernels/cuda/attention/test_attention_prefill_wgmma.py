"""Prefill attention on Hopper's warp-group instruction: against the definition, and the same bits wherever rows and
blocks lie. Triton's interpreter does not run it."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.attention_prefill import (
    attention_prefill,
    is_hopper,
    prefill_tiles,
    stores_ordered,
)
from quengine.kernels.cuda.attention.kv_store import KVStore
from quengine.kernels.cuda.attention.rope import rope_store
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, operand_shape
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from tests.kernels.cuda.attention.attention_cases import make_spec
from tests.kernels.cuda.attention.test_cuda_attention_prefill import expected_rows, run_chunks

CONTEXT = 768
CHUNK = 700


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    if not is_hopper(device):
        pytest.skip("needs a GPU of compute capability 9")


def long_spec(device: torch.device, heads: int, kv_heads: int, window: int | None = None) -> AttentionSpec:
    spec = make_spec(device, CONTEXT, heads, kv_heads, 128, window)
    return replace(spec, mask_band=causal_mask_band(CHUNK, CONTEXT, window, device))


def unwritten_cache(device: torch.device, rows: int, kv_heads: int) -> KVStore:
    """Rows that are not written must not be read: a NaN there would show."""
    cache = KVStore.allocate(1, rows, kv_heads, 128, device)
    for tensor in (cache.k, cache.v):
        tensor.fill_(float("nan"))
    return cache


def random_qkv(device: torch.device, tokens: int, heads: int, kv_heads: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, (heads + 2 * kv_heads) * 128, generator=generator).to(device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads,kv_heads,chunks,window",
    [
        (4, 2, [129], None),
        (2, 1, [256], None),
        (4, 1, [131, 200, 130], None),
        (1, 1, [384, 257], None),
        (2, 2, [CHUNK], None),
        (2, 1, [300, 260], 150),
        (2, 1, [140, 500], 1),
        (2, 1, [520], 256),
        (2, 1, [1, 640], 127),
    ],
)
def test_chunks_are_as_defined(
    heads: int, kv_heads: int, chunks: list[int], window: int | None, device: torch.device
) -> None:
    spec = long_spec(device, heads, kv_heads, window)
    cache = unwritten_cache(device, CONTEXT, kv_heads)
    assert stores_ordered(cache, None, chunks[-1])
    qkv = random_qkv(device, sum(chunks), heads, kv_heads)
    out = run_chunks(spec, cache, qkv, chunks, device)
    expected = expected_rows(spec, cache, qkv)
    assert torch.isfinite(out).all()
    error = (out.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 1e-3, f"relative error {error.max():.2e} of row {error.argmax()}"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 200])
def test_blocks_of_a_pool_and_ordered_rows_have_the_same_bits(
    window: int | None, device: torch.device
) -> None:
    spec = long_spec(device, 4, 2, window)
    blocks = CONTEXT // BLOCK_SIZE
    table = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(1))[:blocks]
    table = table.to(device, torch.int32)
    own, pool = unwritten_cache(device, CONTEXT, 2), unwritten_cache(device, CONTEXT + 3 * BLOCK_SIZE, 2)
    qkv = random_qkv(device, 605, 4, 2)
    start = 0
    for length in (205, 400):
        rows = qkv[start : start + length]
        positions = torch.arange(start, start + length, dtype=torch.int32, device=device)
        q = rope_store(rows, spec, own, 0, positions)
        again = rope_store(rows, spec, pool, 0, positions, block_table=table)
        assert torch.equal(q, again)
        plain = attention_prefill(q, spec, own, 0, start)
        paged = attention_prefill(q, spec, pool, 0, start, block_table=table, pdl=True)
        assert torch.equal(plain, paged)
        room = torch.zeros(
            operand_shape(length, 512, OperandLayout.WGMMA), dtype=torch.float16, device=device
        )
        attention_prefill(q, spec, own, 0, start, ordered=room)
        assert torch.equal(room[:length], Fp16Operand(plain, plain[:, 0]).as_wgmma().values[:length])
        assert not room[length:].any(), "rows behind the last were written"
        assert torch.equal(attention_prefill(q, spec, own, 0, start, in_place=True), plain)
        start += length


@pytest.mark.gpu
def test_chunks_of_several_prompts_are_each_its_own(device: torch.device) -> None:
    spec = long_spec(device, 4, 2)
    starts, lengths = (0, 61, 32), (267, 1, 140)
    own = [unwritten_cache(device, CONTEXT, 2) for _ in starts]
    pool = unwritten_cache(device, 3 * CONTEXT, 2)
    tables = torch.randperm(3 * CONTEXT // BLOCK_SIZE, generator=torch.Generator().manual_seed(2)).view(3, -1)
    batch = prefill_batch([[0] * length for length in lengths], starts, tables.tolist(), device)
    for sequence, start in enumerate(starts):  # what earlier chunks have left
        if start:
            before = random_qkv(device, start, 4, 2)
            at = torch.arange(start, dtype=torch.int32, device=device)
            rope_store(before, spec, own[sequence], 0, at)
            rope_store(before, spec, pool, 0, at, block_table=batch.block_tables[sequence].contiguous())
    prompts = prefill_tiles(batch, 128)
    qkv = random_qkv(device, sum(lengths), 4, 2)
    q = rope_store(
        qkv, spec, pool, 0, batch.positions, block_table=batch.block_tables, sequences=prompts.sequences
    )
    assert stores_ordered(pool, prompts, len(qkv))
    room = torch.zeros(operand_shape(len(qkv), 512, OperandLayout.WGMMA), dtype=torch.float16, device=device)
    attention_prefill(
        q, spec, pool, 0, 0, block_table=batch.block_tables, prompts=prompts, ordered=room, pdl=True
    )
    together = Fp16Operand(room, torch.ones(len(qkv), device=device), OperandLayout.WGMMA).row_major(512)
    for sequence, (rows, start, _) in enumerate(batch.chunks()):
        at = torch.arange(start, start + lengths[sequence], dtype=torch.int32, device=device)
        alone = rope_store(qkv[rows], spec, own[sequence], 0, at)
        expected = attention_prefill(alone, spec, own[sequence], 0, start)
        if lengths[sequence] > 128:
            assert torch.equal(together[rows], expected)
        else:  # alone it is computed by another kernel
            torch.testing.assert_close(together[rows], expected, rtol=2e-3, atol=2e-3)
