"""A step of several prompts on CUDA: what lies where, and that each prompt has the bits that it has alone."""

import pytest
import torch

from quengine.kernels.cuda.attention.attention_prefill import prefill_tiles
from quengine.kernels.cuda.attention.rope_store import rope_store
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.kv.cache_types import CacheType
from tests.kernels.cuda.attention.attention_cases import (
    filled_cache,
    make_spec,
    rotate_and_write,
    run_prefill,
)
from tests.kernels.cuda.attention.test_paged_attention import CONTEXT, random_qkv


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,window,cache_type,batch_invariant",
    [
        (2, 1, 64, None, "f16", False),
        (1, 1, 96, 20, "f16", True),
        (2, 2, 64, 40, "q8_0", False),
        (2, 1, 64, None, "q4_0", True),
    ],
)
def test_chunks_of_several_prompts_are_each_its_own(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    cache_type: CacheType,
    batch_invariant: bool,
    device: torch.device,
) -> None:
    """The queries of a tile are those of one chunk, so its bits are those that it has alone."""
    rotate = rotate_and_write if cache_type != "f16" or batch_invariant else rope_store
    spec = make_spec(device, CONTEXT, heads, kv_heads, head_dim, window)
    starts, lengths = (0, 61, 32), (67, 1, 40)
    cache = filled_cache(device, len(starts), CONTEXT, kv_heads, head_dim, cache_type)
    pool = cache.shuffled(1)
    qkv = random_qkv(device, spec, sum(lengths))
    q, together = run_prefill(spec, pool.layer, qkv, starts, lengths, pool.tables, batch_invariant, rotate)
    first = 0
    for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows, table = slice(first, first + length), cache.sequence(sequence)
        alone, expected = run_prefill(
            spec, cache.layer, qkv[rows], [start], [length], table, batch_invariant, rotate
        )
        assert torch.equal(q[rows], alone)
        if batch_invariant or length == max(lengths):
            assert torch.equal(together[rows], expected)
        else:  # the tiles of a shorter chunk may be of another size
            torch.testing.assert_close(together[rows], expected, rtol=2e-3, atol=2e-3)
        first += length
    for held, expected in zip(pool.planes(), cache.planes(), strict=True):
        assert torch.equal(held, expected), "keys and values went to other rows"


def test_tiles_that_see_the_most_keys_come_first() -> None:
    tables = [[[1, 2, 3]], [[4, 5, 6, 7]]]
    batch = prefill_batch([[0] * 70, [0] * 40], (0, 64), tables, torch.device("cpu"))
    rows = prefill_tiles(batch)
    assert rows.block_rows == 64 and rows.tiles.tolist() == [
        [0, 64, 70, 0, 0],
        [70, 0, 40, 64, 1],
        [0, 0, 70, 0, 0],
    ]
    assert batch.positions.tolist() == [*range(70), *range(64, 104)]
    assert rows.sequences.tolist() == [0] * 70 + [1] * 40
    assert (rows.longest, int(rows.tiles[:, 3].max()), rows.deepest) == (70, 64, 104)
    assert batch.logits_rows is not None
    assert batch.logits_rows.tolist() == [69, 109] and batch.block_tables.tolist() == [
        [[1, 2, 3, 0, 0], [4, 5, 6, 7, 0]]
    ]
