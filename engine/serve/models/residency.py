"""Which of a server's models are in memory: loading them one at a time, and unloading others for that.

Models are loaded one at a time, in the order of requests. Where memory or `--models-max` is short, the least recently
used model is unloaded, an idle one before one in use. Running answers are never cut: a model to be unloaded takes no
new requests, and is unloaded after its last answer. All of it runs in the event loop, except for what a worker's thread
calls.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from quengine.errors import EngineError
from quengine.serve.models.model_host import LoadCancelledError, ModelHost, State
from quengine.serve.models.model_spec import ModelSpec, check_header
from quengine.serve.processes.shared_engine import Engine
from quengine.serve.response_store import ResponseStore

logger = logging.getLogger("quengine.serve")

MakeRoom = Callable[[int, int, str], bool]
"""Unloads another model if it has to, given the bytes needed, the bytes free, and the device; returns whether one was
unloaded."""
Launch = Callable[[ModelSpec, MakeRoom, Callable[[], None]], Engine]
"""Loads a model, in the worker's thread. It calls the last argument now and then, which raises to cancel the load."""


class Residency:
    """See the module docstring.

    Args:
        most: the most models that are loaded at once; 0: any number.
        say: called with lines for the terminal.
        failed: called with the error after which the server's only model is not loaded again.

    Attributes:
        hosts: all models of the server, loaded or not.
    """

    def __init__(
        self, launch: Launch, most: int, say: Callable[[str], None], failed: Callable[[BaseException], None]
    ) -> None:
        self.hosts: list[ModelHost] = []
        self._launch = launch
        self._most = most
        self._say = say
        self._failed = failed
        self._turn = asyncio.Lock()
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[object]] = set()
        self._rate: float | None = None  # bytes loaded a second, of the last model

    def want(self, host: ModelHost) -> None:
        """Loads a model in its turn, unless nobody wants it any more by then."""
        if host.loader is None:
            host.loader = asyncio.get_running_loop().create_task(self._load(host))

    def begin(self, host: ModelHost) -> None:
        """Load a model now."""
        self._loop = asyncio.get_running_loop()
        if not host.alone or host.state is State.ASLEEP:
            size = f" {host.nbytes / 2**30:.2f} GiB" if host.nbytes else ""
            self._say(f"{host.name}: loading{size}{self.estimate(host)}")
        host.begin()

    async def _load(self, host: ModelHost) -> None:
        try:
            async with self._turn:
                await self.until(lambda: host.state is not State.DRAINING)
                if not host.loaded and host.wanted:
                    await self._make_place(host)
                if not host.loaded and host.wanted:
                    self.begin(host)
                    await self.until(lambda: host.state is not State.LOADING)
                if host.loaded:
                    host.admit()
                    if host.cancelled:
                        self.task(self.unload(host))
        except LoadCancelledError:
            pass
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("%s cannot be loaded", host.name)
            self._say(f"{host.name}: not loaded: {error}")
            host.fail_to_load(error)
        finally:
            host.loader = None
        if host.wanted:  # by who came after the attempt had failed
            self.want(host)

    def estimate(self, host: ModelHost) -> str:
        """The time that a load will take, as text, by the rate of the last one; empty where it is unknown."""
        return "" if not self._rate or not host.nbytes else f", about {host.nbytes / self._rate:.0f} s in all"

    async def _make_place(self, host: ModelHost) -> None:
        """Unloads models until `most` allows `host` to be loaded. Raises EngineError, before any is unloaded, if the
        file of `host` is no model."""
        checked = False
        while 0 < self._most <= sum(each.occupied for each in self.hosts) and host.wanted:
            if not checked:
                await asyncio.to_thread(check_header, host.spec)
                checked = True
            if not await self._evict(host):
                return

    def _make_room(self, host: ModelHost, needed: int, free: int, device: str) -> bool:
        """`MakeRoom`, called in the thread of the worker that loads `host`."""
        if host.state is not State.LOADING:  # an engine that replaces a failed one already has room
            return False
        return asyncio.run_coroutine_threadsafe(self._room(host, needed, free, device), self._loop).result()

    async def _room(self, host: ModelHost, needed: int, free: int, device: str) -> bool:
        if device == "cpu":  # the system counts mapped weights as memory that is free
            free -= sum(each.nbytes for each in self.hosts if each is not host and each.device == "cpu")
        return free < needed and await self._evict(host, device)

    async def _evict(self, host: ModelHost, device: str | None = None) -> bool:
        """Unloads the model that `host` is to replace; False where there is none.

        Raises LoadCancelledError where nobody wants `host` any more.
        """
        others = [
            each
            for each in self.hosts
            if each is not host and each.loaded and (device is None or each.device == device)
        ]
        if not others:
            return False
        victim = min(others, key=lambda each: (each.state is not State.DRAINING, each.uses > 0, each.used_at))
        self._say(f"{victim.name}: unloaded to make room for {host.name}")
        if not await self.unload(victim, lambda: host.wanted and not host.cancelled):
            raise LoadCancelledError
        return True

    async def unload(self, host: ModelHost, still: Callable[[], bool] = lambda: True) -> bool:
        """Unloads a model after its last request, unless `still` turns false before. Returns whether it is unloaded."""
        if not host.loaded:
            return True
        if host.state is not State.DRAINING:
            host.leave()
            await self.until(lambda: not host.uses or not host.loaded or not still())
            if not host.loaded:
                return True
            if host.uses:
                host.stay()
                self.notify()
                return False
            host.unload()
        await self.until(lambda: host.state is not State.DRAINING)
        return not host.loaded

    # --- what hosts report ---------------------------------------------------------------------------------

    def host_of(self, spec: ModelSpec, responses: ResponseStore, alone: bool) -> ModelHost:
        return ModelHost(spec, responses, alone, self._make_engine, self._changed, self._ended)

    def _make_engine(self, host: ModelHost) -> Engine:
        """Called in the thread of the host's worker."""

        def check() -> None:
            if host.cancelled:
                raise LoadCancelledError

        return self._launch(host.spec, partial(self._make_room, host), check)

    def _changed(self, host: ModelHost) -> None:
        engine = host.worker.engine
        if engine is None or host.state is State.FAILED:  # a new engine may be there before the report
            self._say(f"{self._prefix(host)}the engine failed and is starting again")
        else:
            if host.load_began:
                took = max(host.used_at - host.load_began, 1e-3)
                self._rate = host.nbytes / took
                logger.info("%s: loaded in %.1f s, %.0f MB/s", host.name, took, self._rate / 1e6)
            self._say_ready(host, engine)
        self.notify()

    def _say_ready(self, host: ModelHost, engine: Engine) -> None:
        settings, prefix = host.spec.settings, self._prefix(host)
        for note in engine.model.notes:
            self._say(f"{prefix}{note}")
        if settings.parallel > engine.capacity:
            count = "one request" if engine.capacity == 1 else f"{engine.capacity} requests"
            self._say(
                f"{prefix}--parallel {settings.parallel}: this engine computes {count} at a time, others queue"
            )
        names = ", ".join(settings.model_names)
        slots = host.worker.slots
        self._say(f"ready: model {names}, {slots} slot{'s' * (slots > 1)} of {engine.model.ctx_size} tokens")

    def _prefix(self, host: ModelHost) -> str:
        return "" if host.alone else f"{host.name}: "

    def _ended(self, host: ModelHost, problem: BaseException | None) -> None:
        if problem is not None:
            if host.alone and host.state is State.FAILED:
                self._failed(problem)
            else:
                self._say(f"{host.name}: the engine failed: {problem}")
        self.notify()

    def task(self, work: "asyncio._CoroutineLike[object]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def notify(self) -> None:
        """Wakes all that wait in `until`."""
        self._change.set()
        self._change = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._change.wait()
