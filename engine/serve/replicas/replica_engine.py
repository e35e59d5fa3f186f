"""Server process: several engines as the one that the worker's thread drives.

Among the replicas with hardly more requests than the one with the fewest, a request goes to the one whose cache has
most of its prompt. It waits here while all replicas are full. When a replica fails, its requests of which nothing was
sent yet wait here again, at the front; the others end with the error of a failed engine.
"""

import logging
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import TypeVar

from quengine.errors import CannotRunError
from quengine.serve.processes.server_engine import EngineFailedError
from quengine.serve.processes.server_thread import MAX_RESTARTS
from quengine.serve.processes.shared_engine import (
    BlocksTaken,
    EngineStats,
    EngineWork,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Piece,
    SlotAction,
    SlotDone,
    failed,
    failure_message,
)
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.replicas.prefill_pool import PrefillPool
from quengine.serve.replicas.replica import Replica, Routed, RoutedEngine

logger = logging.getLogger("quengine.serve")
C = TypeVar("C", bound=tuple[int, ...])

LOOK_SECONDS = 0.25
"""Between two looks at who does not answer any more."""
MOST_MOVES = 2
"""How often a request goes to another replica: one that makes engines fail must not take all of them along."""
LEAST_AHEAD = 1
AHEAD_SHARE = 4
"""A replica that knows a prompt is passed over when it has more requests than the one with the fewest by more than a
fourth of what it takes."""


