"""Server process: one of several engines, the requests that it has, and its way down and up again.

An engine is always made in a thread of its own, at first and after a failure, so that the others do not wait for it.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from quengine.block_manager import extend_keys
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.serve.processes.server_thread import MAX_RESTARTS, RESTART_SECONDS, SILENT_SECONDS
from quengine.serve.processes.shared_engine import (
    Engine,
    EngineStats,
    Finished,
    GenerationRequest,
    Prefill,
    ReplicaStats,
    Work,
)
from quengine.serve.replicas.prefix_index import PrefixIndex

logger = logging.getLogger("quengine.serve")


class RoutedEngine(Engine, Protocol):
    """An engine in a process of its own, whose events can be waited for (`ProcessEngine`)."""

    @property
    def has_events(self) -> bool: ...

    def fileno(self) -> int: ...


@dataclass(frozen=True)
class Handed:
    """A prompt that a prefill engine has computed: how many of its tokens were in a cache, and the seconds it took."""

    cached_tokens: int
    seconds: float


@dataclass(eq=False)
class Routed:
    """A request, and where it is.

    Attributes:
        replica: the replica that has it; None: it waits.
        sent: its client has received a part of the answer, so that no other replica can start it again.
        moves: how many replicas have failed with it.
        keys: the keys of the full blocks of its prompt.
        generated: the tokens of its answer.
        handed: what a prefill engine has done for it.
    """

    request: Work | Prefill
    replica: "Replica | None" = None
    sent: bool = False
    moves: int = 0
    keys: list[bytes] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    handed: Handed | None = None

    def __post_init__(self) -> None:
        if isinstance(self.request, GenerationRequest):
            extend_keys(self.keys, self.request.prompt)


class Replica:
    """See the module docstring. All of it is called in the worker's thread, but for what `begin` runs.

    Args:
        number: its number among the replicas.
        start: makes the engine, in another thread.
        started: called in that thread, with this replica, when `start` has ended.
    """

    def __init__(
        self, number: int, start: Callable[[int], RoutedEngine], started: Callable[["Replica"], None]
    ) -> None:
        self.number = number
        self.engine: RoutedEngine | None = None
        self.index = PrefixIndex()
        self.requests: dict[int, Routed] = {}
        self.silent = False
        self.given_up = False
        self._start = start
        self._started = started
        self._result: RoutedEngine | Exception | None = None
        self._failed_in_turn = 0
        self.counts = ReplicaStats(False)

    # --- down and up -----------------------------------------------------------------------------------

    def begin(self, old: RoutedEngine | None = None) -> None:
        """Make the engine in a thread, once the one that has failed is closed."""

        def make() -> None:
            if old is not None:
                old.close()
            if self._failed_in_turn > 1:
                time.sleep(RESTART_SECONDS)
            try:
                self._result = self._start(self.number)
            except Exception as error:
                self._result = error
            self._started(self)

        threading.Thread(target=make, name=f"replica-{self.number}", daemon=True).start()

    def take_result(self) -> Exception | None:
        """Take the engine that was made. Returns the error if that failed, else None."""
        result, self._result = self._result, None
        if isinstance(result, Exception):
            return result
        self.engine, self.silent = result, False
        return None

    def failed(self) -> RoutedEngine | None:
        """Returns the failed engine, which is no longer used. It is to be replaced unless `given_up`."""
        engine, self.engine = self.engine, None
        self.index.clear()
        self._failed_in_turn += 1
        self.counts.failures += 1
        self.given_up = self._failed_in_turn >= MAX_RESTARTS
        return engine

    def close(self) -> None:
        """End the engine, if there is one."""
        if self.engine is not None:
            self.engine.close()

    def worked(self) -> None:
        """Note that a step has succeeded."""
        self._failed_in_turn = 0

    # --- what it has -----------------------------------------------------------------------------------

    @property
    def takes(self) -> bool:
        """Whether it is up, and has room for one request more."""
        return self.answers and self.engine is not None and len(self.requests) < self.engine.capacity

    @property
    def answers(self) -> bool:
        """Whether it is up."""
        return self.engine is not None and not self.silent

    def look(self) -> bool:
        """Whether it has stopped answering since the last look."""
        was, engine = self.silent, self.engine
        self.silent = engine is not None and engine.silent_seconds > SILENT_SECONDS
        return self.silent and not was

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in the prompts that it computes for other replicas."""
        requests = (routed.request for routed in self.requests.values())
        return sum(len(request.prompt) for request in requests if isinstance(request, Prefill))

    def reserve(self, routed: Routed) -> None:
        """Assign a request to it, whose prompt will then be in its cache."""
        routed.replica = self
        self.requests[routed.request.id] = routed
        self.index.add(routed.keys)
        self.counts.requests += 1

    def send(self, routed: Routed) -> None:
        """Give it a request. Raises as `Engine.add`."""
        assert self.engine is not None
        self.engine.add(routed.request)

    def drop(self, routed: Routed, moved: bool = False) -> None:
        """Take a request away from it."""
        self.requests.pop(routed.request.id, None)
        routed.replica = routed.handed = None
        self.counts.moved += moved

    def finished(self, routed: Routed, event: Finished) -> Finished:
        """Count a completion, whose blocks are now in the cache, with those of the answer. Returns the event, with the
        work of a prefill engine added."""
        assert isinstance(routed.request, GenerationRequest)
        extend_keys(routed.keys, [*routed.request.prompt, *routed.generated])
        self.index.add(routed.keys)
        times = event.timings
        if (handed := routed.handed) is not None:
            cached = min(times.cached_tokens, handed.cached_tokens)
            times = dataclasses.replace(times, cached_tokens=cached, prompt_s=times.prompt_s + handed.seconds)
        self.counts.prompt_tokens += times.prompt_tokens
        self.counts.cached_tokens += times.cached_tokens
        self.counts.generated_tokens += times.generated_tokens
        return replace(event, timings=times)

    def restored(self, routed: Routed, token_ids: Sequence[int]) -> None:
        """Note that a prefix from a file is in its cache."""
        extend_keys(routed.keys, token_ids)
        self.index.add(routed.keys)

    def stats(self) -> EngineStats:
        """Its statistics, under its number. Raises where its process has ended."""
        held = EngineStats() if self.engine is None else self.engine.stats()
        self.index.most = held.cache_size // BLOCK_SIZE or self.index.most
        slots = tuple(replace(slot, replica=self.number) for slot in held.slots)
        size = {"cache_used": held.cache_used, "cache_size": held.cache_size}
        counts = replace(self.counts, up=self.answers, running=len(self.requests), **size)
        return EngineStats(
            *(slots, held.cache_used, held.cache_size, (counts,), ()),
            *(held.checkpoints, held.images, held.experts),
        )
