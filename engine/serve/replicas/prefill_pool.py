"""Server process: the engines that compute prompts for others, and the blocks on their way.

A prompt's blocks are sent in parts of a region while the rest of the prompt is computed. The replica that is to answer
the request reads each part, and so has the prompt in its cache when it is given the request. It computes itself what is
not handed over, for instance when a prefill engine fails.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.serve.processes.server_engine import EngineFailedError
from quengine.serve.processes.shared_engine import (
    BlocksReady,
    Event,
    GenerationRequest,
    Prefill,
    Prefilled,
    TakeBlocks,
)
from quengine.serve.processes.shared_region import PARTS, BlockRegion
from quengine.serve.replicas.replica import Handed, Replica, Routed

LEAST_TOKENS = 256
"""Of a prompt that no replica has in its cache: fewer are computed beside the running requests in a moment."""


@dataclass
class _Open:
    """A prompt that is being computed. `target`: the replica that has the request. `known`: how many tokens at the
    prompt's beginning are in the cache of `target`."""

    routed: Routed
    target: Replica
    prefiller: Replica
    known: int


@dataclass
class _Part:
    """A part of a region that a replica reads."""

    reader: Replica
    region: int
    part: int


class PrefillPool:
    """See the module docstring. replicas: the prefill engines. descriptors: of the region of each."""

    def __init__(self, replicas: Sequence[Replica], descriptors: Sequence[int]) -> None:
        self.replicas = replicas
        self._regions = [BlockRegion(descriptor) for descriptor in descriptors]
        self._open: dict[int, _Open] = {}
        self._parts: dict[int, _Part] = {}

    def begin(self, routed: Routed, target: Replica) -> bool:
        """Has a prefill engine compute a request's prompt for `target`. False: `target` computes it itself."""
        request = routed.request
        able = [replica for replica in self.replicas if replica.answers and not self.is_blocked(replica)]
        if not able or not isinstance(request, GenerationRequest):
            return False
        # Some requests want rows of the prompt, not its cache; and prefill engines have no images.
        if request.pooling is not None or request.score_prompt or request.images:
            return False
        first = target.index.known(routed.keys)
        if len(request.prompt) - first * BLOCK_SIZE < LEAST_TOKENS:
            return False
        chosen = max(able, key=lambda each: (each.index.known(routed.keys), -each.prompt_tokens))
        prefill = Prefill(request.prompt, first)
        chosen.reserve(prompt := Routed(prefill, keys=routed.keys))
        try:
            chosen.send(prompt)
        except EngineFailedError:  # the next step finds that out
            chosen.drop(prompt, moved=True)
            return False
        self._open[prefill.id] = _Open(routed, target, chosen, first * BLOCK_SIZE)
        return True

    def accept(self, prefiller: Replica, events: Sequence[Event]) -> list[Routed]:
        """Takes a prefill engine's events. Returns the requests whose prompts are handed over, or have failed."""
        ready = []
        for event in events:
            entry = self._open.get(event.request_id)
            if isinstance(event, BlocksReady):
                self._hand_over(prefiller, entry, event)
                continue
            prefiller.requests.pop(event.request_id, None)
            if entry is not None:
                del self._open[event.request_id]
                if isinstance(event, Prefilled):
                    prefiller.counts.prompt_tokens += len(entry.routed.keys) * BLOCK_SIZE
                    prefiller.counts.cached_tokens += event.cached_tokens
                    entry.routed.handed = Handed(max(entry.known, event.cached_tokens), event.seconds)
                ready.append(entry.routed)
        return ready

    def _hand_over(self, prefiller: Replica, entry: _Open | None, event: BlocksReady) -> None:
        region = self.replicas.index(prefiller)
        if entry is None or entry.target.engine is None:
            self._regions[region].free(event.part)
            return
        keys = b"".join(entry.routed.keys[: event.end])
        take = TakeBlocks(keys, event.held, region, event.part)
        self._parts[take.id] = _Part(entry.target, region, event.part)
        with suppress(EngineFailedError):  # the next step finds that out
            entry.target.engine.add(take)

    def taken(self, request_id: int) -> None:
        """Frees a part that a replica has read."""
        if (read := self._parts.pop(request_id, None)) is not None:
            self._regions[read.region].free(read.part)

    def cancel(self, routed: Routed) -> None:
        """Cancels the prompt of a request, which does not need it any more."""
        for prefill_id, entry in list(self._open.items()):
            if entry.routed is routed:
                del self._open[prefill_id]
                entry.prefiller.requests.pop(prefill_id, None)
                if entry.prefiller.engine is not None:
                    with suppress(EngineFailedError):
                        entry.prefiller.engine.cancel(prefill_id)

    def reader_failed(self, replica: Replica) -> None:
        """Frees the parts that a replica was reading, as its process has ended."""
        for request_id, read in list(self._parts.items()):
            if read.reader is replica:
                self.taken(request_id)

    def is_blocked(self, prefiller: Replica) -> bool:
        """Whether all parts of its region are held by replicas that do not answer."""
        region = self.replicas.index(prefiller)
        stuck = [read for read in self._parts.values() if read.region == region and read.reader.silent]
        return len(stuck) == PARTS

    def abandon(self, prefiller: Replica) -> list[Routed]:
        """Gives up on a prefill engine. Returns the requests that it had, whose own replicas compute the prompts."""
        left = [entry.routed for entry in self._open.values() if entry.prefiller is prefiller]
        for routed in left:
            self.cancel(routed)
        return left

    def prefiller_failed(self, replica: Replica) -> list[Routed]:
        """As `abandon`, for an engine whose process has ended. Frees the parts that it had not announced."""
        region = self.replicas.index(replica)
        reading = {read.part for read in self._parts.values() if read.region == region}
        for part in set(range(PARTS)) - reading:
            self._regions[region].free(part)
        return self.abandon(replica)
