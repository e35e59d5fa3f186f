"""Which states are copied before a decode step: those that it changes and that may be restored later, or kept."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from quengine.block_pool import BlockCopy, CachePool
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.request.sequence import Sequence


def copies_before(pools: Seq[CachePool], sequence: Sequence, position: int) -> Iterator[BlockCopy]:
    """The copies of states to make before a step whose first row of `sequence` is at `position`, the number of tokens
    that its states have read.

    Before the rows of a draft change a state, it is copied to the spare one, which keeps it while tokens are replayed
    after a rejected draft. At the end of a full block a state is copied to the last entry of the sequence's table, if
    there is one for a checkpoint; `state_copy_at` then records the position.
    """
    for group, pool in enumerate(pools):
        if not pool.is_state:
            continue
        table = sequence.block_tables[group]
        if position % BLOCK_SIZE == 0 and len(table) > 1 + pool.spares:
            sequence.state_copy_at = position
            yield BlockCopy(group, table[0], table[-1])
        if pool.spares and sequence.draft and not sequence.replay:
            yield BlockCopy(group, table[0], table[1])
