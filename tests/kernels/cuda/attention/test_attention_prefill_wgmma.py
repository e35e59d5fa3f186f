"""Prefill attention on Hopper's warp-group instruction: against the definition, and the same bits wherever rows and
blocks lie. Triton's interpreter does not run it."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.attention import causal_mask_band, gate_output, split_gates
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.attention_prefill import (
    attention_prefill,
    prefill_tiles,
    stores_wgmma_layout,
)
from quengine.kernels.cuda.attention.output_gate import qkv_width
from quengine.kernels.cuda.attention.rope_store import rope_store
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, operand_shape
from quengine.kernels.cuda.launch.gpu import is_hopper
from quengine.kernels.forward_batch import ForwardBatch, prefill_batch
from tests.kernels.cuda.attention.attention_cases import (
    PagedCache,
    make_spec,
    run_chunks,
    run_prefill,
    sinks_near,
)
from tests.kernels.cuda.attention.test_cuda_attention_prefill import expected_rows
from tests.kernels.cuda.attention.test_paged_attention import released

CONTEXT = 768
CHUNK = 700


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    if not is_hopper(device):
        pytest.skip("needs a GPU of compute capability 9")


@pytest.fixture(params=[128, 256])
def size(request: pytest.FixtureRequest) -> int:
    """Elements of a head."""
    return int(request.param)


def long_spec(
    device: torch.device, size: int, heads: int, kv_heads: int, window: int | None = None
) -> AttentionSpec:
    spec = make_spec(device, CONTEXT, heads, kv_heads, size, window)
    return replace(spec, mask_band=causal_mask_band(CHUNK, CONTEXT, window, device))


def random_qkv(device: torch.device, size: int, tokens: int, heads: int, kv_heads: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, (heads + 2 * kv_heads) * size, generator=generator).to(device)


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
    heads: int, kv_heads: int, chunks: list[int], window: int | None, size: int, device: torch.device
) -> None:
    spec = long_spec(device, size, heads, kv_heads, window)
    cache = PagedCache.empty(device, 1, CONTEXT, kv_heads, size)
    last = prefill_batch([[0] * chunks[-1]], [0], [[table] for table in cache.tables.tolist()], device)
    assert stores_wgmma_layout(spec, cache.layer, prefill_tiles(last))
    qkv = random_qkv(device, size, sum(chunks), heads, kv_heads)
    out = run_chunks(spec, cache.layer, qkv, chunks, cache.tables)
    expected = expected_rows(spec, cache, qkv)
    assert torch.isfinite(out).all()
    error = (out.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 1e-3, f"relative error {error.max():.2e} of row {error.argmax()}"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 150])
def test_results_are_multiplied_by_output_gates(window: int | None, size: int, device: torch.device) -> None:
    plain = long_spec(device, size, 4, 2, window)
    spec = replace(plain, gated=True)
    cache = PagedCache.empty(device, 1, CONTEXT, 2, size)
    qkv = torch.randn(560, qkv_width(spec), generator=torch.Generator().manual_seed(7)).to(device)
    out = run_chunks(spec, cache.layer, qkv, [300, 260], cache.tables)
    rows, gates = split_gates(qkv, 4, size)
    expected = gate_output(expected_rows(plain, cache, rows), gates.double())
    error = (out.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert torch.isfinite(out).all() and error.max() < 1e-3, f"relative error {error.max():.2e}"


def in_wgmma_layout(
    q: torch.Tensor, spec: AttentionSpec, cache: PagedCache, batch: ForwardBatch
) -> torch.Tensor:
    """The values of an fp16 operand, zeros where nothing was written."""
    tiles = prefill_tiles(batch)
    assert stores_wgmma_layout(spec, cache.layer, tiles)
    shape = operand_shape(len(q), spec.heads * spec.head_dim, OperandLayout.WGMMA)
    room = torch.zeros(shape, dtype=torch.float16, device=q.device)
    return attention_prefill(
        q, spec, cache.layer, batch.block_tables_of(0), tiles, room, wgmma_layout=True, pdl=True
    )


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [-1e30, -1.0, 0.7, 1e4])
@pytest.mark.parametrize("window", [None, 150])
def test_sinks_are_in_the_denominator_of_every_row(
    window: int | None, sink: float, size: int, device: torch.device
) -> None:
    plain = long_spec(device, size, 4, 2, window)
    spec = replace(plain, sinks=sinks_near(sink, 4).to(device))
    cache = PagedCache.empty(device, 1, CONTEXT, 2, size)
    qkv = random_qkv(device, size, 560, 4, 2)
    out = run_chunks(spec, cache.layer, qkv, [300, 260], cache.tables)
    expected = expected_rows(spec, cache, qkv)
    error = (out.double() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    assert torch.isfinite(out).all() and error.max() < 1e-3, f"relative error {error.max():.2e}"
    if sink == -1e30:
        assert torch.equal(out, run_chunks(plain, cache.layer, qkv, [300, 260], cache.tables))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 200])
def test_blocks_anywhere_and_the_wgmma_layout_have_the_same_bits(
    window: int | None, size: int, device: torch.device
) -> None:
    spec = long_spec(device, size, 4, 2, window)
    own = PagedCache.empty(device, 1, CONTEXT, 2, size)
    pool = own.shuffled(3)
    for tensor in pool.layer.tensors:
        tensor.fill_(float("nan"))
    qkv = random_qkv(device, size, 605, 4, 2)
    start = 0
    for length in (205, 400):
        results = []
        for cache in (own, pool):
            batch = prefill_batch(
                [[0] * length], [start], [[table] for table in cache.tables.tolist()], device
            )
            tiles = prefill_tiles(batch)
            rows = qkv[start : start + length]
            q = rope_store(
                rows, spec, cache.layer, batch.positions, batch.block_tables_of(0), tiles.sequences
            )
            plain = torch.empty(length, 4 * size, dtype=torch.float16, device=device)
            attention_prefill(q, spec, cache.layer, batch.block_tables_of(0), tiles, plain, pdl=cache is pool)
            results.append((q, plain))
        (q, plain), (again, paged) = results
        assert torch.equal(q, again) and torch.equal(plain, paged)
        room = in_wgmma_layout(q, spec, pool, batch)
        assert torch.equal(room[:length], Fp16Operand(plain, plain[:, 0]).as_wgmma().values[:length])
        assert not room[length:].any(), "rows behind the last were written"
        in_place = q.view(length, 4 * size)
        attention_prefill(q, spec, pool.layer, batch.block_tables_of(0), tiles, in_place)
        assert torch.equal(in_place, plain)
        start += length


@pytest.mark.gpu
def test_chunks_of_several_prompts_are_each_its_own(size: int, device: torch.device) -> None:
    spec = long_spec(device, size, 4, 2)
    starts, lengths = (0, 61, 32), (267, 1, 140)
    own = PagedCache.empty(device, 3, CONTEXT, 2, size)
    pool = own.shuffled()
    for tensor in pool.layer.tensors:
        tensor.fill_(float("nan"))
    for sequence, start in enumerate(starts):  # what earlier chunks have left
        if start:
            before = random_qkv(device, size, start, 4, 2)
            for cache in (own, pool):
                run_prefill(spec, cache.layer, before, [0], [start], cache.sequence(sequence))
    qkv = random_qkv(device, size, sum(lengths), 4, 2)
    batch = prefill_batch(
        [[0] * length for length in lengths], starts, [[table] for table in pool.tables.tolist()], device
    )
    tiles = prefill_tiles(batch)
    q = rope_store(qkv, spec, pool.layer, batch.positions, batch.block_tables_of(0), tiles.sequences)
    room = in_wgmma_layout(q, spec, pool, batch)
    together = Fp16Operand(room, torch.ones(len(qkv), device=device), OperandLayout.WGMMA).row_major(4 * size)
    for sequence, (rows, start, _) in enumerate(batch.chunks(0)):
        length = lengths[sequence]
        alone = prefill_batch(
            [[0] * length], [start], [[table] for table in own.sequence(sequence).tolist()], device
        )
        tiles = prefill_tiles(alone)
        q = rope_store(qkv[rows], spec, own.layer, alone.positions, alone.block_tables_of(0), tiles.sequences)
        expected = torch.empty(length, 4 * size, dtype=torch.float16, device=device)
        attention_prefill(q, spec, own.layer, alone.block_tables_of(0), tiles, expected)
        if length > 128:
            assert torch.equal(together[rows], expected)
        else:  # alone it is computed by another kernel
            torch.testing.assert_close(together[rows], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("window,start,rows", [(40, 300, 130), (150, 256, 300), (1, 200, 140)])
def test_no_block_behind_the_window_is_read(
    window: int, start: int, rows: int, size: int, device: torch.device
) -> None:
    """The first key tile begins before the first key that a row sees, in blocks that may have been released."""
    spec = long_spec(device, size, 2, 1, window)
    cache = PagedCache.empty(device, 1, CONTEXT, 1, size, padding=1)
    run_chunks(spec, cache.layer, random_qkv(device, size, start, 2, 1), [start], cache.tables)
    qkv = random_qkv(device, size, rows, 2, 1)
    _, expected = run_prefill(spec, cache.layer, qkv, [start], [rows], cache.tables)
    assert torch.isfinite(expected).all()
    tables = released(cache, start + 1 - window)
    _, out = run_prefill(spec, cache.layer, qkv, [start], [rows], tables)
    assert torch.equal(out, expected)
