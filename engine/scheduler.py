"""Which tokens are computed next: first come, first served, one sequence at a time, prompts in chunks."""

import time
from collections import deque
from dataclasses import dataclass

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


class Scheduler:
    """Owns the queue and the bookkeeping of the cache; computes nothing."""

    def __init__(self, cache: KVCache, chunk_size: int, reuse_prefix: bool) -> None:
        self.cache = cache
        self.chunk_size = chunk_size
        self.reuse_prefix = reuse_prefix
        self.waiting: deque[Sequence] = deque()
        self.running: Sequence | None = None

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
        return Batch(sequence, sequence.token_ids[start : start + self.chunk_size], start)

    def computed(self, batch: Batch) -> None:
        """Note that a batch's keys and values are in the cache; must be called before the token is appended."""
        sequence = batch.sequence
        sequence.num_cached_tokens = batch.start + len(batch.ids)
        self.cache.tokens[batch.start :] = batch.ids

    def release(self) -> None:
        """Let a finished sequence go."""
        if self.running is not None and self.running.finished:
            self.running = None

    def _admit(self, sequence: Sequence) -> Sequence:
        sequence.started = time.perf_counter()
        # At least one prompt token is always computed: its logits give the first token.
        reusable = self.cache.common_prefix(sequence.token_ids[:-1]) if self.reuse_prefix else 0
        sequence.num_cached_tokens = sequence.reused_tokens = reusable
        del self.cache.tokens[reusable:]
        return sequence
