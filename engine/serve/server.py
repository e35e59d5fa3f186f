"""Runs the application under uvicorn until a signal, or the engine's end: binding, draining, stopping."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from quengine.errors import EngineError
from quengine.serve.app import make_app
from quengine.serve.connections import Connection
from quengine.serve.engine_port import Engine
from quengine.serve.metrics import Metrics
from quengine.serve.service import Service
from quengine.serve.settings import ServerSettings
from quengine.serve.worker import Worker

BACKLOG = 1024
JOIN_SECONDS = 10.0
"""How long the end waits for the engine's thread."""
SEND_BUFFER = 128 << 10
"""Bytes of text that the kernel holds for a reader: what it would choose by itself hides a sleeping one for minutes."""


class Server(uvicorn.Server):
    """A server with its worker.

    The first SIGTERM or SIGINT drains: no new requests (503), those taken end, at most `limits.drain_s` seconds.
    The second ends at once.

    Args:
        settings: address, keys, limits.
        make_engine: builds the engine, in the worker's thread.
        say: told a line for who started the server.
    """

    def __init__(
        self,
        settings: ServerSettings,
        make_engine: Callable[[], Engine],
        say: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.problem: BaseException | None = None
        self.say = say
        self._drain_until: float | None = None
        self._told = "starting"
        metrics = Metrics()
        self.worker = Worker(
            make_engine,
            parallel=settings.parallel,
            max_queue=settings.limits.queue,
            observe=metrics.observe,
            stopped=self._engine_stopped,
        )
        self.service = Service(settings, self.worker, metrics)
        super().__init__(
            uvicorn.Config(
                make_app(self.service),
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=max(1, int(settings.limits.write_s)),
            )
        )

    def run_until_stopped(self) -> None:
        """Serve until a signal has been obeyed.

        Raises:
            EngineError: the address cannot be used, or the model cannot be loaded.
            CannotRunError: the engine failed again and again.
        """
        listener = bind(self.settings.host, self.settings.port)
        self.say(f"listening on {_url(listener)}; the model is being loaded")
        asyncio.run(self.serve_engine(listener))
        if self.problem is not None:
            raise self.problem

    async def serve_engine(self, listener: socket.socket) -> None:
        """Serve on `listener`, which is closed at the end."""
        self.worker.start()
        try:
            await self.serve([listener])
        finally:
            self.worker.stop()
            await self.worker.join(JOIN_SECONDS)
            listener.close()

    def drain(self) -> None:
        """Take no more requests, and stop when those taken are done."""
        self.worker.drain()
        self._drain_until = time.monotonic() + self.settings.limits.drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del frame
        if self._drain_until is None:
            left = self.worker.running + self.worker.waiting
            if left:
                self.say(f"{signal.Signals(sig).name}: {left} texts are finished first; once more stops now")
            self.drain()
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's tenth of a second."""
        if self.worker.state != self._told:
            self._told = self.worker.state
            self._tell_state()
        if self._drain_until is not None and not self.should_exit:
            late = time.monotonic() >= self._drain_until
            if self.worker.idle or late:
                if not self.worker.idle:
                    self.say(f"{self.worker.running + self.worker.waiting} texts were not finished in time")
                    self.worker.stop()  # ends them with an error
                self.should_exit = True
        return await super().on_tick(counter)

    def _tell_state(self) -> None:
        engine = self.worker.engine
        if self.worker.state == "ready" and engine is not None:
            for note in engine.model.notes:
                self.say(note)
            if self.settings.parallel > engine.capacity:
                count = "one text" if engine.capacity == 1 else f"{engine.capacity} texts"
                self.say(
                    f"--parallel {self.settings.parallel}: this engine computes {count} at a time, others queue"
                )
            names = ", ".join(self.settings.model_names)
            slots = f"{self.worker.slots} slot{'s' if self.worker.slots > 1 else ''}"
            self.say(f"ready: model {names}, {slots} of {engine.model.ctx_size} tokens")
        elif self.worker.state == "restarting":
            self.say("the engine failed and is starting again")

    def _engine_stopped(self, problem: BaseException | None) -> None:
        if problem is not None:
            self.problem = problem
            self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises EngineError where the address cannot be used."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise EngineError(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise EngineError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
