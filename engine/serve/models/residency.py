"""Which of a server's models are in memory: loading them one at a time, and unloading others for that.

Loads come in turn, first come, first served. Where memory or `--models-max` is short, the model whose last request was
the longest ago leaves, an idle one before one in use. Running answers are never cut: a model that is to leave takes no
new requests, and goes when the last has ended. All of it runs in the event loop but for what a worker's thread calls.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from quengine.errors import EngineError
from quengine.serve.metrics import Metrics
from quengine.serve.models.model_entry import ModelEntry
from quengine.serve.models.model_spec import ModelSpec, check_header
from quengine.serve.processes.server_thread import Worker
from quengine.serve.processes.shared_engine import Engine
from quengine.serve.response_store import ResponseStore

logger = logging.getLogger("quengine.serve")

MakeRoom = Callable[[int, int, str], bool]
"""Given the bytes that a model needs, those that are free, and the device: whether another model has left it."""
Launch = Callable[[ModelSpec, MakeRoom, Callable[[], None]], Engine]
"""Loads a model, in the worker's thread; calls the last argument now and then, which raises to stop it."""


class LoadCancelledError(Exception):
    """The model is not wanted any more."""


class Residency:
    """See the module docstring.

    Args:
        most: of the models that are loaded; 0: any number.
        say: called with lines for the terminal.
        failed: called with what an only model failed of, after which it does not come back.

    Attributes:
        entries: the models there are, which others may replace.
    """

    def __init__(
        self, launch: Launch, most: int, say: Callable[[str], None], failed: Callable[[BaseException], None]
    ) -> None:
        self.entries: list[ModelEntry] = []
        self._launch = launch
        self._most = most
        self._say = say
        self._failed = failed
        self._turn = asyncio.Lock()
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[object]] = set()
        self._rate: float | None = None  # bytes loaded a second, of the last model

    def want(self, entry: ModelEntry) -> None:
        """Load a model in its turn, unless nobody wants it any more then."""
        if entry.loader is None:
            entry.loader = asyncio.get_running_loop().create_task(self._load(entry))

    def begin(self, entry: ModelEntry) -> None:
        """Load a model now."""
        self._loop = asyncio.get_running_loop()
        entry.load_began = time.monotonic()
        entry.cancelled = False
        if not entry.alone or entry.asleep:
            size = f" {entry.nbytes / 2**30:.2f} GiB" if entry.nbytes else ""
            self._say(f"{entry.name}: loading{size}{self.estimate(entry)}")
        entry.service.worker.start()

    async def _load(self, entry: ModelEntry) -> None:
        try:
            async with self._turn:
                await self.until(lambda: not entry.leaving)
                if not entry.loaded and entry.wanted:
                    await self._make_place(entry)
                if not entry.loaded and entry.wanted:
                    self.begin(entry)
                    await self.until(lambda: entry.service.worker.state not in ("starting", "stopped"))
                if entry.loaded:
                    entry.admit()
                    if entry.cancelled:
                        self.task(self.unload(entry))
        except LoadCancelledError:
            pass
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("%s cannot be loaded", entry.name)
            entry.failure = str(error)
            self._say(f"{entry.name}: not loaded: {error}")
            entry.refuse(entry.load_error(error))
        finally:
            entry.loader = None
        if entry.wanted:  # by who came after the attempt had failed
            self.want(entry)

    def estimate(self, entry: ModelEntry) -> str:
        """By the rate of the last model that was loaded."""
        return (
            "" if not self._rate or not entry.nbytes else f", about {entry.nbytes / self._rate:.0f} s in all"
        )

    async def _make_place(self, entry: ModelEntry) -> None:
        """Unload what is too many. Raises EngineError, and nothing is unloaded, for a file that is no model's."""
        checked = False
        while 0 < self._most <= sum(each.occupied for each in self.entries) and entry.wanted:
            if not checked:
                await asyncio.to_thread(check_header, entry.spec)
                checked = True
            if not await self._evict(entry):
                return

    def _make_room(self, entry: ModelEntry, needed: int, free: int, device: str) -> bool:
        """`MakeRoom`, called in the thread of the worker that loads `entry`."""
        if entry.service.worker.state != "starting":  # an engine that replaces a failed one has its place
            return False
        return asyncio.run_coroutine_threadsafe(self._room(entry, needed, free, device), self._loop).result()

    async def _room(self, entry: ModelEntry, needed: int, free: int, device: str) -> bool:
        if device == "cpu":  # the system counts mapped weights as memory that is free
            free -= sum(each.nbytes for each in self.entries if each is not entry and each.device == "cpu")
        return free < needed and await self._evict(entry, device)

    async def _evict(self, entry: ModelEntry, device: str | None = None) -> bool:
        """Unload the model to do without for `entry`; False where there is none.

        Raises LoadCancelledError where `entry` is not wanted any more.
        """
        others = [
            each
            for each in self.entries
            if each is not entry and each.loaded and (device is None or each.device == device)
        ]
        if not others:
            return False
        victim = min(others, key=lambda each: (not each.leaving, each.uses > 0, each.used_at))
        self._say(f"{victim.name}: unloaded to make room for {entry.name}")
        if not await self.unload(victim, lambda: entry.wanted and not entry.cancelled):
            raise LoadCancelledError
        return True

    async def unload(self, entry: ModelEntry, still: Callable[[], bool] = lambda: True) -> bool:
        """Whether it is unloaded, after its last request; not where `still` ceases to hold before."""
        if not entry.loaded:
            return True
        if not entry.leaving:
            entry.leaving = True
            await self.until(lambda: not entry.uses or not entry.loaded or not still())
            if entry.uses and entry.loaded:
                entry.leaving = False
                self.notify()
                return False
            if not entry.loaded:
                entry.leaving = False
                return True
            if entry.alone:
                entry.service.asleep = entry.service.model
            entry.service.worker.stop()
        await self.until(lambda: not entry.leaving)
        return not entry.loaded

    # --- what workers report -------------------------------------------------------------------------------

    def entry_of(self, spec: ModelSpec, responses: ResponseStore, alone: bool) -> ModelEntry:
        def make_worker(metrics: Metrics) -> Worker:
            return Worker(
                lambda: self._launch(spec, partial(self._make_room, entry), check),
                parallel=spec.settings.parallel * spec.settings.replicas,
                max_queue=spec.settings.limits.queue,
                observe=metrics.observe,
                stopped=lambda problem: self._stopped(entry, problem),
                changed=lambda: self._changed(entry),
            )

        def check() -> None:
            if entry.cancelled:
                raise LoadCancelledError

        entry = ModelEntry(spec, make_worker, responses, alone)
        return entry

    def _changed(self, entry: ModelEntry) -> None:
        """The state of a worker has changed."""
        state, engine = entry.service.worker.state, entry.service.worker.engine
        if state == "ready" and engine is not None:
            entry.failure, entry.used_at = None, time.monotonic()
            entry.nbytes = int(engine.model.facts.get("size", entry.nbytes))
            if entry.load_began:
                took = max(entry.used_at - entry.load_began, 1e-3)
                self._rate, entry.load_began = entry.nbytes / took, 0.0
                logger.info("%s: loaded in %.1f s, %.0f MB/s", entry.name, took, self._rate / 1e6)
            entry.service.asleep = None
            self._say_ready(entry, engine)
        elif state == "restarting":
            self._say(f"{self._prefix(entry)}the engine failed and is starting again")
        self.notify()

    def _say_ready(self, entry: ModelEntry, engine: Engine) -> None:
        settings, prefix = entry.spec.settings, self._prefix(entry)
        for note in engine.model.notes:
            self._say(f"{prefix}{note}")
        if settings.parallel > engine.capacity:
            count = "one request" if engine.capacity == 1 else f"{engine.capacity} requests"
            self._say(
                f"{prefix}--parallel {settings.parallel}: this engine computes {count} at a time, others queue"
            )
        names = ", ".join(settings.model_names)
        slots = entry.service.worker.slots
        self._say(f"ready: model {names}, {slots} slot{'s' * (slots > 1)} of {engine.model.ctx_size} tokens")

    def _prefix(self, entry: ModelEntry) -> str:
        return "" if entry.alone else f"{entry.name}: "

    def _stopped(self, entry: ModelEntry, problem: BaseException | None) -> None:
        """The thread of a worker has ended."""
        if isinstance(problem, LoadCancelledError):
            problem = None
        if entry.alone and not entry.asleep:
            if problem is not None:
                self._failed(problem)
            return
        if problem is not None:
            entry.failure = str(problem)
            self._say(f"{entry.name}: the engine failed: {problem}")
            entry.refuse(entry.load_error(problem))
        entry.service.renew()
        entry.leaving = False
        self.notify()

    def task(self, work: "asyncio._CoroutineLike[object]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def notify(self) -> None:
        """Something has changed that `_until` may wait for."""
        self._change.set()
        self._change = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._change.wait()
