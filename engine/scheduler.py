"""The scheduler: which tokens are computed next (continuous batching).

A step is a chunk of one sequence's prompt, or chunks of several prompts if that is faster, or one token of every
sequence whose prompt is done. If there are both prompts and decoding sequences, prefill and decode steps alternate,
and the chunk is short, limited by tokens and by time, with a larger limit if many prompts wait: a running sequence
never waits longer for its next token than one such chunk takes. Sequences are admitted in order of arrival, as soon as
there are blocks for them. When blocks run out, the newest sequence is preempted: it gives up its blocks and is
recomputed later, with its generated tokens as part of the prompt.

On a device that computes asynchronously, a step is planned before the results of those in flight are known (`plan`), so
that the device does not wait for the host in between. Rows that only the host can sample, and drafts that it makes, are
left out of such a step: the lookahead ends for their sequences alone. Where the device drafts and accepts by itself,
the host knows how far a sequence may have come at most (`Slot.drafted`).
"""

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import chain, islice

from quengine.block_manager import BlockCopy, BlockManager, extend_keys
from quengine.errors import EngineError
from quengine.kernels.forward_batch import MOST_CHECKPOINTS, StateCheckpoint, state_table
from quengine.kernels.kv.cache_types import BLOCK_SIZE, blocks_for
from quengine.kv_cache import KVCache
from quengine.request.sequence import BegunCheckpoint, Sequence
from quengine.slot import Slot
from quengine.step_plan import DraftRoom, SequenceRows, StepPlan, angles_of

LEAST_CHUNK = 16
"""Minimum number of prompt tokens per step, however slow the machine is."""

CHECKPOINT_EVERY = 4096
"""Tokens of a long prompt from one copy of its states to the next."""

_LEAST_OPENING = 256
"""Tokens of the first message of a chat, with instructions and tools, at whose end its states are copied: other chats
begin with it and go on from there."""

_CHANGED_TAIL = 8
"""Tokens at the end of a prompt that a template may write differently once the answer follows, as where it opens a
block of reasoning that later turns leave out."""

_MORE_FOLLOW = ["prefill", "decode"]
"""Phases of two steps in flight that another step may follow."""

PENDING = 4
"""Positions after the tokens that the host knows that steps launched ahead may have computed, drafts aside."""

_COPY_EVERY = 4 * BLOCK_SIZE
"""Tokens since the last copy of a sequence's states after which its drafts are cut short, so that a copy can be
made."""

_MOST_PARTINGS = 64
"""Most waiting sequences that are compared with the one being computed, to find where they diverge from it."""


