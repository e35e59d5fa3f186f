"""The engine's process, beside the server's: `python -m quengine.serve.processes.engine_main FD HEARTBEAT [-v]`.

Computes as long as it has sequences, whatever the server does meanwhile, and ends when the server does. A device that
is lost stays lost for its process; so this one ends then, and the server starts another. Started by `process_engine`.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from quengine.errors import CannotRunError, EngineError
from quengine.platform import bus_error, collector, log_lines
from quengine.serve.processes.shared_engine import (
    STATS_SECONDS,
    Engine,
    Event,
    Failed,
    GenerationRequest,
    Piece,
    add,
    refused,
)
from quengine.serve.processes.shared_heartbeat import Heartbeat
from quengine.serve.processes.shared_wire import (
    Add,
    Broken,
    Cancel,
    Kind,
    Load,
    Progress,
    Ready,
    Step,
    ToEngine,
    can_be_sent,
    receive_in_engine,
    send,
)

logger = logging.getLogger("quengine.serve")

_COMPILING = 2  # constraints at once


class EngineLoop:
    """An engine that takes orders from `connection` between its steps, and sends there what they come to."""

    def __init__(self, connection: "Connection[Any, Any]", engine: Engine) -> None:
        self._connection = connection
        self._engine = engine
        self._orders: deque[ToEngine | Future[GenerationRequest]] = deque()
        self._ordered = threading.Condition()
        self._compilers = ThreadPoolExecutor(_COMPILING)
        self._preparing: dict[Future[GenerationRequest], int] = {}
        self._running: set[int] = set()
        self._told_at = 0.0

    def run(self) -> None:
        """Until the server is gone, which ends the process. Raises what the engine raises when it is lost."""
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            with self._ordered:
                while not (self._orders or self._running):
                    self._ordered.wait()
                orders = list(self._orders)
                self._orders.clear()
            events: list[Event] = [event for order in orders if (event := self._obey(order)) is not None]
            if self._running:
                events += self._engine.step()
            self._tell(events)

    def _listen(self) -> None:
        try:
            while True:
                self._order(receive_in_engine(self._connection))
        except (EOFError, OSError):
            os._exit(0)  # whatever is computed, nobody waits for it
        except BaseException:
            # Without this thread the server would wait for ever; a process that has ended is replaced.
            logger.exception("the engine cannot read what the server sends")
            os._exit(1)

    def _order(self, order: "ToEngine | Future[GenerationRequest]") -> None:
        with self._ordered:
            self._orders.append(order)
            self._ordered.notify()

    def _obey(self, order: "ToEngine | Future[GenerationRequest]") -> Failed | None:
        if isinstance(order, Future):
            return self._prepared(order)
        if isinstance(order, Cancel):
            self._cancel(order.request_id)
        elif isinstance(order, Add):
            try:
                request = order.request
            except Exception as error:
                return refused(order.request_id, error)
            if request.params.constraint is None:
                return self._add(request)
            self._prepare(request)
        return None

    def _prepare(self, request: GenerationRequest) -> None:
        """Compile what the text is held to while others are computed; it is added then."""

        def prepared() -> GenerationRequest:
            self._engine.model.prepare(request.params)
            return request

        future = self._compilers.submit(prepared)
        self._preparing[future] = request.id
        future.add_done_callback(self._order)

    def _prepared(self, future: Future[GenerationRequest]) -> Failed | None:
        request_id = self._preparing.pop(future, None)
        if request_id is None:  # cancelled
            return None
        error = future.exception()
        return self._add(future.result()) if error is None else refused(request_id, error)

    def _cancel(self, request_id: int) -> None:
        if request_id in self._running:
            self._running.remove(request_id)
            self._engine.cancel(request_id)
        self._preparing = {future: given for future, given in self._preparing.items() if given != request_id}

    def _add(self, request: GenerationRequest) -> Failed | None:
        failed = add(self._engine, request)
        if failed is None:
            self._running.add(request.id)
        return failed

    def _tell(self, events: list[Event]) -> None:
        try:
            self._send(events)
        except (OverflowError, UnicodeError, TypeError):
            self._send(self._without_unsendable(events))

    def _without_unsendable(self, events: list[Event]) -> list[Event]:
        """The events with those requests failed of which an event has no form on the wire; the others go on."""
        lost = {event.request_id for event in events if not can_be_sent(event)}
        for request_id in lost:
            logger.error(
                "an answer of request %d cannot be sent: it holds what is no text or number", request_id
            )
            with suppress(KeyError):  # it may have ended with this step
                self._cancel(request_id)
        message = "the answer cannot be sent: it holds what is no text or number"
        kept = [event for event in events if event.request_id not in lost]
        return [*kept, *(Failed(request_id, message) for request_id in lost)]

    def _send(self, events: list[Event]) -> None:
        self._running.difference_update(event.request_id for event in events if not isinstance(event, Piece))
        now = time.monotonic()
        stats = None
        if now - self._told_at > STATS_SECONDS or not self._running:
            self._told_at, stats = now, self._engine.stats()
        send(self._connection, Step(events, stats))


def load(connection: "Connection[Any, Any]") -> Engine:
    """The engine that the server asks for. Raises EngineError where it cannot be had."""
    from quengine.llm import LLM
    from quengine.serve.processes.engine_llm import LLMEngine

    asked = receive_in_engine(connection)
    assert isinstance(asked, Load)
    llm = LLM(asked.model, progress=lambda text: send(connection, Progress(text)), **asked.options)
    llm.warm_up()
    send(
        connection, Ready(llm.config.parallel, llm.ctx_size, str(llm.loaded.device), tuple(llm.loaded.notes))
    )
    return LLMEngine(llm)


def _kind(error: Exception) -> Kind:
    if isinstance(error, CannotRunError):
        return "CannotRunError"
    return "EngineError" if isinstance(error, EngineError) else "lost"


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server says when to end
    log_lines.set_up(verbose="-v" in sys.argv[3:])
    collector.starting()
    bus_error.install()
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    Heartbeat(int(sys.argv[2])).keep_beating()
    try:
        engine = load(connection)
        collector.working()
        EngineLoop(connection, engine).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:
        ours = isinstance(error, EngineError)
        if not ours:
            logger.exception("the engine is lost")
        message = str(error) if ours else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # the server is gone as well
            send(connection, Broken(_kind(error), message))
    return 1


if __name__ == "__main__":
    # Not `sys.exit`: a lost device may hang whatever would still be let go of.
    code = main()
    sys.stderr.flush()
    os._exit(code)
