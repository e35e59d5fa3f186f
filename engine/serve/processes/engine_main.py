"""The engine's process: `python -m quengine.serve.processes.engine_main FD HEARTBEAT [-v]`, started by `server_engine`.

It computes while it has sequences, and ends when the server ends. After a failure of the device it ends too, since a
process cannot use such a device again; the server then starts another.
"""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from quengine.kernels.channel import Channel
from quengine.kernels.child_process import end_with_parent, parent_channel
from quengine.kernels.process_end import end_at_once, leave
from quengine.platform import bus_error, collector, cuda_start, log_lines, torch_import
from quengine.platform.failure import failure_of
from quengine.serve.processes.shared_engine import (
    STATS_SECONDS,
    Continuing,
    Engine,
    EngineWork,
    Event,
    Failed,
    GenerationRequest,
    add,
    failed,
)
from quengine.serve.processes.shared_heartbeat import Heartbeat
from quengine.serve.processes.shared_wire import (
    TO_ENGINE,
    Add,
    Cancel,
    Load,
    Progress,
    Ready,
    Room,
    RoomMade,
    Step,
    ToEngine,
    can_be_sent,
)

if TYPE_CHECKING:
    from quengine.serve.processes.engine_llm import LLMEngine

logger = logging.getLogger("quengine.serve")

IDLE_SECONDS = 0.3
"""Seconds without a request after which the engine prepares a step that later requests may need."""

_COMPILING = 2  # constraints at once
_WITH_IMAGES = 16  # requests whose images are decoded, or wait for the encoder, at once


