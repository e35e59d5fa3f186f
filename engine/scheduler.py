"""The scheduler: which tokens are computed next (continuous batching).

A step is a chunk of one sequence's prompt, or chunks of several prompts if that is faster, or one token of every
sequence whose prompt is done. If there are both prompts and decoding sequences, prefill and decode steps alternate, so
a running sequence never waits longer for its next token than one chunk takes. That chunk is limited by tokens and by
time, with a larger limit if many prompts wait. Sequences are admitted in order of arrival, as soon as there are blocks
for them. When blocks run out, the newest sequence is preempted: it gives up its blocks and is recomputed later, with
its generated tokens as part of the prompt.

On a device that computes asynchronously, a step is planned before the results of those in flight are known (`plan`), so
that the device does not wait for the host in between. A sequence that only the host can sample or draft for is left out
of such a step, and the others go on. Where the device drafts and accepts by itself, the host has an upper bound of how
far a sequence has come (`Slot.drafted`).
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from itertools import chain

from quengine.block_manager import Allocation, BlockManager
from quengine.block_pool import CopyBlocks
from quengine.errors import EngineError
from quengine.kernels.forward_batch import BlockTables
from quengine.kernels.kv.cache_types import BLOCK_SIZE, blocks_for
from quengine.kv_cache import KVCache
from quengine.request.sequence import Sequence
from quengine.shared_prefixes import SharedPrefixes
from quengine.slot import Slot
from quengine.state_checkpoints import StateCheckpoints
from quengine.step_plan import DraftRoom, SequenceRows, StepPlan, angles_of

LEAST_CHUNK = 16
"""Minimum number of prompt tokens per step, however slow the machine is."""

_MORE_FOLLOW = ["prefill", "decode"]
"""Phases of the two steps in flight after which a third may be launched."""

PENDING = 4
"""Steps launched ahead may have computed this many positions, drafts aside, after the tokens that the host knows."""


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
        packed: a step may hold chunks of several prompts, together at most `backlog_chunk` tokens if that is given:
            longer steps are not captured, and their kernels are launched one by one.
        shares: a prompt uses the cached blocks that hold its beginning.
        backlog_chunk: `mixed_chunk` while more than `chunk_size` prompt tokens wait.
        copy_blocks: copies blocks, in stream order after the steps launched so far (ModelRunner.copy_blocks).
        ahead: PENDING where steps are launched ahead, else 0.
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
        copy_blocks: CopyBlocks = lambda _copies: None,
        ahead: int = 0,
        most_ahead: int | None = None,
    ) -> None:
        self.cache = cache
        self.parallel = parallel
        self.chunk_size = chunk_size
        self.mixed_chunk = min(mixed_chunk, chunk_size)
        self.backlog_chunk = min(max(mixed_chunk, backlog_chunk), chunk_size)
        self.packed = packed
        self._most_packed = self.backlog_chunk if backlog_chunk else chunk_size
        self._copy_blocks = copy_blocks
        self.blocks = BlockManager(cache.pools, copy_blocks)
        self._ahead, self._most_ahead = ahead, most_ahead
        self.waiting: deque[Sequence] = deque()
        self.prefixes = SharedPrefixes(self.blocks, shares, deterministic)
        self.states = StateCheckpoints(
            self.blocks,
            cache.pools,
            self.prefixes,
            self.waiting,
            copy_blocks,
            ahead,
        )
        self.prefilling: list[Sequence] = []  # both in order of arrival
        self.decoding: list[Sequence] = []
        self.current: StepPlan | None = None
        """The step that was committed, or has failed, last."""
        self.holds_back: Callable[[Sequence], bool] | None = None
        """Whether a sequence may get a draft from the results in flight; it is then in no step launched ahead."""
        self._free_slots = list(range(parallel))
        self._mixed_seconds = mixed_seconds
        self._token_seconds = 0.0  # seconds per prompt token in the last chunk
        self._began = 0.0
        self._decode_is_due = False
        self._preempts = True
        self._keeps_all = all(pool.window is None for pool in cache.pools)
        self._only_grows = self._keeps_all and len(cache.pools) == 1 and not cache.pools[0].is_state
        self._alone: deque[Sequence] = deque()
        self._restarted: set[Sequence] = set()  # sequences of `_alone` that begin again

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
        """Removes a sequence from the queue or from the running ones, and frees its blocks."""
        self._restarted.discard(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self._running:
            self._remove(sequence)

    def plan(self, in_flight: Seq[StepPlan] = ()) -> StepPlan | None:
        """The step to launch after those in flight, whose results are not known: prompts and decode steps take turns.

        None if there is nothing to do, if the step depends on those results, if no sequence can get blocks for it
        without preemption, or if enough is in flight. Two steps are enough, unless they are a prefill step and the
        decode step after it. That decode step may be too short to keep the device busy, so another prefill step
        follows. The prompt tokens in flight count as cached from now on: a device computes its steps in order.
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
            has_states = self.blocks.has_states
            for sequence, slot, drafted in zip(plan.sequences, plan.slots, plan.drafted, strict=True):
                if sequence.slot is not slot or sequence.finish_reason is not None:
                    continue
                slot.launched -= 1
                slot.waits = False
                if drafted:
                    slot.drafted -= drafted
                if has_states and not sequence.draft:  # else Speculation.take sets it
                    sequence.replay = 0
                cached = sequence.num_cached_tokens + 1
                if cached % BLOCK_SIZE:
                    sequence.num_cached_tokens = cached
                else:  # a block is full
                    self._cached(sequence, 1)
            return
        self._token_seconds = seconds / sum(len(chunk.ids) for chunk in plan.chunks)
        self._cache_prompts(plan)

    def accepted(self, sequence: Sequence) -> None:
        """Notes that the newest token was an accepted draft, whose keys and values this step put into the cache."""
        self._cached(sequence, 1)

    def device_draft(self, sequence: Sequence, most: int) -> DraftRoom:
        """The limits of the draft, of up to `most` tokens, that the device makes for a sequence in the planned step.
        Allocates blocks for the draft as `draft_room` does."""
        slot = sequence.slot
        after = sequence.num_cached_tokens + slot.launched + slot.drafted  # its first row is before it
        if self.blocks.num_free > len(self._running):
            end = min(after + most, sequence.max_positions)
            self.blocks.grow(sequence.block_tables, sequence.num_cached_tokens, end)
        end = min(self.blocks.covered(sequence.block_tables), sequence.max_positions - 1)
        if self.states.copy_is_due(sequence):
            end = min(end, blocks_for(after) * BLOCK_SIZE)
        slot.drafted += most
        slot.reach = 0
        return DraftRoom(most, end)

    def draft_room(self, sequence: Sequence, most: int) -> int:
        """Number of drafted tokens, up to `most`, that the sequence has blocks for after its newest token.

        Allocates more blocks for them, as long as enough stay free for each running sequence to get another one.
        """
        if self.states.copy_is_due(sequence):
            most = min(most, -len(sequence.token_ids) % BLOCK_SIZE)
        end = min(len(sequence.token_ids) + most, sequence.max_positions)
        if self.blocks.num_free > len(self._running):
            self.blocks.grow(sequence.block_tables, sequence.num_cached_tokens, end)
        held = self.blocks.covered(sequence.block_tables)
        return max(0, min(most, held - len(sequence.token_ids)))

    def release(self) -> None:
        """Frees the blocks of finished sequences. Other sequences whose context is full discard tokens of it and begin
        again; pooled prompts do not, since they generate no tokens."""
        for sequence in [each for each in self._restarted if each.finished]:
            self.cancel(sequence)
        for sequence in self._running:
            if sequence.finish_reason is not None:
                self._remove(sequence)
            elif len(sequence.token_ids) >= sequence.ctx_size and sequence.pool is None:
                self._preempt(sequence)
                sequence.shift_context()

    def retry_alone(self) -> None:
        """Schedules the sequences of the current step one at a time, after the step of all of them failed."""
        if self.current is not None:
            self._alone.extend(self.current.sequences)

    def failed(self, plan: StepPlan) -> None:
        """Handles a step that could not be launched, or whose results are lost. Prompts whose first token is lost are
        computed again. The step may have changed states: sequences whose states cannot be rolled back begin again."""
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
                slot.has_token, slot.undrafted, slot.waits, slot.reach = False, 0, slot.launched > 0, 0
        restarts = self.blocks.has_states and not self.blocks.rewinds
        for sequence in reversed(self._running):
            if sequence not in plan.sequences:
                continue
            if restarts:
                self._restarted.add(sequence)
            has_none = plan.launched and plan.phase == "prefill"
            if restarts or (has_none and sequence.num_cached_tokens == len(sequence.token_ids)):
                self._preempt(sequence, keeps=False)

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

    def _cache_prompts(self, plan: StepPlan) -> None:
        """Notes that the tokens of a step's prompt chunks are in the cache, unless that is noted already. Sequences
        whose prompts end with these chunks decode from then on."""
        for sequence, chunk in plan.running():
            if sequence.block_tables and not sequence.finished and sequence.num_cached_tokens < chunk.end:
                self._cached(sequence, chunk.end - sequence.num_cached_tokens)
                self.states.launched(sequence, chunk)
            whole = chunk.end >= self.prefixes.prompt_end(sequence) and not sequence.finished
            if whole and sequence in self.prefilling:
                self.prefilling.remove(sequence)
                self.decoding.append(sequence)
                self.states.add_copies(sequence)

    def _cached(self, sequence: Sequence, count: int) -> None:
        """Notes that `count` more tokens are in the cache, and shares the blocks that they fill."""
        before = sequence.num_cached_tokens
        sequence.num_cached_tokens += count
        is_shared = self.prefixes.cached(sequence, before)
        if is_shared and self.blocks.has_states and sequence in self.decoding:
            self.states.add_copies(sequence)

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
        if slot.drafted and self.states.copy_is_due(sequence):
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
                left = min(left, self._most_packed) - len(chunks[-1].ids)
            elif self._can_join() and self._admit():
                under_way = self._under_way()
            else:
                break
        return StepPlan.prefill(under_way[: len(chunks)], chunks) if chunks else None

    def _under_way(self) -> list[Sequence]:
        """Sequences with prompt tokens that are in no step yet, in order of arrival."""
        return [each for each in self.prefilling if each.num_cached_tokens < self.prefixes.prompt_end(each)]

    def _can_join(self) -> bool:
        """Whether the first waiting sequence would gain nothing by waiting until the current prompts are computed.

        Pooled prompts are computed alone.
        """
        if not self.waiting or any(s.pool is not None for s in (self.waiting[0], *self.prefilling)):
            return False
        return not any(self.prefixes.will_share(self.waiting[0], sequence) for sequence in self.prefilling)

    def _admit(self) -> bool:
        """Admits the first waiting sequence, if there is room; no other overtakes it."""
        if not self.waiting or len(self._running) >= self.parallel:
            return False
        sequence = self.waiting[0]
        if sequence.pool is not None:
            sequence.pool.clear()
        allocation = self._allocated(sequence)
        if allocation is None:
            return False
        self.waiting.popleft()
        sequence.slot = Slot(self._free_slots.pop(0), sequence.max_positions)
        sequence.block_tables = allocation.block_tables
        sequence.num_cached_tokens = allocation.num_cached_tokens
        if allocation.copies:
            self._copy_blocks(allocation.copies)
        self.states.admitted(sequence, allocation.num_held_tokens)
        if not sequence.started:
            sequence.start()
            sequence.reused_tokens = allocation.num_cached_tokens
        if sequence.num_cached_tokens < self.prefixes.prompt_end(sequence):
            self.prefilling.append(sequence)
        else:
            self.decoding.append(sequence)
            self.states.add_copies(sequence)
        return True

    def _allocated(self, sequence: Sequence) -> Allocation | None:
        """Blocks for a waiting sequence; None if there are too few. A block is reserved for each running sequence that
        may grow: otherwise the new one would soon be preempted. The first try, one block for every running sequence,
        nearly always succeeds."""
        most, running = self.prefixes.most_shared(sequence), self._running
        allocate = partial(
            self.blocks.allocate,
            self.prefixes.keys(sequence, most),
            min(len(sequence.token_ids) + 1, sequence.max_positions),  # with the first token after them
            tokens=sequence.key_ids,
            most=most,
        )
        return allocate(reserve=len(running)) or allocate(reserve=sum(map(self._may_grow, running)))

    def _may_grow(self, sequence: Sequence) -> bool:
        return self.blocks.covered(sequence.block_tables) < sequence.max_positions

    def _chunk(self, sequence: Sequence, most: int) -> SequenceRows:
        start = sequence.num_cached_tokens
        end = min(start + most, self.prefixes.prompt_end(sequence))
        if sequence.images is not None:
            end = sequence.images.whole(start, end)
        tables: BlockTables = sequence.block_tables
        if self.blocks.has_states:
            end, tables = self.states.begin(sequence, end)
        angles = angles_of(sequence, start, end)
        return SequenceRows(sequence.token_ids[start:end], start, tables, angles, sequence.adapters)

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
        ready = list[Sequence]()
        usual, changed = ahead and self._only_grows and self.holds_back is None, list[int]()
        for sequence in self.decoding:
            slot = sequence.slot
            # Nearly always this holds, and in steps of many sequences a call for each takes the host long.
            if usual and slot.launched and sequence.num_cached_tokens + slot.launched < slot.reach:
                ready.append(sequence)
                continue
            if ahead and not self._is_known(sequence):
                continue
            if self._has_reach(sequence):
                changed.append(len(ready))
                ready.append(sequence)
                if usual and not (slot.waits or slot.drafted):
                    slot.reach = min(len(sequence.block_tables[0]) * BLOCK_SIZE, slot.end - 1)
            elif ahead:
                return None
        if ahead and self._is_too_large(ready):
            return None
        return StepPlan.decode(ready, changed) if ready else None

    def _is_too_large(self, sequences: Seq[Sequence]) -> bool:
        """Whether a decode step of these sequences has more rows than one that is launched ahead may have."""
        most = self._most_ahead
        if most is None or not self.blocks.has_states:
            return most is not None and len(sequences) > most
        return sum(1 + sequence.replay for sequence in sequences) > most

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
        """Frees a running sequence's blocks and puts it, with its generated tokens, at the head of the waiting ones.
        `keeps`: its states are kept as well, for itself and others."""
        self._remove(sequence, keeps)
        sequence.num_cached_tokens = 0
        self.waiting.appendleft(sequence)

    def _remove(self, sequence: Sequence, keeps: bool = True) -> None:
        """Removes a running sequence and frees its blocks. `keeps`: its states are kept, unless the sequence failed:
        what a failed one has computed is not to be shared."""
        ahead = 0 if sequence in self.prefilling else self._ahead + sequence.slot.drafted
        (self.prefilling if sequence in self.prefilling else self.decoding).remove(sequence)
        self.states.end(sequence, keeps and sequence.error is None, ahead)
        self.prefixes.end(sequence)
        self.blocks.free(sequence.block_tables)
        self._free_slots.append(sequence.slot.index)
        sequence.slot.kind = None
        sequence.block_tables, sequence.slot, sequence.draft = (), Slot(), ()