class ReplicaEngine:
    """See the module docstring; an `Engine`.

    Args:
        start: makes the engine with a given number, in a thread.
        count: the number of replicas. The first is made before the others, which then find its kernels compiled.
        regions: a descriptor for each further engine, which computes prompts for them (prefill_pool.py).

    Raises:
        Exception: what `start` raised for any of them.
    """

    def __init__(self, start: Callable[[int], RoutedEngine], count: int, regions: Sequence[int] = ()) -> None:
        self._closed = False
        self._lock = threading.Lock()
        self._started: SimpleQueue[Replica] = SimpleQueue()
        self._wake, self._waker = multiprocessing.Pipe(duplex=False)
        self._all = [Replica(number, start, self._made) for number in range(count + len(regions))]
        self._replicas = self._all[:count]
        self._pool, self._descriptors = PrefillPool(self._all[count:], regions), list(regions)
        self._routed: dict[int, Routed] = {}
        self._waiting: deque[Routed] = deque()
        self._slots: dict[int, tuple[Replica, list[bytes]]] = {}  # holder of its blocks, their keys
        self._events: list[Event] = []
        self._looked_at = 0.0
        try:
            for some in (self._all[:1], self._all[1:]):
                self._begin(some)
        except BaseException:
            self.close()
            raise
        engines = [replica.engine for replica in self._replicas if replica.engine is not None]
        self.model: ServedModel = engines[0].model
        self.capacity = sum(engine.capacity for engine in engines)

    def _begin(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            replica.begin()
        for _ in replicas:
            replica = self._started.get()
            if (error := replica.take_result()) is not None:
                raise error

    def _made(self, replica: Replica) -> None:
        """Queues a replica for which `start` has ended; closes it after `close`. Called in the replica's thread."""
        with self._lock:
            if not self._closed:
                self._started.put(replica)
                self._waker.send_bytes(b"1")
                return
        replica.take_result()
        replica.close()

    # --- an engine's calls -----------------------------------------------------------------------------

    @property
    def silent_seconds(self) -> float:
        """The seconds of the replica that has answered last."""
        engines = [replica.engine for replica in self._replicas]
        return min((engine.silent_seconds for engine in engines if engine is not None), default=0.0)

    def add(self, request: EngineWork) -> None:
        assert isinstance(request, GenerationRequest | SlotAction)
        self._routed[request.id] = routed = Routed(request)
        self._waiting.append(routed)
        self._dispatch()

    def cancel(self, request_id: int) -> None:
        if (routed := self._routed.pop(request_id, None)) is None:
            return
        if routed.replica is None:
            self._waiting.remove(routed)
        else:
            self._withdraw(routed)

    @property
    def _up(self) -> dict[Replica, RoutedEngine]:
        return {replica: replica.engine for replica in self._all if replica.engine is not None}

    def step(self) -> list[Event]:
        """The events of all replicas since the last call. If there are none, waits up to LOOK_SECONDS for some."""
        if not (self._events or any(engine.has_events for engine in self._up.values())):
            wait([*(engine.fileno() for engine in self._up.values()), self._wake], LOOK_SECONDS)
        self._receive()
        self._dispatch()
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        """Sums over the replicas, and each replica's own. Raises where none is left."""
        self._receive()
        parts = [self._stats_of(replica) for replica in self._all]
        serving = parts[: len(self._replicas)]
        return EngineStats(
            tuple(slot for part in serving for slot in part.slots),
            sum(part.cache_used for part in serving),
            sum(part.cache_size for part in serving),
            tuple(each for part in serving for each in part.replicas),
            tuple(each for part in parts[len(serving) :] for each in part.replicas),
            _sums(part.checkpoints for part in serving),
            _sums(part.images for part in serving),
            _sums(part.experts for part in serving),
        )

    def kill(self) -> None:
        self._closed = True
        for engine in list(self._up.values()):
            engine.kill()

    def close(self) -> None:
        """Close all engines; one that is still being made is closed when it is done."""
        with self._lock:
            self._closed = True
            while not self._started.empty():
                self._started.get().take_result()
        threads = [threading.Thread(target=replica.close) for replica in self._all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._wake.close()
        self._waker.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _receive(self) -> None:
        """Take the replicas' events, and note which replicas are made and which do not answer."""
        self._take_started()
        for replica, engine in self._up.items():
            try:
                if engine.has_events:
                    self._take_events(replica, engine.step())
            except Exception as error:
                self._failed(replica, error)
        self._look()

    # --- where requests go -----------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give waiting requests to replicas, in order, as long as one has room."""
        while self._waiting and (replica := self._choose(self._waiting[0])) is not None:
            routed = self._waiting.popleft()
            prefilled = self._pool.begin(routed, replica)
            replica.reserve(routed)
            self._note_slot(replica, routed)
            if not prefilled:
                self._send(routed)

    def _send(self, routed: Routed) -> None:
        """Give a request to its replica."""
        replica = routed.replica
        assert replica is not None
        try:
            replica.send(routed)
        except EngineFailedError as error:
            replica.drop(routed, moved=True)
            self._waiting.appendleft(routed)
            self._failed(replica, error)
        except Exception as error:
            self._end(routed)
            self._events.append(failed(routed.request.id, error, "request"))

    def _choose(self, routed: Routed) -> Replica | None:
        """The replica for a request; None: it waits."""
        if isinstance(routed.request, SlotAction) and routed.request.action != "restore":
            holder, _ = self._slots.get(routed.request.slot, (None, []))
            if holder is not None and holder.answers:
                return holder
        able = [replica for replica in self._replicas if replica.takes]
        if not able:
            return None
        fewest = min(len(replica.requests) for replica in able)
        most = fewest + max(LEAST_AHEAD, self.capacity // len(self._replicas) // AHEAD_SHARE)
        near = [replica for replica in able if len(replica.requests) <= most]
        return max(
            near,
            key=lambda each: (
                each.index.known(routed.keys),
                -len(each.requests),
                -len(each.index),
                -each.number,
            ),
        )

    def _note_slot(self, replica: Replica, routed: Routed) -> None:
        """Note where a slot's blocks are: with the latest sequence that ran or was restored there."""
        request = routed.request
        if isinstance(request, GenerationRequest) or (
            isinstance(request, SlotAction) and request.action == "restore"
        ):
            self._slots[request.slot] = replica, routed.keys
        elif isinstance(request, SlotAction) and request.action == "erase" and request.slot in self._slots:
            replica.index.discard(self._slots.pop(request.slot)[1])

    def _withdraw(self, routed: Routed, moved: bool = False) -> None:
        """Take a request from the replica that has it."""
        replica = routed.replica
        assert replica is not None
        replica.drop(routed, moved)
        self._pool.cancel(routed)
        if replica.engine is not None:
            with suppress(EngineFailedError):  # the next step finds that out
                replica.engine.cancel(routed.request.id)

    def _end(self, routed: Routed) -> None:
        del self._routed[routed.request.id]
        if routed.replica is not None:
            routed.replica.drop(routed)

    def _take_events(self, replica: Replica, events: Sequence[Event]) -> None:
        """Take a replica's events, for the requests that it still has."""
        replica.worked()
        if replica in self._pool.replicas:
            for ready in self._pool.accept(replica, events):
                self._send(ready)
            return
        for event in events:
            if isinstance(event, BlocksTaken):
                self._pool.taken(event.request_id)
            elif (routed := replica.requests.get(event.request_id)) is None:
                continue
            elif isinstance(event, Piece):
                routed.sent = True
                routed.generated += event.tokens
                self._events.append(event)
            else:
                self._events.append(self._ended(replica, routed, event))

    def _ended(self, replica: Replica, routed: Routed, event: Event) -> Event:
        """Ends a request. Returns its last event, completed by what is known here."""
        if isinstance(event, Finished):
            event = replica.finished(routed, event)
        elif isinstance(event, SlotDone) and event.token_ids:
            replica.restored(routed, event.token_ids)
        self._end(routed)
        return event

    # --- who fails -------------------------------------------------------------------------------------

    def _stats_of(self, replica: Replica) -> EngineStats:
        try:
            return replica.stats()
        except Exception as error:
            self._failed(replica, error)
            return replica.stats()

    def _look(self) -> None:
        """Moves requests away from replicas that no longer answer, unless a part of the answer was sent."""
        if time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        for replica in self._all:
            is_prefill = replica in self._pool.replicas
            if not replica.look() and not (
                is_prefill and replica.requests and self._pool.is_blocked(replica)
            ):
                continue
            if is_prefill:
                unsent = self._pool.abandon(replica)
                for routed in unsent:
                    self._send(routed)
            else:
                unsent = [routed for routed in replica.requests.values() if not routed.sent]
                for routed in unsent:
                    self._withdraw(routed, moved=True)
                self._waiting.extendleft(reversed(unsent))
            logger.warning(
                "replica %d does not answer; %d of its requests go to others", replica.number, len(unsent)
            )

    def _failed(self, replica: Replica, error: Exception) -> None:
        """Handles the failure of a replica. Raises where none is left, or all are to end."""
        if self._closed:
            raise error
        engine, message = replica.failed(), failure_message(error)
        if replica in self._pool.replicas:
            left = self._pool.prefiller_failed(replica)
            for routed in left:
                self._send(routed)
        else:
            left = self._clear(replica, message)
            self._waiting.extendleft(reversed(left))
        logger.error("replica %d: %s; %d of its requests go to others", replica.number, message, len(left))
        self._go_on(replica, error, engine)

    def _clear(self, replica: Replica, message: str) -> list[Routed]:
        """Take all requests from a failed replica, and end those that cannot be moved. Returns the others."""
        left = []
        self._pool.reader_failed(replica)
        for routed in list(replica.requests.values()):
            self._pool.cancel(routed)
            if routed.sent or routed.moves >= MOST_MOVES:
                self._end(routed)
                self._events.append(Failed(routed.request.id, message))
            else:
                replica.drop(routed, moved=True)
                routed.moves += 1
                left.append(routed)
        return left

    def _go_on(self, replica: Replica, error: Exception, engine: RoutedEngine | None) -> None:
        """Make a replica's engine again, unless it has failed too often. Raises CannotRunError where none is left."""
        if not replica.given_up:
            replica.begin(engine)
            return
        if engine is not None:
            engine.close()
        logger.error("replica %d failed %d times in a row and is left out", replica.number, MAX_RESTARTS)
        if all(each.given_up for each in self._replicas):
            raise CannotRunError(
                f"all {len(self._replicas)} replicas failed {MAX_RESTARTS} times in a row, last with "
                f"{type(error).__name__}: {error}"
            ) from error

    def _take_started(self) -> None:
        """Take the engines that were made again; where that failed, try once more."""
        while self._wake.poll():
            self._wake.recv_bytes()
        while not self._started.empty():
            replica = self._started.get()
            error = replica.take_result()
            if error is None:
                logger.warning("replica %d is up again", replica.number)
            else:
                logger.error("replica %d cannot be started again yet: %s", replica.number, error)
                replica.failed()
                self._go_on(replica, error, None)


def _sums(counts: Iterable[C | None]) -> C | None:
    """The sums of counts of one kind, which some replicas may lack; None if all do."""
    there = [each for each in counts if each is not None]
    if not there:
        return None
    made: Callable[..., C] = type(there[0])
    return made(*map(sum, zip(*there, strict=True)))
