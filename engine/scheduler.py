"""Which tokens are computed next, of one sequence at a time: first come, first served, prompts in chunks.

For many at once see paged_scheduler.py.
"""

import time
from collections import deque
from dataclasses import dataclass

from quengine.errors import EngineError
from quengine.kv_cache import KVCache
from quengine.sequence import Sequence


@dataclass(frozen=True)
class Batch:
    """The tokens of one step: `ids` at positions start .. start + len(ids) - 1 of one sequence."""

    sequence: Sequence
    ids: list[int]
    start: int

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the sequence's newest, so that a token follows from its logits."""
        return self.start + len(self.ids) == len(self.sequence.token_ids)

    @property
    def chunks(self) -> "list[Batch]":
        """Itself: a step of one chunk, as PromptStep is one of several."""
        return [self]

    @property
    def sequences(self) -> list[Sequence]:
        return [self.sequence]


@dataclass(frozen=True)
class PromptStep:
    """The chunks of several sequences, computed at once (paged cache)."""

    chunks: list[Batch]

    @property
    def sequences(self) -> list[Sequence]:
        return [chunk.sequence for chunk in self.chunks]


@dataclass(frozen=True)
class DecodeStep:
    """One token of each of several sequences, the first that is not in the cache, which is paged."""

    sequences: list[Sequence]


class Scheduler:
    """Owns the queue and the bookkeeping of the cache; computes nothing."""

    def __init__(self, cache: KVCache, chunk_size: int, reuse_prefix: bool) -> None:
        self.cache = cache
        self.chunk_size = chunk_size
        self.reuse_prefix = reuse_prefix
        self.waiting: deque[Sequence] = deque()
        self.running: Sequence | None = None
        self._batch: Batch | None = None

    @property
    def current(self) -> Batch | None:
        """The batch that was handed out last, while its sequence is still running."""
        return self._batch if self.running is not None else None

    @property
    def sequences(self) -> list[Sequence]:
        """All that run or wait."""
        running = [] if self.running is None else [self.running]
        return running + list(self.waiting)

    @property
    def cache_used(self) -> int:
        """Positions of the cache whose rows are valid."""
        return len(self.cache.tokens)

    @property
    def cache_size(self) -> int:
        """Positions of the cache."""
        return self.cache.ctx_size

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is; its rows in the cache stay valid for the next one."""
        if sequence is self.running:
            self.running = None
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def next_batch(self) -> Batch | None:
        """The next chunk of the running sequence, or of the first one waiting; None when there is nothing to do."""
        if self.running is None:
            if not self.waiting:
                return None
            self.running = self._admit(self.waiting.popleft())
        sequence = self.running
        start = sequence.num_cached_tokens
        self._batch = Batch(sequence, sequence.token_ids[start : start + self.chunk_size], start)
        return self._batch

    def computed(self) -> None:
        """Note that the current batch's keys and values are in the cache; call it before the token is appended.

        Of a sequence that has failed nothing is noted.
        """
        batch = self.current
        if batch is None or batch.sequence.finished:
            return
        sequence = batch.sequence
        sequence.num_cached_tokens = batch.start + len(batch.ids)
        self.cache.tokens[batch.start :] = batch.ids

    def release(self) -> None:
        """Let a finished sequence go."""
        if self.running is not None and self.running.finished:
            self.running = None

    def forget(self) -> None:
        """Nothing in the cache is valid any more.

        Raises EngineError where a sequence is being computed.
        """
        if self.sequences:
            raise EngineError("the cache is in use: finish or close the streams that are under way first")
        self.cache.tokens.clear()

    def _admit(self, sequence: Sequence) -> Sequence:
        sequence.started = time.perf_counter()
        # At least one prompt token is always computed: its logits give the first token.
        reuse = self.reuse_prefix and sequence.pool is None
        reusable = self.cache.common_prefix(sequence.token_ids[:-1]) if reuse else 0
        sequence.num_cached_tokens = sequence.reused_tokens = reusable
        del self.cache.tokens[reusable:]
        return sequence
