"""Checkpoints: copies of a sequence's recurrent states, from which it, or a prompt with the same prefix, goes on.

Keys and values of a prefix stay in blocks, where others find them. A state stands for all tokens before it and changes
with each token, so it has to be copied. Copies are made at the ends of blocks: where a prompt ends, where other prompts
diverge from it, at intervals of a long one and, if states cannot be rolled back to the last full block, during decode.
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
"""Least tokens of a chat's first message (instructions, tools) for a checkpoint at its end, from which other chats with
the same message go on."""

_CHANGED_TAIL = 8
"""Tokens at the end of a prompt that a template may write differently in the next turn: it may open a block of
reasoning, for instance, that later turns leave out."""

_COPY_EVERY = 4 * BLOCK_SIZE
"""A sequence's drafts are cut short, so that its states can be copied, this many tokens after the last copy."""

_MOST_PARTINGS = 64
"""At most this many waiting sequences are compared with the one being computed, to find where they diverge from it."""


class StateCheckpoints:
    """See the module docstring. A model without recurrent layers has nothing to do here.

    Args:
        blocks, pools: the cache's.
        prefixes: what sequences share.
        waiting: the sequences that wait, in order of arrival.
        copy_blocks: copies blocks, in stream order after the steps launched so far.
        ahead: as `Scheduler` has it.
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
        """Notes where the states of an admitted sequence are to be kept. held: number of its first tokens whose keys
        and values are in the cache."""
        if self._blocks.has_states:
            sequence.state_copy_at = sequence.replay = 0
            sequence.checkpoints_at = self._places(sequence, held)

    def begin(self, sequence: Sequence, end: int) -> tuple[int, BlockTables]:
        """The end of a sequence's next chunk, `end` or earlier, and its block tables. The tables of groups with states
        also list the checkpoints that the step writes."""
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
        """Registers the checkpoints of a launched chunk: those that the step itself writes or, if states can be rolled
        back, copies of the states at its end."""
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
        """Gives a decoding sequence, where there is room, blocks for a copy of its states at the end of its last full
        block."""
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
        """Keeps the states of a sequence that ends or is preempted: those at its last full block if they can be rolled
        back to it, else its copy of them.

        keeps: False: no states are kept. ahead: positions after the cached ones that may have been computed.
        """
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
        """Where the states of a sequence are kept, each as a number of its first tokens.

        At its prompt's last full block (and the one before, if the last ends among tokens that may change), every
        CHECKPOINT_EVERY tokens, at the end of a long first message, and where the cached prefix of `held` tokens ends.
        """
        start, last = sequence.num_cached_tokens, _whole(self._prefixes.most_shared(sequence))
        places = {held, last, *range(CHECKPOINT_EVERY, last, CHECKPOINT_EVERY)}
        if sequence.opening >= _LEAST_OPENING:
            places.add(_whole(sequence.opening))
        if self._blocks.rewinds < BLOCK_SIZE and len(sequence.token_ids) - last < _CHANGED_TAIL:
            places.add(last - BLOCK_SIZE)
        return sorted(place for place in places if start < place <= last)

    def _next(self, sequence: Sequence) -> list[int]:
        """The places where the states of a sequence are still to be kept. Those where waiting sequences diverge from it
        are added, so that these sequences go on from there."""
        start = sequence.num_cached_tokens
        for waiting in islice(self._waiting, _MOST_PARTINGS):
            parting = self._prefixes.parting(sequence, waiting)
            if parting > start and parting not in sequence.checkpoints_at:
                insort(sequence.checkpoints_at, parting)
        return [place for place in sequence.checkpoints_at if place > start]

    def _chunk_end(self, end: int, places: Seq[int]) -> int:
        """The end, at most `end`, of a chunk with checkpoints at these places: a step writes only a few states, and a
        state can be rolled back only a few positions."""
        if self._blocks.rewinds:
            return min(end, places[0] + self._blocks.rewinds)
        return min(end, places[MOST_CHECKPOINTS - 1]) if len(places) > MOST_CHECKPOINTS else end

    def _is_on_the_way(self, sequence: Sequence, end: int) -> bool:
        """Whether the prompt goes on after a checkpoint and no other prompt is known to diverge from it there."""
        is_due = end % CHECKPOINT_EVERY == 0 or end == _whole(sequence.opening)
        return is_due and end != sequence.checkpoints_at[-1]

    def _drop(self, sequence: Sequence) -> None:
        """Discards the checkpoints that a sequence has begun: their step may not have written them."""
        for _, blocks in sequence.checkpoints_begun:
            self._blocks.give_checkpoint(blocks)
        sequence.checkpoints_begun.clear()

    def _checkpoint(self, sequence: Sequence, end: int, on_the_way: bool = False) -> None:
        """Copies the states of a sequence after its first `end` tokens (whole blocks), for prompts with this prefix."""
        key = self._prefixes.keys(sequence, end)[-1]
        if copies := self._blocks.checkpoint(sequence.block_tables, key, on_the_way):
            self._copy_blocks(copies)


def _whole(tokens: int) -> int:
    """The number of these tokens that fill whole blocks."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE
