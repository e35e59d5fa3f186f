"""The states of layers that keep one: when a sequence's are copied, so that it, or a prompt that begins alike, goes on
from there.

Keys and values of a beginning lie in blocks that others find; a state stands for all tokens before it, and changes with
each. Copies are made at the ends of blocks: where a prompt ends, where others diverge from it, at intervals of a long
one, and, of states that cannot be rolled back to the last full block, while a sequence decodes.
"""

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import islice

from quengine.block_manager import BlockManager
from quengine.block_pool import CachePool, CopyBlocks
from quengine.kernels.forward_batch import MOST_CHECKPOINTS, BlockTables, StateCheckpoint, state_table
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.request.sequence import BegunCheckpoint, Sequence
from quengine.shared_prefixes import SharedPrefixes
from quengine.step_plan import SequenceRows

CHECKPOINT_EVERY = 4096
"""Tokens of a long prompt from one copy of its states to the next."""

_LEAST_OPENING = 256
"""Tokens of the first message of a chat, with instructions and tools, at whose end its states are copied: other chats
begin with it and go on from there."""

_CHANGED_TAIL = 8
"""Tokens at the end of a prompt that a template may write differently once the answer follows, as where it opens a
block of reasoning that later turns leave out."""

_COPY_EVERY = 4 * BLOCK_SIZE
"""Tokens since the last copy of a sequence's states after which its drafts are cut short, so that a copy can be
made."""

_MOST_PARTINGS = 64
"""Most waiting sequences that are compared with the one being computed, to find where they diverge from it."""


class StateCheckpoints:
    """See the module docstring. Without layers that keep states there is nothing to do.

    Args:
        blocks, pools: the cache's.
        prefixes: what sequences share.
        waiting: the sequences that wait, in order of arrival.
        copy_blocks: copies blocks, in stream order after the steps launched so far.
        ahead: positions after the tokens that the host knows that steps launched ahead may have computed.
    """

    def __init__(
        self,
        blocks: BlockManager,
        pools: Seq[CachePool],
        prefixes: SharedPrefixes,
        waiting: Iterable[Sequence],
        copy_blocks: CopyBlocks,
        ahead: int,
    ) -> None:
        self._blocks, self._pools, self._prefixes = blocks, pools, prefixes
        self._waiting, self._copy_blocks = waiting, copy_blocks
        # States that cannot be rolled back to the last full block are copied when they reach its end.
        self._keeps_copies = (
            blocks.has_states
            and prefixes.shares
            and not prefixes.deterministic
            and blocks.rewinds < BLOCK_SIZE + ahead
        )

    def admitted(self, sequence: Sequence, held: int) -> None:
        """Notes where the states of a sequence are to be kept; the cache holds keys and values of `held` of its first
        tokens."""
        if self._blocks.has_states:
            sequence.state_copy_at = sequence.replay = 0
            sequence.checkpoints_at = self._places(sequence, held)

    def begin(self, sequence: Sequence, end: int) -> tuple[int, BlockTables]:
        """The end of a sequence's next chunk, `end` or earlier, and its block tables; those of groups with states list
        the checkpoints that the step writes."""
        start = sequence.num_cached_tokens
        if places := self._next(sequence):
            end = self._chunk_end(end, places)
            if end < places[-1]:
                # Up to the end of a block, where the states can be kept if the sequence is preempted.
                end -= end % BLOCK_SIZE if end - end % BLOCK_SIZE > start else 0
        self._drop(sequence)
        passed = [place for place in sequence.checkpoints_at if start < place <= end]
        for place in passed if not self._blocks.rewinds else ():
            if blocks := self._blocks.take_checkpoint(self._prefixes.keys(sequence, place)[-1]):
                sequence.checkpoints_begun.append(BegunCheckpoint(place, blocks))
        begun = sequence.checkpoints_begun
        return end, tuple(
            state_table(table[0], [StateCheckpoint(place, blocks[n]) for place, blocks in begun])
            if pool.is_state
            else table
            for n, (pool, table) in enumerate(zip(self._pools, sequence.block_tables, strict=True))
        )

    def launched(self, sequence: Sequence, chunk: SequenceRows) -> None:
        """Registers the checkpoints of a chunk whose step was launched: the states that the step writes on its way or,
        if states can be rolled back, copies of those at its end."""
        if not self._blocks.has_states:
            return
        for end, blocks in sequence.checkpoints_begun:
            key = self._prefixes.keys(sequence, end)[-1]
            self._blocks.give_checkpoint(blocks, key, self._is_on_the_way(sequence, end))
        sequence.checkpoints_begun.clear()
        for end in sequence.checkpoints_at if self._blocks.rewinds else ():
            if chunk.start < end <= chunk.end <= end + self._blocks.rewinds:
                self._checkpoint(sequence, end, self._is_on_the_way(sequence, end))

    def add_copies(self, sequence: Sequence) -> None:
        """Gives a sequence that decodes a block for a copy of its states at the end of its last full block, where there
        is room."""
        if self._keeps_copies and sequence.pool is None and sequence.block_tables:
            self._blocks.add_copies(sequence.block_tables)

    def copy_is_due(self, sequence: Sequence) -> bool:
        """Whether the states of a sequence have not been copied since its prompt, or for many tokens."""
        if not self._keeps_copies:
            return False
        since = len(sequence.token_ids) - sequence.state_copy_at
        is_due = not sequence.state_copy_at or since > _COPY_EVERY
        return is_due and self._blocks.has_copies(sequence.block_tables)

    def roll_back(self, sequence: Sequence, base: int) -> None:
        """Restores the states of a sequence to those after its first `base` tokens, from the copies made before its
        draft."""
        if copies := self._blocks.spares(sequence.block_tables):
            self._copy_blocks(copies)
            sequence.replay = sequence.num_cached_tokens - base

    def end(self, sequence: Sequence, keeps: bool, ahead: int) -> None:
        """Keeps the states of a sequence that ends, or is preempted, at its last full block if they can be rolled back
        to it, else its copy of them; not `keeps`: neither. ahead: positions after the cached ones that may have been
        computed."""
        if not self._blocks.has_states:
            return
        self._drop(sequence)
        known = sequence.num_cached_tokens - sequence.replay
        if not self._blocks.spares(sequence.block_tables):
            ahead += max(sequence.drafts_by_length, default=0)
        end = _whole(min(known, self._prefixes.prompt_end(sequence)))
        if not keeps or not end or not self._prefixes.shares or sequence.pool is not None:
            return
        if known + ahead - end <= self._blocks.rewinds:
            self._checkpoint(sequence, end)
        elif 0 < sequence.state_copy_at <= end:
            key = self._prefixes.keys(sequence, sequence.state_copy_at)[-1]
            self._blocks.name_copies(sequence.block_tables, key)

    def _places(self, sequence: Sequence, held: int) -> list[int]:
        """Numbers of first tokens of a sequence after which its states are kept: at the last full block of its prompt,
        and the one before where that ends among tokens that may change, every CHECKPOINT_EVERY tokens, at the end of a
        long first message, and where it parts from what others have computed, after `held` tokens."""
        start, last = sequence.num_cached_tokens, _whole(self._prefixes.most_shared(sequence))
        places = {held, last, *range(CHECKPOINT_EVERY, last, CHECKPOINT_EVERY)}
        if sequence.opening >= _LEAST_OPENING:
            places.add(_whole(sequence.opening))
        if self._blocks.rewinds < BLOCK_SIZE and len(sequence.token_ids) - last < _CHANGED_TAIL:
            places.add(last - BLOCK_SIZE)
        return sorted(place for place in places if start < place <= last)

    def _next(self, sequence: Sequence) -> list[int]:
        """The numbers of tokens after which the states of a sequence are still to be kept, those where waiting
        sequences diverge from it included, which can then continue from there."""
        start = sequence.num_cached_tokens
        for waiting in islice(self._waiting, _MOST_PARTINGS):
            parting = self._prefixes.parting(sequence, waiting)
            if parting > start and parting not in sequence.checkpoints_at:
                insort(sequence.checkpoints_at, parting)
        return [place for place in sequence.checkpoints_at if place > start]

    def _chunk_end(self, end: int, places: Seq[int]) -> int:
        """The end of a chunk that passes these checkpoints: `end`, or an earlier one, since a step writes few states on
        its way, and a state can be rolled back only a few positions."""
        if self._blocks.rewinds:
            return min(end, places[0] + self._blocks.rewinds)
        return min(end, places[MOST_CHECKPOINTS - 1]) if len(places) > MOST_CHECKPOINTS else end

    def _is_on_the_way(self, sequence: Sequence, end: int) -> bool:
        """Whether a prompt continues after this place, and no other is known to diverge from it there."""
        is_due = end % CHECKPOINT_EVERY == 0 or end == _whole(sequence.opening)
        return is_due and end != sequence.checkpoints_at[-1]

    def _drop(self, sequence: Sequence) -> None:
        """Discards the checkpoints that a sequence has begun, since their step may not have written them."""
        for _, blocks in sequence.checkpoints_begun:
            self._blocks.give_checkpoint(blocks)
        sequence.checkpoints_begun.clear()

    def _checkpoint(self, sequence: Sequence, end: int, on_the_way: bool = False) -> None:
        """Keeps the states of a sequence after its first `end` tokens, whole blocks, for prompts that begin with
        these."""
        key = self._prefixes.keys(sequence, end)[-1]
        if copies := self._blocks.checkpoint(sequence.block_tables, key, on_the_way):
            self._copy_blocks(copies)


def _whole(tokens: int) -> int:
    """As many of these tokens as fill blocks."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE
