"""A step of several prompts on CUDA: what lies where, and that each prompt has the bits that it has alone."""

import pytest
import torch

from quengine.kernels.cuda.attention.attention_prefill import attention_prefill, prefill_tiles
from quengine.kernels.cuda.attention.rope import rope_store
from quengine.kernels.forward_batch import prefill_batch
from tests.kernels.cuda.attention.attention_cases import make_spec
from tests.kernels.cuda.attention.test_paged_attention import (
    CONTEXT,
    as_pool,
    as_sequences,
    planes,
    random_qkv,
    sequences_of,
)


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,window,q8_0,fixed",
    [(2, 1, 64, None, False, False), (1, 1, 96, 20, False, True), (2, 2, 64, 40, True, False)],
)
def test_chunks_of_several_prompts_are_each_its_own(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    q8_0: bool,
    fixed: bool,
    device: torch.device,
) -> None:
    """The queries of a tile are those of one chunk, so its bits are those that it has alone."""
    spec = make_spec(device, CONTEXT, heads, kv_heads, head_dim, window)
    starts, lengths = (0, 61, 32), (67, 1, 40)
    cache = sequences_of(spec, len(starts), q8_0)
    pool, tables = as_pool(cache, 1)
    qkv = random_qkv(device, spec, sum(lengths))
    batch = prefill_batch(
        [[0] * length for length in lengths], starts, [[table] for table in tables.tolist()], device
    )
    prompts = prefill_tiles(batch, head_dim, fixed)
    q = rope_store(
        qkv, spec, pool, 0, batch.positions, block_table=batch.block_tables_of(0), sequences=prompts.sequences
    )
    together = attention_prefill(
        q, spec, pool, 0, 0, torch.float32, block_table=batch.block_tables_of(0), fixed=fixed, prompts=prompts
    )
    for sequence, (rows, start, _) in enumerate(batch.chunks(0)):
        length = rows.stop - rows.start
        at = torch.arange(start, start + length, dtype=torch.int32, device=device)
        alone = rope_store(qkv[rows], spec, cache, sequence, at)
        assert torch.equal(q[rows], alone)
        expected = attention_prefill(alone, spec, cache, sequence, start, torch.float32, fixed=fixed)
        if fixed or length == max(lengths):
            assert torch.equal(together[rows], expected)
        else:  # the tiles of a shorter chunk may be of another size
            torch.testing.assert_close(together[rows], expected, rtol=2e-3, atol=2e-3)
    for held, expected in zip(as_sequences(pool, tables), planes(cache), strict=True):
        assert torch.equal(held, expected), "keys and values went to other rows"


def test_tiles_that_see_the_most_keys_come_first() -> None:
    tables = [[[1, 2, 3]], [[4, 5, 6, 7]]]
    batch = prefill_batch([[0] * 70, [0] * 40], (0, 64), tables, torch.device("cpu"))
    rows = prefill_tiles(batch, 64)
    assert rows.block_rows == 64 and rows.tiles.tolist() == [
        [0, 64, 70, 0, 0],
        [70, 0, 40, 64, 1],
        [0, 0, 70, 0, 0],
    ]
    assert batch.positions.tolist() == [*range(70), *range(64, 104)]
    assert rows.sequences.tolist() == [0] * 70 + [1] * 40
    assert (rows.longest, rows.latest, rows.deepest) == (70, 64, 104)
    assert batch.logits_rows is not None
    assert batch.logits_rows.tolist() == [69, 109] and batch.block_tables.tolist() == [
        [[1, 2, 3, 0], [4, 5, 6, 7]]
    ]