class Scheduler:
    """Owns the queue of sequences and the cache blocks.

    Args:
        cache: the cache whose blocks sequences are given.
        parallel: most sequences that run at once.
        chunk_size: most tokens of a prompt in a step while nothing else runs.
        mixed_chunk: most tokens of a prompt in a step while other sequences wait for their next token.
        mixed_seconds: most seconds that such a step may take, estimated from the last one; it gets fewer tokens to stay
        below. None: no limit.
        deterministic: tokens that were computed one by one are never reused as part of a prompt, nor recomputed in
        chunks.
        packed: a step may hold the chunks of several prompts.
        shares: blocks that already hold the beginning of a prompt are used for it.
        backlog_chunk: `mixed_chunk` while more tokens of prompts wait than `chunk_size`.
        copy_blocks: copies blocks, in stream order after the steps launched so far (ModelRunner.copy_blocks).
        ahead: positions after the tokens that the host knows that steps launched ahead may have computed.
        most_ahead: most rows of a decode step that is launched ahead; None: no limit.
    """

    def __init__(
        self,
        cache: KVCache,
        parallel: int,
        chunk_size: int,
        mixed_chunk: int,
        mixed_seconds: float | None = None,
        deterministic: bool = False,
        packed: bool = False,
        shares: bool = True,
        backlog_chunk: int = 0,
        copy_blocks: Callable[[Seq[BlockCopy]], None] | None = None,
        ahead: int = 0,
        most_ahead: int | None = None,
    ) -> None:
        self.cache = cache
        self.parallel = parallel
        self.chunk_size = chunk_size
        self.mixed_chunk = min(mixed_chunk, chunk_size)
        self.backlog_chunk = min(max(mixed_chunk, backlog_chunk), chunk_size)
        self.deterministic = deterministic
        self.packed = packed
        self.shares = shares
        self._copy_blocks = copy_blocks or (lambda _copies: None)
        self.blocks = BlockManager(cache.pools, lambda copies: self._copy_blocks(copies))
        self._ahead, self._most_ahead = ahead, most_ahead
        # States that cannot be rolled back to the last full block are copied when they reach its end.
        self._keeps_copies = (
            self.blocks.has_states
            and shares
            and not deterministic
            and self.blocks.rewinds < BLOCK_SIZE + ahead
        )
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []  # both in order of arrival
        self.decoding: list[Sequence] = []
        self.current: StepPlan | None = None
        """The step that was committed, or has failed, last."""
        self.holds_back: Callable[[Sequence], bool] | None = None
        """Whether a sequence may have a draft once the results in flight are known: no step of it is launched ahead."""
        self._free_slots = list(range(parallel))
        self._mixed_seconds = mixed_seconds
        self._token_seconds = 0.0  # seconds per prompt token in the last chunk
        self._began = 0.0
        self._decode_is_due = False
        self._preempts = True
        self._keeps_all = all(pool.window is None for pool in cache.pools)
        self._alone: deque[Sequence] = deque()
        self._restarted: set[Sequence] = set()  # those of `_alone` that begin again

    @property
    def sequences(self) -> list[Sequence]:
        """All running and waiting sequences."""
        return self._running + list(self.waiting)

    @property
    def cache_used(self) -> int:
        """Number of cache positions owned by sequences, in the cache group where they own the most."""
        return self.blocks.num_used * BLOCK_SIZE

    @property
    def cache_size(self) -> int:
        """Number of cache positions, in the cache group that has the most."""
        return max(pool.num_blocks for pool in self.cache.pools) * BLOCK_SIZE

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises EngineError if it would not even fit into the empty cache.
        """
        if not self.blocks.fits(sequence.max_positions):
            raise EngineError(
                f"the prompt and its answer may take {sequence.max_positions} tokens and the cache holds "
                f"{self.cache_size}; shorten the prompt, or ask for fewer tokens"
            )
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue or from the running ones, and free its blocks."""
        self._restarted.discard(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self._running:
            self._remove(sequence)

    def plan(self, in_flight: Seq[StepPlan] = ()) -> StepPlan | None:
        """The step to launch after those in flight, whose results are not known: prompts and decode steps take turns.

        None if there is nothing to do, if the step depends on those results, if no sequence can get blocks for it
        without preemption, or if enough is in flight: two steps are, but for a prefill and the decode step after it,
        which may be too short to keep the device busy, so that another prefill follows. The prompt tokens in flight
        count as cached from now on: a device computes its steps in order.
        """
        ahead = bool(in_flight)
        self._preempts = not ahead
        if not ahead:
            self._began = time.perf_counter()
            if (alone := self._next_alone()) is not None:
                return alone
            while not self.prefilling and self._admit():
                pass
            decode_is_due = self._decode_is_due and bool(self.decoding)
        elif self._alone or (len(in_flight) > 1 and [step.phase for step in in_flight] != _MORE_FOLLOW):
            return None
        else:
            self._cache_prompts(in_flight[-1])
            decode_is_due = in_flight[-1].phase == "prefill" and any(map(self._is_known, self.decoding))
        if not decode_is_due and (self.prefilling or (ahead and self.waiting)):
            prompts = self._prompt_step(self._chunk_size(bool(self.decoding)))
            if prompts is not None:
                return prompts
        return self._decode_step(ahead) if len(in_flight) < 2 else None

    def commit(self, plan: StepPlan) -> None:
        """Notes that a step's keys and values are in the cache; to be called before tokens are appended.

        Failed and cancelled sequences are skipped.
        """
        self.current = plan
        self._decode_is_due = plan.phase == "prefill"
        # A step that was in flight beside others took the time since the end of the one before it.
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        if plan.phase == "decode":
            for sequence, slot, drafted in zip(plan.sequences, plan.slots, plan.drafted, strict=True):
                if sequence.slot is not slot or sequence.finished:
                    continue
                slot.launched -= 1
                slot.drafted -= drafted
                slot.waits = False
                if self.blocks.has_states and not sequence.draft:  # else Speculation.take sets it
                    sequence.replay = 0
                if (sequence.num_cached_tokens + 1) % BLOCK_SIZE:
                    sequence.num_cached_tokens += 1
                else:  # a block is full
                    self._cached(sequence, 1)
            return
        self._token_seconds = seconds / sum(len(chunk.ids) for chunk in plan.chunks)
        self._cache_prompts(plan)

    def accepted(self, sequence: Sequence) -> None:
        """Notes that the newest token was an accepted draft, whose keys and values this step put into the cache."""
        self._cached(sequence, 1)

    def device_draft(self, sequence: Sequence, most: int) -> DraftRoom:
        """The draft of up to `most` tokens that the device may make in the step that is planned, within the blocks that
        the sequence has. Allocates more for it as `draft_room` does."""
        slot = sequence.slot
        after = sequence.num_cached_tokens + slot.launched + slot.drafted  # its first row is before it
        if self.blocks.num_free > len(self._running):
            end = min(after + most, sequence.max_positions)
            self.blocks.grow(sequence.block_tables, sequence.num_cached_tokens, end)
        end = min(self.blocks.covered(sequence.block_tables), sequence.max_positions - 1)
        if self._keeps_copies and self._copy_is_due(sequence):
            end = min(end, blocks_for(after) * BLOCK_SIZE)
        slot.drafted += most
        return DraftRoom(most, end)

    def draft_room(self, sequence: Sequence, most: int) -> int:
        """Number of drafted tokens, up to `most`, that the sequence has blocks for after its newest token.

        Allocates more blocks for them, as long as enough stay free for each running sequence to get another one.
        """
        if self._keeps_copies and self._copy_is_due(sequence):
            most = min(most, -len(sequence.token_ids) % BLOCK_SIZE)
        end = min(len(sequence.token_ids) + most, sequence.max_positions)
        if self.blocks.num_free > len(self._running):
            self.blocks.grow(sequence.block_tables, sequence.num_cached_tokens, end)
        held = self.blocks.covered(sequence.block_tables)
        return max(0, min(most, held - len(sequence.token_ids)))

    def release(self) -> None:
        """Free the blocks of finished sequences; those with a full context discard tokens of it, and begin again."""
        for sequence in [each for each in self._restarted if each.finished]:
            self.cancel(sequence)
        for sequence in self._running:
            if sequence.finished:
                self._remove(sequence)
            elif sequence.context_full:
                self._preempt(sequence)
                sequence.shift_context()

    def retry_alone(self) -> None:
        """Schedules the sequences of the current step one at a time, after the step of all of them failed."""
        if self.current is not None:
            self._alone.extend(self.current.sequences)

    def failed(self, plan: StepPlan) -> None:
        """Handles a step that could not be launched, or whose results are lost: prompts whose first token is among them
        are computed again. The step may have changed some of its states; sequences whose states cannot be rolled back
        begin again."""
        self.current = plan
        if plan.phase == "decode":
            for sequence, slot, drafted in zip(plan.sequences, plan.slots, plan.drafted, strict=True):
                if sequence.slot is not slot:
                    continue
                if plan.launched:  # steps in flight continue from lost tokens
                    sequence.slot = Slot(slot.index, slot.end)
                    continue
                slot.launched -= 1
                slot.drafted -= drafted
                slot.has_token, slot.undrafted, slot.waits = False, 0, slot.launched > 0
        restarts = self.blocks.has_states and not self.blocks.rewinds
        for sequence in reversed(self._running):
            if sequence not in plan.sequences:
                continue
            if restarts:
                self._restarted.add(sequence)
            has_none = plan.launched and plan.phase == "prefill"
            if restarts or (has_none and sequence.num_cached_tokens == len(sequence.token_ids)):
                self._preempt(sequence, keeps=False)

    def roll_back(self, sequence: Sequence, base: int) -> None:
        """Restore the states of a sequence to those after its first `base` tokens, from the copies made before its
        draft."""
        copies = self.blocks.spares(sequence.block_tables)
        if copies:
            self._copy_blocks(copies)
            sequence.replay = sequence.num_cached_tokens - base

    def reset(self) -> None:
        """Marks everything in the cache as invalid.

        Raises EngineError while there are running or waiting sequences.
        """
        if self.sequences:
            raise EngineError("the cache is in use: finish or close the streams that are under way first")
        self.blocks.reset()

    @property
    def _running(self) -> list[Sequence]:
        """The sequences that own blocks: those that decode, then those whose prompts are computed, each in order of
        arrival."""
        return self.decoding + self.prefilling

    def _prompt_end(self, sequence: Sequence) -> int:
        """End of the tokens that are computed in chunks and whose blocks may be shared; 0 for a prompt of one token.

        Such a prompt takes a decode step, as it would for a single sequence, unless its rows are pooled or its logits
        wanted.
        """
        if sequence.pool is not None:
            return sequence.num_prompt_tokens
        end = sequence.num_prefill_tokens if self.deterministic else len(sequence.token_ids)
        wanted = sequence.scores is not None and bool(sequence.scores.missing_rows)
        return end if end > 1 or wanted else 0

    def _cache_prompts(self, plan: StepPlan) -> None:
        """Notes that the tokens of prompt chunks are in the cache, unless it is noted already. Sequences whose prompts
        end with them decode from then on."""
        for sequence, chunk in plan.running():
            if sequence.block_tables and not sequence.finished and sequence.num_cached_tokens < chunk.end:
                self._cached(sequence, chunk.end - sequence.num_cached_tokens)
                if self.blocks.has_states:
                    self._keep_checkpoints(sequence, chunk)
            whole = chunk.end >= self._prompt_end(sequence) and not sequence.finished
            if whole and sequence in self.prefilling:
                self.prefilling.remove(sequence)
                self.decoding.append(sequence)
                self._add_copies(sequence)

    def _keep_checkpoints(self, sequence: Sequence, chunk: SequenceRows) -> None:
        """Registers the checkpoints of a chunk whose step was launched: the states that the step writes on its way or,
        if states can be rolled back, copies of those at its end."""
        for end, blocks in sequence.checkpoints_begun:
            key = self._keys(sequence, end)[-1]
            self.blocks.give_checkpoint(blocks, key, self._is_on_the_way(sequence, end))
        sequence.checkpoints_begun.clear()
        for end in sequence.checkpoints_at if self.blocks.rewinds else ():
            if chunk.start < end <= chunk.end <= end + self.blocks.rewinds:
                self._checkpoint(sequence, end, self._is_on_the_way(sequence, end))

    def _is_on_the_way(self, sequence: Sequence, end: int) -> bool:
        is_due = end % CHECKPOINT_EVERY == 0 or end == _whole(sequence.opening)
        return is_due and end != sequence.checkpoints_at[-1]

    def _begin_checkpoints(self, sequence: Sequence, chunk: range) -> tuple[list[int], ...]:
        """Block tables for a chunk of a prompt; those of groups with states list the checkpoints that the step
        writes."""
        self._drop_checkpoints(sequence)
        passed = [end for end in sequence.checkpoints_at if chunk.start < end <= chunk.stop]
        for end in passed if not self.blocks.rewinds else ():
            if blocks := self.blocks.take_checkpoint(self._keys(sequence, end)[-1]):
                sequence.checkpoints_begun.append(BegunCheckpoint(end, blocks))
        return tuple(
            state_table(
                table[0], [StateCheckpoint(end, blocks[n]) for end, blocks in sequence.checkpoints_begun]
            )
            if pool.is_state
            else table
            for n, (pool, table) in enumerate(zip(self.cache.pools, sequence.block_tables, strict=True))
        )

    def _drop_checkpoints(self, sequence: Sequence) -> None:
        """Discard the checkpoints that a sequence has begun, since their step may not have written them."""
        for _, blocks in sequence.checkpoints_begun:
            self.blocks.give_checkpoint(blocks)
        sequence.checkpoints_begun.clear()

    def _checkpoint(self, sequence: Sequence, end: int, on_the_way: bool = False) -> None:
        """Keep the states of a sequence after its first `end` tokens, whole blocks, for prompts that begin with these.
        `on_the_way`: its prompt continues, and no other is known to diverge from it here."""
        key = self._keys(sequence, end)[-1]
        if copies := self.blocks.checkpoint(sequence.block_tables, key, on_the_way):
            self._copy_blocks(copies)

    def _checkpoint_end(self, sequence: Sequence, ahead: int) -> None:
        """Keep the states of a sequence that ends, or is preempted, at its last full block if they can be rolled back
        to it, else its copy of them. ahead: positions after the cached ones that may have been computed."""
        known = sequence.num_cached_tokens - sequence.replay
        if not self.blocks.spares(sequence.block_tables):
            ahead += max(sequence.drafts_by_length, default=0)
        end = min(known, self._prompt_end(sequence)) // BLOCK_SIZE * BLOCK_SIZE
        if not end or not self.shares or sequence.pool is not None:
            return
        if known + ahead - end <= self.blocks.rewinds:
            self._checkpoint(sequence, end)
        elif 0 < sequence.state_copy_at <= end:
            key = self._keys(sequence, sequence.state_copy_at)[-1]
            self.blocks.name_copies(sequence.block_tables, key)

    def _add_copies(self, sequence: Sequence) -> None:
        """Give a sequence a block for a copy of its states at the end of its last full block, where there is room."""
        if self._keeps_copies and sequence.pool is None and sequence.block_tables:
            self.blocks.add_copies(sequence.block_tables)

    def _copy_is_due(self, sequence: Sequence) -> bool:
        """Whether the states of a sequence have not been copied since its prompt, or for many tokens."""
        since = len(sequence.token_ids) - sequence.state_copy_at
        is_due = not sequence.state_copy_at or since > _COPY_EVERY
        return is_due and self.blocks.has_copies(sequence.block_tables)

    def _checkpoints_of(self, sequence: Sequence, held: int) -> list[int]:
        """Behind how many of its first tokens the states of a sequence are kept: at the last full block of its prompt,
        and the one before where that ends among tokens that may change, every CHECKPOINT_EVERY tokens, at the end of a
        long first message, and where it parts from what others have computed: the cache holds keys and values of `held`
        tokens."""
        start, last = sequence.num_cached_tokens, _whole(self._most_shared(sequence))
        places = {held, last, *range(CHECKPOINT_EVERY, last, CHECKPOINT_EVERY)}
        if sequence.opening >= _LEAST_OPENING:
            places.add(_whole(sequence.opening))
        if self.blocks.rewinds < BLOCK_SIZE and len(sequence.token_ids) - last < _CHANGED_TAIL:
            places.add(last - BLOCK_SIZE)
        return sorted(place for place in places if start < place <= last)

    def _next_checkpoints(self, sequence: Sequence) -> list[int]:
        """The numbers of tokens after which the states of a sequence are still to be kept, those where waiting
        sequences diverge from it included, which can then continue from there."""
        start, keys = sequence.num_cached_tokens, self._keys(sequence, self._most_shared(sequence))
        for waiting in islice(self.waiting, _MOST_PARTINGS):
            others = self._keys(waiting, self._most_shared(waiting))
            parting = _common(keys, others) * BLOCK_SIZE
            if parting > start and parting not in sequence.checkpoints_at:
                insort(sequence.checkpoints_at, parting)
        return [place for place in sequence.checkpoints_at if place > start]

    def _cached(self, sequence: Sequence, count: int) -> None:
        """Notes that `count` more tokens are in the cache, and shares the blocks that they fill."""
        before = sequence.num_cached_tokens
        sequence.num_cached_tokens += count
        if self.shares and sequence.num_cached_tokens // BLOCK_SIZE > before // BLOCK_SIZE:
            shareable = min(sequence.num_cached_tokens, self._prompt_end(sequence))
            keys = self._keys(sequence, shareable)
            self.blocks.computed(sequence.block_tables, keys, before // BLOCK_SIZE, sequence.key_ids)
            if self._keeps_copies and sequence in self.decoding:
                self._add_copies(sequence)

    def _keys(self, sequence: Sequence, tokens: int) -> list[bytes]:
        """The keys of the full blocks of the sequence's first `tokens` tokens."""
        extend_keys(sequence.block_keys, sequence.key_ids)
        return sequence.block_keys[: tokens // BLOCK_SIZE]

    def _next_alone(self) -> StepPlan | None:
        """A step of the first sequence that is to be computed alone; if it begins again, a chunk of its prompt."""
        while self._alone:
            sequence = self._alone[0]
            if sequence in self.waiting:
                self.waiting.remove(sequence)
                self.waiting.appendleft(sequence)
                self._admit()
            if sequence not in self.prefilling or sequence not in self._restarted:
                self._alone.popleft()
                self._restarted.discard(sequence)
            if sequence in self.decoding:
                return StepPlan.decode([sequence])
            if sequence in self.prefilling:
                chunk = self._chunk(sequence, self._chunk_size(bool(self.decoding)))
                return StepPlan.prefill([sequence], [chunk])
        return None

    def _is_known(self, sequence: Sequence) -> bool:
        """Whether a sequence has a next step whose input is known on the host, or will be on the device."""
        slot = sequence.slot
        if slot.launched:
            if slot.waits:
                return False
        elif sequence.num_cached_tokens < len(sequence.token_ids):
            return True
        elif not slot.has_token:  # the host samples after its prompt, which ends in a step in flight
            return False
        if sequence.num_cached_tokens + slot.launched + 1 >= slot.end:
            return False
        if slot.drafted and self._keeps_copies and self._copy_is_due(sequence):
            return False  # the host copies its states once it knows that it is at the end of a block
        return self.holds_back is None or not self.holds_back(sequence)

    def _prompt_step(self, left: int) -> StepPlan | None:
        """Chunks of the prompts being computed, then of waiting ones, of at most `left` tokens together.

        None if the only prompt being computed was preempted.
        """
        chunks, under_way = list[SequenceRows](), self._under_way()
        while not chunks or (self.packed and left >= LEAST_CHUNK):
            if len(chunks) < len(under_way):
                sequence = under_way[len(chunks)]
                if not self._has_room(sequence, len(sequence.token_ids)):
                    break
                chunks.append(self._chunk(sequence, left))
                left -= len(chunks[-1].ids)
            elif self._can_join() and self._admit():
                under_way = self._under_way()
            else:
                break
        return StepPlan.prefill(under_way[: len(chunks)], chunks) if chunks else None

    def _under_way(self) -> list[Sequence]:
        """Sequences with prompt tokens that are in no step yet, in order of arrival."""
        return [each for each in self.prefilling if each.num_cached_tokens < self._prompt_end(each)]

    def _can_join(self) -> bool:
        """Whether the first waiting sequence would gain nothing by waiting until the current prompts are computed.

        Pooled prompts are computed alone.
        """
        if not self.waiting or any(s.pool is not None for s in (self.waiting[0], *self.prefilling)):
            return False
        return not any(self._will_share(self.waiting[0], sequence) for sequence in self.prefilling)

    def _will_share(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether both sequences have the same beginning, up to the end of a full block that `running` is still to
        compute."""
        most = min(self._most_shared(waiting), self._prompt_end(running))
        ahead = (running.num_cached_tokens // BLOCK_SIZE + 1) * BLOCK_SIZE
        return ahead <= most and waiting.key_ids[:ahead] == running.key_ids[:ahead]

    def _most_shared(self, sequence: Sequence) -> int:
        """Number of tokens at its beginning that may be taken from the prefix cache.

        At least one token is always computed, as the next one is sampled from its logits. A pool needs every row of
        the prompt, and log-probabilities of the prompt those that have not been scored.
        """
        if not self.shares or sequence.pool is not None:
            return 0
        most = min(len(sequence.token_ids) - 1, self._prompt_end(sequence))
        unscored = range(0) if sequence.scores is None else sequence.scores.missing_rows
        return min(most, unscored.start) if unscored else most

    def _admit(self) -> bool:
        """Admits the first waiting sequence, if there is room; no other overtakes it."""
        if not self.waiting or len(self._running) >= self.parallel:
            return False
        sequence = self.waiting[0]
        if sequence.pool is not None:
            sequence.pool.clear()
        most = self._most_shared(sequence)
        # Reserve a block for each running sequence that may grow: otherwise this one would soon be preempted.
        allocation = self.blocks.allocate(
            self._keys(sequence, most),
            min(len(sequence.token_ids) + 1, sequence.max_positions),  # with the first token after them
            reserve=sum(map(self._may_grow, self._running)),
            tokens=sequence.key_ids,
            most=most,
        )
        if allocation is None:
            return False
        self.waiting.popleft()
        sequence.slot = Slot(self._free_slots.pop(0), sequence.max_positions)
        sequence.block_tables = allocation.block_tables
        sequence.num_cached_tokens = allocation.num_cached_tokens
        if allocation.copies:
            self._copy_blocks(allocation.copies)
        if self.blocks.has_states:
            sequence.state_copy_at = sequence.replay = 0
            sequence.checkpoints_at = self._checkpoints_of(sequence, allocation.num_held_tokens)
        if not sequence.started:
            sequence.start()
            sequence.reused_tokens = allocation.num_cached_tokens
        if sequence.num_cached_tokens < self._prompt_end(sequence):
            self.prefilling.append(sequence)
        else:
            self.decoding.append(sequence)
            self._add_copies(sequence)
        return True

    def _may_grow(self, sequence: Sequence) -> bool:
        return self.blocks.covered(sequence.block_tables) < sequence.max_positions

    def _chunk(self, sequence: Sequence, most: int) -> SequenceRows:
        start = sequence.num_cached_tokens
        end = min(start + most, self._prompt_end(sequence))
        if sequence.images is not None:
            end = sequence.images.whole(start, end)
        tables = sequence.block_tables
        if self.blocks.has_states:
            if places := self._next_checkpoints(sequence):
                end = self._chunk_end(end, places)
                if end < places[-1]:
                    # Up to the end of a block, where the states can be kept if the sequence is preempted.
                    end -= end % BLOCK_SIZE if end - end % BLOCK_SIZE > start else 0
            tables = self._begin_checkpoints(sequence, range(start, end))
        return SequenceRows(sequence.token_ids[start:end], start, tables, angles_of(sequence, start, end))

    def _chunk_end(self, end: int, places: Seq[int]) -> int:
        """The end of a chunk that passes these checkpoints: `end`, or an earlier one, since a step writes few states on
        its way, and a state can be rolled back only a few positions."""
        if self.blocks.rewinds:
            return min(end, places[0] + self.blocks.rewinds)
        return min(end, places[MOST_CHECKPOINTS - 1]) if len(places) > MOST_CHECKPOINTS else end

    def _chunk_size(self, beside: bool) -> int:
        """Maximum number of prompt tokens per step. beside: other sequences wait for their next token meanwhile."""
        if not beside:
            return self.chunk_size
        if self._mixed_seconds is None or not self._token_seconds:
            return self.backlog_chunk if self._has_backlog() else self.mixed_chunk
        fitting = int(self._mixed_seconds / self._token_seconds) // LEAST_CHUNK * LEAST_CHUNK
        return min(self.mixed_chunk, max(LEAST_CHUNK, fitting))

    def _has_backlog(self) -> bool:
        """Whether the prompts that are not in the cache yet have more tokens than the largest step takes."""
        left = self.chunk_size
        for sequence in chain(self.prefilling, self.waiting):
            left -= len(sequence.token_ids) - sequence.num_cached_tokens
            if left < 0:
                return True
        return False

    def _decode_step(self, ahead: bool) -> StepPlan | None:
        """A decode step of the sequences that have, or get, blocks for their next token; the oldest always gets them.

        ahead: steps are in flight. The step is then of all sequences whose inputs the device has or gets; None if one
        of them has no blocks for it, or there are too many rows.
        """
        known = [each for each in self.decoding if not ahead or self._is_known(each)]
        ready = [each for each in known if self._has_reach(each)]
        if ahead and (len(ready) < len(known) or self._is_too_large(ready)):
            return None
        return StepPlan.decode(ready) if ready else None

    def _is_too_large(self, sequences: Seq[Sequence]) -> bool:
        """Whether a decode step of these sequences has more rows than one that is launched ahead may have."""
        most = self._most_ahead
        return most is not None and sum(1 + sequence.replay for sequence in sequences) > most

    def _has_reach(self, sequence: Sequence) -> bool:
        """Whether a sequence has, or gets, blocks for the next token that is to be computed."""
        tables, slot = sequence.block_tables, sequence.slot
        if slot.index < 0:  # preempted by one before it
            return False
        positions = sequence.num_cached_tokens + slot.launched + 1
        if slot.drafted:
            positions = min(positions + slot.drafted, sequence.max_positions)
        # Nearly always its blocks reach far enough; without a window there are none to release either.
        return (self._keeps_all and len(tables[0]) * BLOCK_SIZE >= positions) or self._has_room(
            sequence, positions
        )

    def _has_room(self, sequence: Sequence, positions: int) -> bool:
        """Allocates the blocks for a sequence's next step towards `positions`, preempting the newest if need be.

        Returns False if the sequence itself was the newest, or if preemption is not allowed now.
        """
        while not self.blocks.grow(sequence.block_tables, sequence.num_cached_tokens, positions):
            if not self._preempts:
                return False
            newest = self._running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, keeps: bool = True) -> None:
        """Take a sequence's blocks; it becomes the first of the waiting ones, and keeps its generated tokens. `keeps`:
        its states are kept as well, for itself and others."""
        self._remove(sequence, keeps)
        sequence.num_cached_tokens = 0
        self.waiting.appendleft(sequence)

    def _remove(self, sequence: Sequence, keeps: bool = True) -> None:
        """Take a running sequence out and free its blocks; what a failed one has computed is not to be shared."""
        ahead = 0 if sequence in self.prefilling else self._ahead + sequence.slot.drafted
        (self.prefilling if sequence in self.prefilling else self.decoding).remove(sequence)
        if self.blocks.has_states:
            self._drop_checkpoints(sequence)
        if self.blocks.has_states and keeps and sequence.error is None:
            self._checkpoint_end(sequence, ahead)
        if sequence.error is not None:
            self.blocks.discard(sequence.block_keys)
        else:
            self._keep_beginning(sequence)
        self.blocks.free(sequence.block_tables)
        self._free_slots.append(sequence.slot.index)
        sequence.slot.kind = None
        sequence.block_tables, sequence.slot, sequence.draft = (), Slot(), ()

    def _keep_beginning(self, sequence: Sequence) -> None:
        """Register the last block of a sequence, if it is not full, so that prompts that continue in the same way find
        it."""
        known = min(sequence.num_cached_tokens, self._prompt_end(sequence))
        if self.shares and sequence.pool is None and known % BLOCK_SIZE:
            keys = self._keys(sequence, known)
            self.blocks.keep_beginning(
                sequence.block_tables, keys, sequence.key_ids[len(keys) * BLOCK_SIZE : known]
            )


def _whole(tokens: int) -> int:
    """As many of these tokens as fill blocks."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def _common(keys: Seq[bytes], others: Seq[bytes]) -> int:
    """The number of equal keys at the beginning of two lists; a key stands for all before it."""
    most = min(len(keys), len(others))
    return bisect_left(range(most), 1, key=lambda index: keys[index] != others[index])
