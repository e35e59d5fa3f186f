"""Which states are copied before a decode step: those that the step changes and that are gone back to, or kept."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from quengine.block_manager import BlockCopy, CachePool
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.request.sequence import Sequence


def copies_before(pools: Seq[CachePool], sequence: Sequence, position: int) -> Iterator[BlockCopy]:
    """Of a sequence whose first row is at `position`, as many tokens as its states stand for: those before its draft,
    into the spare one, and those at the end of a full block, into the last one of its table, where it has such; it then
    notes so. What it had before a draft that was not accepted is there still."""
    for group, pool in enumerate(pools):
        if not pool.is_state:
            continue
        table = sequence.block_tables[group]
        if position % BLOCK_SIZE == 0 and len(table) > 1 + pool.spares:
            sequence.state_copy_at = position
            yield BlockCopy(group, table[0], table[-1])
        if pool.spares and sequence.draft and not sequence.replay:
            yield BlockCopy(group, table[0], table[1])
