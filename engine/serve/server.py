"""Runs the application under uvicorn until a signal, or the engine's end: binding, draining, stopping."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import uvicorn

from quengine.platform.log_lines import Seldom
from quengine.serve import access_log
from quengine.serve.app import make_app
from quengine.serve.connections import Connections
from quengine.serve.listener import (
    OUT_OF_RESOURCES,
    Listener,
    bind,
    connection_limit,
    reserve_descriptors,
    url_of,
)
from quengine.serve.models.model_host import ModelHost
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.models.registry import Beside, Models
from quengine.serve.models.residency import Launch
from quengine.serve.processes.server_thread import Worker
from quengine.serve.routes.route import OfServer
from quengine.serve.settings import ServerSettings

logger = logging.getLogger("quengine.serve")

JOIN_SECONDS = 10.0
"""How long the end waits for the engine's thread."""
DROPPED_AT_ONCE = 8
"""Idle connections that are closed when no descriptor is left."""


class SideRoom(Beside, Protocol):
    """A service beside a server's models, with its own routes."""

    @property
    def routes(self) -> Sequence[OfServer]: ...


class Server(uvicorn.Server):
    """uvicorn with the models and their workers.

    The first SIGTERM or SIGINT drains: new requests get a 503, and accepted ones have at most `limits.drain_s` seconds
    to end. The second signal ends the server at once.

    Args:
        settings: address, keys, limits.
        launch: builds the engine of a model, in its worker's thread.
        say: called with lines for the terminal.
        find: returns all models; None: the only one is that of `settings`.
        rooms: services beside the models.
    """

    def __init__(
        self,
        settings: ServerSettings,
        launch: Launch,
        say: Callable[[str], None],
        find: Callable[[], Sequence[ModelSpec]] | None = None,
        rooms: Sequence[SideRoom] = (),
    ) -> None:
        self.settings = settings
        self.problem: BaseException | None = None
        self.say = say
        self._drain_until: float | None = None
        self.models = Models(settings, launch, find, say, self._engine_failed, rooms)
        self.connections = Connections(settings.limits, connection_limit(settings.limits.connections))
        self._failures, self._short = Seldom(logger), Seldom(logger)
        access_log.set_level(settings.access_log)
        super().__init__(
            uvicorn.Config(
                make_app(self.models, [route for room in rooms for route in room.routes]),
                http=self.connections.protocol,  # type: ignore[arg-type]  # all that uvicorn does is call it
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=int(settings.limits.idle_s) + 1,  # the connection's own limit comes first
                timeout_graceful_shutdown=max(1, int(settings.limits.write_s)),
            )
        )

    @property
    def host(self) -> ModelHost:
        """The only model, or the first."""
        return self.models.hosts[0]

    @property
    def worker(self) -> Worker:
        return self.host.worker

    def run_until_stopped(self) -> None:
        """Serve until a signal has been obeyed.

        Raises:
            EngineError: the address cannot be used, or the model cannot be loaded.
            CannotRunError: the engine failed again and again.
        """
        listeners = [bind(host, self.settings.port) for host in self.settings.hosts]
        count = len(self.models.hosts)
        models = "the model is being loaded" if self.models.only else f"{count} models, loaded when named"
        self.say(f"listening on {' and '.join(map(url_of, listeners))}; {models}")
        asyncio.run(self.serve_engine(*listeners))
        if self.problem is not None:
            raise self.problem

    async def serve_engine(self, *listeners: socket.socket) -> None:
        """Serve on `listeners`, which are closed at the end."""
        asyncio.get_running_loop().set_exception_handler(self._loop_failed)
        for listener in listeners:
            if isinstance(listener, Listener):
                listener.make_room = self._make_room
        reserve_descriptors(listeners[0], self.connections.most)
        if self.connections.most < self.settings.limits.connections:
            self.say(
                f"--max-connections {self.settings.limits.connections}: the limit on open files (ulimit -n) leaves "
                f"room for {self.connections.most}"
            )
        self.models.start()
        try:
            await self.serve(list(listeners))
        finally:
            self.models.stop()
            await self.models.join(JOIN_SECONDS)
            for listener in listeners:
                listener.close()

    def drain(self) -> None:
        """Take no more requests, and stop when those taken are done."""
        self.models.drain()
        self._drain_until = time.monotonic() + self.settings.limits.drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del frame
        if self._drain_until is None:
            left = self.models.requests
            if left:
                requests = "one request is" if left == 1 else f"{left} requests are"
                self.say(f"{signal.Signals(sig).name}: {requests} finished first; once more stops now")
            self.drain()
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        self.models.tick()
        if self._drain_until is not None and not self.should_exit:
            late = time.monotonic() >= self._drain_until
            left = self.models.requests
            if not left or late:
                if left:
                    self.say(f"{left} requests were not finished in time")
                    self.models.stop()  # ends them with an error
                self.should_exit = True
        return await super().on_tick(counter)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs an error that asyncio cannot raise anywhere."""
        del loop
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES):  # that has been logged
            self._failures.warning("%s", context["message"], cause=error)

    def _make_room(self, error: OSError) -> int:
        """Closes idle connections if no descriptor is left for another. Returns how many."""
        count = len(self.connections)
        dropped = self.connections.drop_waiting(DROPPED_AT_ONCE)
        self._short.warning(
            "no connection can be accepted: %s; %d are open, %d idle ones are closed",
            error.strerror,
            count,
            dropped,
        )
        return dropped

    def _engine_failed(self, problem: BaseException) -> None:
        self.problem = problem
        self.should_exit = True
