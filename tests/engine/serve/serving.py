"""A server in a thread of its own, for tests: on a free port, with the fake engine or a tiny model behind it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from openai import OpenAI

from quengine.request.sampling_params import SamplingParams
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.models.residency import Launch
from quengine.serve.processes.shared_engine import Engine, Event
from quengine.serve.server import Server, bind
from quengine.serve.settings import Limits, ServerSettings
from quengine.serve.table import ROUTES
from quengine.serve.tool_options import ToolsOptions
from quengine.serve.tools.tool_routes import ToolRoom
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.speaking_engine import SpeakingEngine

KEY = "test-key"

LOAD_SECONDS = 240.0
"""For a model of a test, where other work takes the processors."""

TABLE = (*ROUTES, *ToolRoom(ToolsOptions(), print).routes)
"""All routes."""


@dataclass
class Served:
    """A running server, what it has beside its models, and its address. `said` is what it would have printed."""

    server: Server
    tools: ToolRoom
    url: str
    said: list[str] = field(default_factory=list)

    def http(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)  # type: ignore[arg-type]

    def openai(self, key: str = KEY) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def wait_until(self, holds: Callable[[], bool], seconds: float = 120.0) -> bool:
        """Whether something comes to hold in time."""
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True


E = TypeVar("E", bound=Engine)


def held(engine: E, goes_on: threading.Event) -> E:
    """The engine, of which no step begins before `goes_on` is set."""
    step = engine.step

    def later() -> list[Event]:
        assert goes_on.wait(120)
        return step()

    engine.step = later  # type: ignore[method-assign]
    return engine


def one_by_one(engine: E, server: Server) -> E:
    """The engine, of which each step begins once the event loop has come to an end with what the one before has
    computed: a loop that was held up has several tokens as one piece."""
    step = engine.step

    def later() -> list[Event]:
        worker, is_done = server.worker, threading.Event()

        def turn(left: int) -> None:
            is_done.set() if not left else worker._loop.call_soon(turn, left - 1)

        with suppress(RuntimeError):  # the loop has closed
            worker._loop.call_soon_threadsafe(turn, 20)
            while not (worker.stopping or is_done.wait(0.05)):
                pass
        return step()

    engine.step = later  # type: ignore[method-assign]
    return engine


@contextmanager
def serving(
    make_engine: Callable[[], Engine] = FakeEngine,
    *,
    limits: Limits | None = None,
    settings: dict[str, object] | None = None,
    ready: bool = True,
    launch: Launch | None = None,
    find: Callable[[], list[ModelSpec]] | None = None,
) -> Iterator[Served]:
    """A server until the block ends; `ready`: begin when it takes requests. Of several models `launch` makes the
    engines, and `find` lists them."""
    chosen: dict[str, object] = {
        "model_names": ("fake",),
        "port": 0,
        "parallel": 64,
        "defaults": SamplingParams(max_tokens=8),
        "limits": limits or Limits(),
        **(settings or {}),
    }
    said: list[str] = []
    made = ServerSettings(**chosen)  # type: ignore[arg-type]
    tools = ToolRoom(made.tools, said.append)

    def make(*_: object) -> Engine:
        engine = make_engine()
        return one_by_one(engine, server) if isinstance(engine, SpeakingEngine) else engine

    server = Server(made, launch or make, said.append, find, [tools])
    listener = bind("127.0.0.1", 0)
    served = Served(server, tools, f"http://127.0.0.1:{listener.getsockname()[1]}", said)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve_engine(listener)))
    thread.start()
    try:
        if find is not None:
            assert served.wait_until(lambda: server.started)
        elif ready:
            assert served.wait_until(lambda: server.host.state == "ready", LOAD_SECONDS), server.host.state
        yield served
    finally:
        server.models.stop()
        server.should_exit = server.force_exit = True
        thread.join(120)
        assert not thread.is_alive(), "the server did not stop"