class EngineLoop:
    """Runs an engine: receives messages from `channel` between steps, and sends the events of each step to it.

    prepare_images: encodes the images of a request, in a thread, before it is added.
    prepare_next: prepares one step while no requests come; False: nothing is left. A request may have to wait for it.
    """

    def __init__(
        self,
        channel: Channel[ToEngine],
        engine: Engine,
        prepare_next: Callable[[], bool] | None = None,
        prepare_images: Callable[[GenerationRequest], None] | None = None,
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._received: deque[ToEngine | Future[GenerationRequest]] = deque()
        self._wake = threading.Condition()
        self._compilers, self._readers = ThreadPoolExecutor(_COMPILING), ThreadPoolExecutor(_WITH_IMAGES)
        self._preparing: dict[Future[GenerationRequest], int] = {}
        self._running: set[int] = set()
        self._stats_at = 0.0
        self._prepare_next, self._prepare_images = prepare_next, prepare_images

    def run(self) -> None:
        """Runs until the server is gone, then ends the process. Raises the engine's error when it fails."""
        threading.Thread(target=self._listen, daemon=True).start()
        self._send([])  # /metrics and /slots have the size of the cache before there is a request
        while True:
            received = self._take()
            if not received and not self._running:
                self._prepare_more()
                continue
            events: list[Event] = [event for each in received if (event := self._handle(each)) is not None]
            if self._running:
                events += self._engine.step()
            self._send(events)

    def _take(self) -> "list[ToEngine | Future[GenerationRequest]]":
        """The messages received. Waits for one while nothing runs, but only briefly if a step can be prepared."""
        with self._wake:
            while not (self._received or self._running):
                if not self._wake.wait(None if self._prepare_next is None else IDLE_SECONDS):
                    break
            received = list(self._received)
            self._received.clear()
        return received

    def _prepare_more(self) -> None:
        try:
            left = self._prepare_next is not None and self._prepare_next()
        except Exception as error:  # for want of memory: requests come first
            logger.debug("no more steps are captured ahead: %s", error)
            left = False
        if not left:
            self._prepare_next = None

    def _listen(self) -> None:
        try:
            while True:
                self._receive(self._channel.receive())
        except (EOFError, OSError):
            end_at_once(0)  # nothing receives what is computed
        except BaseException:
            # If this thread dies, the server waits for ever; a process that has ended is replaced.
            logger.exception("the engine cannot read what the server sends")
            end_at_once(1)

    def _receive(self, message: "ToEngine | Future[GenerationRequest]") -> None:
        with self._wake:
            self._received.append(message)
            self._wake.notify()

    def _handle(self, message: "ToEngine | Future[GenerationRequest]") -> Failed | None:
        if isinstance(message, Future):
            return self._prepared(message)
        if isinstance(message, Cancel):
            self._cancel(message.request_id)
        elif isinstance(message, Add):
            try:
                request = message.request
            except Exception as error:
                return failed(message.request_id, error, "request")
            if not isinstance(request, GenerationRequest):
                return self._add(request)
            if request.params.constraint is None and not request.images:
                return self._add(request)
            self._prepare(request)
        return None

    def _prepare(self, request: GenerationRequest) -> None:
        """Compiles the request's constraint and encodes its images in a thread, then adds it."""

        def prepared() -> GenerationRequest:
            self._engine.model.prepare(request.params)
            if request.images and self._prepare_images is not None:
                self._prepare_images(request)
            return request

        future = (self._readers if request.images else self._compilers).submit(prepared)
        self._preparing[future] = request.id
        future.add_done_callback(self._receive)

    def _prepared(self, future: Future[GenerationRequest]) -> Failed | None:
        request_id = self._preparing.pop(future, None)
        error = future.exception()
        if request_id is None:  # cancelled
            if error is None and future.result().images:
                self._engine.cancel(future.result().id)
            return None
        return self._add(future.result()) if error is None else failed(request_id, error, "request")

    def _cancel(self, request_id: int) -> None:
        if request_id in self._running:
            self._running.remove(request_id)
            self._engine.cancel(request_id)
        self._preparing = {future: given for future, given in self._preparing.items() if given != request_id}

    def _add(self, request: EngineWork) -> Failed | None:
        failure = add(self._engine, request)
        if failure is None:
            self._running.add(request.id)
        return failure

    def _send(self, events: list[Event]) -> None:
        self._running.difference_update(
            event.request_id for event in events if not isinstance(event, Continuing)
        )
        now = time.monotonic()
        stats = None
        if now - self._stats_at > STATS_SECONDS or not self._running:
            self._stats_at, stats = now, self._engine.stats()
        try:
            self._channel.send(Step(events, stats))
        except (OverflowError, UnicodeError, TypeError):
            self._send(self._without_unsendable(events))

    def _without_unsendable(self, events: list[Event]) -> list[Event]:
        """The events, in which requests with an event that cannot be encoded for the channel have failed."""
        message = "the answer cannot be sent: it holds what is no text or number"
        unsendable = {event.request_id for event in events if not can_be_sent(event)}
        for request_id in unsendable:
            logger.error("request %d: %s", request_id, message)
            with suppress(KeyError):  # it may have ended with this step
                self._cancel(request_id)
        kept = [event for event in events if event.request_id not in unsendable]
        return [*kept, *(Failed(request_id, message) for request_id in unsendable)]


def load(channel: Channel[ToEngine]) -> "LLMEngine":
    """The engine of the server's first message. Raises EngineError where it cannot be loaded."""
    wanted = channel.receive()
    assert isinstance(wanted, Load)
    cuda_start.begin(str(wanted.options.get("device", "auto")), wanted.model)
    from quengine.llm import LLM
    from quengine.serve.processes.engine_llm import LLMEngine

    def make_room(needed: int, free: int, device: str) -> bool:
        channel.send(Room(needed, free, device))
        answer = channel.receive()
        assert isinstance(answer, RoomMade)
        return answer.again

    llm = LLM(
        wanted.model,
        progress=lambda text: channel.send(Progress(text)),
        make_room=make_room,
        **wanted.options,
    )
    llm.warm_up()
    if llm.loaded.ranks is not None:
        llm.loaded.ranks.serves = True
    notes = tuple(llm.loaded.notes)
    device, memory = str(llm.loaded.device), llm.loaded.nbytes
    marker = "" if llm.images is None else llm.images.marker
    projector = str(llm.loaded.projector or "")
    capacity, adapters = llm.config.parallel, llm.adapters
    channel.send(Ready(capacity, llm.ctx_size, device, memory, notes, marker, projector, adapters))
    return LLMEngine(llm, wanted.regions, wanted.sends)


def main() -> int:
    channel = parent_channel(TO_ENGINE)
    end_with_parent()
    log_lines.set_up(verbose="-v" in sys.argv[3:])
    collector.starting()
    bus_error.install()
    torch_import.begin()
    Heartbeat(int(sys.argv[2])).keep_beating()
    try:
        engine = load(channel)
        collector.working()
        EngineLoop(channel, engine, engine.prepare_next, engine.prepare_images).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:
        failure = failure_of(error)
        if failure.kind == "failed":
            logger.error("the engine has failed", exc_info=error)
        with suppress(OSError):  # the server is gone as well
            channel.send(failure)
    return 1


if __name__ == "__main__":
    leave(main())
