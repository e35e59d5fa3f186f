"""The server's thread that drives an engine, and the queue in front of it.

Methods that the event loop calls (`submit`, `cancel`, `drain`) never wait for a step. Those of the thread (`_run` and
below) never touch a connection.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from quengine.errors import CannotRunError
from quengine.serve.processes.server_handle import Handle
from quengine.serve.processes.server_slots import SlotTable
from quengine.serve.processes.shared_engine import (
    STATS_SECONDS,
    Engine,
    EngineStats,
    Event,
    Failed,
    Piece,
    Work,
    add,
    failure_message,
)

logger = logging.getLogger("quengine.serve")

RESTART_SECONDS = 1.0
"""Seconds between attempts to replace a failed engine."""
LOOK_SECONDS = 0.5
"""Seconds between two reads of an idle engine's statistics, which raise once its process has ended."""
STOP_SECONDS = 2.0
"""Seconds that the current step has to end when the server stops; then the engine's process is killed."""
SILENT_SECONDS = 4.0
"""Seconds without a heartbeat after which the engine's process is reported as not answering."""
STEP_SECONDS = 60.0
"""Seconds after which a step is reported as slow. Kernels that are compiled first take up to a minute."""
MAX_RESTARTS = 3
"""Failures in a row, without a finished step between them, after which the engine is not replaced again."""


class QueueFullError(Exception):
    """No room in the queue for another request."""


class NotServingError(Exception):
    """The worker takes no requests now: it has no engine, or is to end."""


class Worker:
    """Runs an engine in a thread of its own and hands its events to the event loop.

    Args:
        make_engine: builds the engine, in the thread; called again when the engine has failed.
        parallel: most sequences given to the engine at once (never more than its capacity).
        max_queue: most sequences that may wait in the queue; those of a large batch wait in their handle instead.
        observe: called with the events of every step, in the event loop.
        ready, failed: called in the event loop when there is an engine, and when it has failed and is being replaced.
        ended: called in the event loop when the thread and the engine have ended; with the error if it could not go on.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        parallel: int,
        max_queue: int,
        observe: Callable[[Sequence[Event]], None],
        ready: Callable[[], None],
        failed: Callable[[], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self.parallel = parallel
        self.max_queue = max_queue
        self.engine: Engine | None = None
        self.stats = EngineStats()
        self.busy_seconds = 0.0
        self.steps = 0
        self.step_sequences = 0  # sum over all steps
        self._make_engine = make_engine
        self._observe = observe
        self._ready, self._failed, self._ended = ready, failed, ended
        self._wake = threading.Condition()
        self._waiting: deque[tuple[Handle, Work]] = deque()
        self._slots = SlotTable()
        self._running: dict[int, Handle] = {}
        self._cancels: list[int] = []
        self._delivered: list[tuple[Handle, Event]] = []
        self._stopping = False
        self._step_began: float | None = None
        self._stats_at = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- the event loop's side -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load the engine."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def serving(self) -> bool:
        """Whether requests are taken: there is an engine, and it is not to stop."""
        return self.engine is not None and not self._stopping

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def slots(self) -> int:
        """Sequences that can be computed at once."""
        return self.parallel if self.engine is None else min(self.parallel, self.engine.capacity)

    @property
    def slot_holders(self) -> dict[int, int]:
        """The request of each slot that is taken."""
        return self._slots.holders

    @property
    def trouble(self) -> str | None:
        """Why the engine may not answer although requests are taken; None where all is well."""
        engine, began = self.engine, self._step_began
        if engine is not None and (silent := engine.silent_seconds) > SILENT_SECONDS:
            return f"the engine has not answered for {silent:.0f} s"
        if (replicas := self.stats.replicas) and not any(each.up for each in replicas):
            return f"none of the {len(replicas)} replicas is up"
        if began is not None and (taken := time.perf_counter() - began) > STEP_SECONDS:
            return f"the engine has been in one step for {taken:.0f} s"
        return None

    def submit(self, requests: Sequence[Work]) -> Handle:
        """Queue the requests of one HTTP request: as many as there are slots, and as the queue has room for.

        The others follow one by one, each at the end of the queue when an earlier one has ended, so that a batch of any
        size neither fills the queue nor holds up the requests of others.

        Raises:
            NotServingError: not loaded, loading, ending, or the engine is being replaced.
            QueueFullError: the queue has no room for any of them.
        """
        with self._wake:
            if not self.serving:
                raise NotServingError
            # A free slot counts as room in the queue: it takes its request at the next step.
            room = self.max_queue + max(0, self.slots - len(self._running)) - len(self._waiting)
            if room < 1:
                raise QueueFullError
            queued = min(len(requests), room, max(1, self.slots))
            handle = Handle(requests, queued)
            self._waiting.extend((handle, request) for request in handle.requests[:queued])
            self._wake.notify()
        return handle

    def cancel(self, handle: Handle) -> None:
        """Release all that a request holds: waiting sequences at once, running ones at the next step."""
        handle.cancelled = True
        ids = {request.id for request in handle.requests}
        with self._wake:
            handle.unqueued.clear()
            if any(waiter is handle for waiter, _ in self._waiting):
                self._waiting = deque(entry for entry in self._waiting if entry[0] is not handle)
            self._cancels += ids & self._running.keys()
            self._wake.notify()

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def stop(self) -> None:
        """Fail all remaining requests and end the thread after the current step, which has STOP_SECONDS to end."""
        with self._wake:
            if self._stopping:
                return
            self._stopping = True
            self._wake.notify()
        killer = threading.Timer(STOP_SECONDS, self._kill_engine)
        killer.daemon = True
        killer.start()

    def _kill_engine(self) -> None:
        engine = self.engine
        if engine is not None and self._thread.is_alive():
            engine.kill()

    async def join(self, seconds: float) -> None:
        """Wait until the thread has ended, at most so long: it may be loading, or in a long step."""
        end = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.01)

    # --- the thread's side ---------------------------------------------------------------------------------

    def _run(self) -> None:
        problem: BaseException | None = None
        try:
            self._serve_until_stopped()
        except BaseException as error:
            problem = error
        self._fail_all("the server is shutting down" if problem is None else f"the engine failed: {problem}")
        if self.engine is not None:
            self.engine.close()
        self._call(lambda: self._ended(problem))

    def _serve_until_stopped(self) -> None:
        failures = 0
        while (engine := self._make_engine_again(failures) if failures else self._make_engine()) is not None:
            self.engine = engine
            self._call(self._ready)
            try:
                while self._turn(engine):
                    failures = 0
                return
            except Exception as error:
                if self._stopping:
                    return
                failures += 1
                logger.exception("the engine has failed")
                self.engine = None
                self._call(self._failed)
                self._fail_running(failure_message(error))
                engine.close()
                if failures >= MAX_RESTARTS:
                    raise CannotRunError(
                        f"the engine failed {failures} times in a row, last with {type(error).__name__}: {error}"
                    ) from error
            del engine  # its memory is needed for the next one

    def _make_engine_again(self, failures: int) -> Engine | None:
        """A new engine after this number of failures; None if the worker is to stop.

        A device that has failed may take a while to come back. Raises the error of the last attempt.
        """
        while True:
            try:
                return self._make_engine()
            except Exception:
                if self._stopping:
                    return None
                failures += 1
                if failures >= MAX_RESTARTS:
                    raise
                logger.exception("the engine cannot be started again yet")
            with self._wake:
                if self._wake.wait_for(lambda: self._stopping, RESTART_SECONDS):
                    return None

    def _turn(self, engine: Engine) -> bool:
        """Wait for work, then cancel, add and compute one step; False when it is time to stop."""
        while not self._has_work():
            self.stats = engine.stats()  # raises where the engine's process has ended meanwhile
            with self._wake:
                self._wake.wait_for(self._has_work, LOOK_SECONDS)
        with self._wake:
            if self._stopping:
                return False
            cancels, self._cancels = self._cancels, []
            for request_id in cancels:
                if self._running.pop(request_id, None) is not None:
                    self._slots.release(request_id)
                    engine.cancel(request_id)
            admitted = self._admit(min(self.parallel, engine.capacity))
        # At once: the engine reports nothing while it has nothing to compute.
        self._deliver([event for request in admitted if (event := add(engine, request)) is not None])
        if self._running:
            self._step(engine)
        return True

    def _admit(self, slots: int) -> list[Work]:
        """The waiting requests whose slot is free, in order, marked as running. The lock is held."""
        admitted, passed = list[Work](), deque[tuple[Handle, Work]]()
        while self._waiting and len(self._running) < slots:
            handle, request = self._waiting.popleft()
            slot = self._slots.take(request.id, request.slot, slots)
            if slot is None:
                passed.append((handle, request))
                continue
            request.slot = slot
            self._running[request.id] = handle
            admitted.append(request)
        self._waiting.extendleft(reversed(passed))
        return admitted

    def _has_work(self) -> bool:
        return bool(self._stopping or self._waiting or self._running or self._cancels)

    def _step(self, engine: Engine) -> None:
        self._step_began = began = time.perf_counter()
        self.steps += 1
        self.step_sequences += len(self._running)
        try:
            self._deliver(engine.step())
        finally:
            self._step_began = None
        now = time.perf_counter()
        self.busy_seconds += now - began
        if now - self._stats_at > STATS_SECONDS:
            self._stats_at = now
            self.stats = engine.stats()

    def _deliver(self, events: list[Event]) -> None:
        """Hand a step's events to the event loop in one call, and free the slots of what has ended."""
        with self._wake:
            idle = not self._delivered
            for event in events:
                handle = self._running.get(event.request_id)
                if handle is None:  # cancelled
                    continue
                if not isinstance(event, Piece):
                    del self._running[event.request_id]
                    self._slots.release(event.request_id)
                    self._queue_next(handle, event)
                self._delivered.append((handle, event))
            begun = idle and bool(self._delivered)
        if begun:
            self._call(self._distribute)

    def _queue_next(self, handle: Handle, ended: Event) -> None:
        """Queue a handle's next request after one has ended; none after a failure. The lock is held."""
        if isinstance(ended, Failed):
            handle.unqueued.clear()
        elif handle.unqueued:
            self._waiting.append((handle, handle.unqueued.popleft()))

    def _distribute(self) -> None:
        """Give the events of all steps since the last call to those who asked for them."""
        with self._wake:
            pairs, self._delivered = self._delivered, []
        self._observe([event for _, event in pairs])
        events: dict[Handle, list[Event]] = {}
        for handle, event in pairs:
            events.setdefault(handle, []).append(event)
        for handle, of_handle in events.items():
            handle.put(of_handle)

    def _fail_running(self, message: str) -> None:
        """Fail all running requests. Waiting ones stay."""
        with self._wake:
            self._cancels.clear()
            running = list(self._running)
        self._deliver([Failed(request_id, message) for request_id in running])

    def _fail_all(self, message: str) -> None:
        with self._wake:
            self._running.update({request.id: handle for handle, request in self._waiting})
            self._waiting.clear()
        self._fail_running(message)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            logger.debug("the event loop has closed; an event is dropped")
