"""The models of a server. A request names one, and has it when it is loaded; what nobody uses makes room for others.

One model is loaded at a time, first come, first served. Where memory or `--models-max` is short, the model that was
used the longest ago leaves, an idle one before one in use, whose running answers are never cut: it takes no new
requests, and goes when the last has ended. All of it runs in the event loop but for what a worker's thread calls.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from quengine.models.hub.hub import resolve_model
from quengine.serve.http import off_loop
from quengine.serve.metrics import Metrics, ServerMetrics
from quengine.serve.models.model_entry import ModelEntry
from quengine.serve.models.model_spec import ModelSpec, check_names
from quengine.serve.processes.server_thread import Worker
from quengine.serve.processes.shared_engine import Engine
from quengine.serve.processes.shared_model import ServedModel, TextSide
from quengine.serve.response_store import ResponseStore
from quengine.serve.schemas.errors import ApiError, bad_request
from quengine.serve.service import Service
from quengine.serve.settings import ServerSettings

logger = logging.getLogger("quengine.serve")

MakeRoom = Callable[[int, int, str], bool]
"""Given the bytes that a model needs, those that are free, and the device: whether another model has left it."""
Launch = Callable[[ModelSpec, MakeRoom, Callable[[], None]], Engine]
"""Loads a model, in the worker's thread; calls the last argument now and then, which raises to stop it."""

_MOST_NAMES = 20
"""Names that an error lists."""


class LoadCancelledError(Exception):
    """The model is not wanted any more."""


class Models:
    """See the module docstring.

    Args:
        find: the models there are, called again to look for others; None: there is only the one of `settings`, which
            is loaded at once.
        say: called with lines for the terminal.
        failed: called with what an only model failed of, after which it does not come back.
    """

    def __init__(
        self,
        settings: ServerSettings,
        launch: Launch,
        find: Callable[[], Sequence[ModelSpec]] | None,
        say: Callable[[str], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.settings = settings
        self.metrics = ServerMetrics()
        self.responses = ResponseStore(settings.limits.stored)
        self.created = int(time.time())
        self.draining = False
        self._launch = launch
        self._find = find
        self._say = say
        self._failed = failed
        self._turn = asyncio.Lock()
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[object]] = set()
        self._rate: float | None = None  # bytes loaded a second, of the last model
        self.entries: list[ModelEntry] = []
        self._set([ModelSpec(settings)] if find is None else find())

    @property
    def only(self) -> ModelEntry | None:
        """The one model of a server that has no others."""
        return self.entries[0] if self._find is None else None

    def named(self, name: str) -> ModelEntry:
        """The model of a name, with or without Ollama's tag. An only model has any.

        Raises:
            ApiError: 404 with the names there are; 400 where none is given and there are several.
        """
        if self.only is not None:
            return self.only
        if not name and len(self.entries) == 1:
            return self.entries[0]
        entry = self._names.get(name) or self._names.get(name.removesuffix(":latest"))
        if entry is not None:
            return entry
        there = [each.name for each in self.entries]
        more = f" and {len(there) - _MOST_NAMES} more" if len(there) > _MOST_NAMES else ""
        listed = f"{', '.join(there[:_MOST_NAMES])}{more}"
        if not name:
            raise bad_request(f"the request names no model; there: {listed}", "model", "invalid_value")
        raise ApiError(
            404, f"no model {name[:80]!r} here; there: {listed}", param="model", code="model_not_found"
        )

    def asked(self, name: str) -> ModelEntry | None:
        """The model that a query names, or the only one; None: the server is meant. Raises ApiError (404)."""
        return self.named(name) if name else self.only

    @asynccontextmanager
    async def using(self, entry: ModelEntry, keep_s: float | None = None) -> AsyncIterator[Service]:
        """The service of a model, loaded, which stays so in the block. `keep_s`: how long it does so afterwards.

        Raises:
            ApiError: it cannot be loaded.
        """
        await self._acquire(entry)
        if self.only is None:
            entry.keep_s = entry.spec.settings.sleep_s if keep_s is None else keep_s
        try:
            yield entry.service
        finally:
            self._release(entry)

    async def described(self, entry: ModelEntry) -> ServedModel:
        """A model's tokenizer, template and description, read from its file where it is not loaded. Raises ApiError."""
        if entry.loaded or entry.alone:
            return entry.service.model
        spec = entry.spec

        def read() -> ServedModel:
            text = TextSide.of_file(resolve_model(spec.model), spec.config.chat_template)
            ctx_size = spec.config.ctx_size or text.checkpoint.config.context_length
            return ServedModel(text, ctx_size, (), "", spec.config.cache_type)

        return await off_loop(read)

    def load(self, entry: ModelEntry) -> None:
        """Begin to load a model. Raises ApiError where it is loaded or being loaded."""
        if entry.admits or entry.wanted:
            raise bad_request(f"the model {entry.name} is already running", "model")
        self._check_taking()
        entry.asked = True
        self._want(entry)

    async def unload(self, entry: ModelEntry) -> None:
        """Unload a model once its running answers have ended; stop loading one. Those who wait for it get an error.

        Raises:
            ApiError: it is not running; or it is the only one, and not one that sleeps.
        """
        if self.only is not None and self.settings.sleep_s < 0:
            raise bad_request(
                "this server has one model: end it with engine stop, or give --sleep-idle-seconds"
            )
        if not (entry.loaded or entry.wanted or entry.occupied):
            raise bad_request(f"the model {entry.name} is not running", "model")
        if not entry.loaded:
            entry.cancelled = entry.occupied
            entry.refuse(lambda: ApiError(503, f"loading {entry.name} was cancelled", code="unloaded"))
            self._notify()
            return
        self._task(self._unload(entry))

    async def rescan(self) -> None:
        """Look for models again. One that has changed, or is there no more, is unloaded after its running answers."""
        if self._find is None:
            return
        find = self._find

        def found() -> Sequence[ModelSpec]:
            specs = find()
            check_names(specs)
            return specs

        specs = await off_loop(found)
        for entry in self.entries:
            if entry.spec not in specs:
                await self._until(lambda entry=entry: entry.state != "loading")  # type: ignore[misc]
                await self._unload(entry)
        self._set(specs)

    def waiting_text(self, entry: ModelEntry) -> str:
        """What a request that waits for a model can be told."""
        if not entry.occupied or entry.loaded:
            return f"{entry.name} waits for its turn to be loaded"
        took = time.monotonic() - entry.load_began
        return f"{entry.name} is being loaded, {took:.0f} s so far{self._estimate(entry)}"

    # --- the server's side ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Load what is to be there from the start."""
        self._loop = asyncio.get_running_loop()
        for entry in self.entries:
            if entry.alone:
                self._begin(entry)
            elif entry.spec.at_start:
                self.load(entry)

    def tick(self) -> None:
        """Unload what has been idle for long enough."""
        for entry in self.entries:
            if entry.expired:
                self._say(f"{entry.name}: unloaded after {entry.keep_s:g} s without a request")
                self._task(self._unload(entry))

    def drain(self) -> None:
        """Take no more requests; those that have their model go on."""
        self.draining = True
        for entry in self.entries:
            entry.refuse(self._ending)
            entry.service.worker.drain()

    @property
    def workers(self) -> list[Worker]:
        return [entry.service.worker for entry in self.entries]

    @property
    def requests(self) -> int:
        """Sequences that are computed or queued."""
        return sum(worker.running + worker.waiting for worker in self.workers)

    def stop(self) -> None:
        """End all workers, with what they compute and load. May be called from any thread."""
        for entry in self.entries:
            entry.cancelled = True
            entry.service.worker.stop()

    async def join(self, seconds: float) -> None:
        """Wait for the workers' ends, at most so long."""
        for entry in self.entries:
            entry.service.text_pool.close()
        await asyncio.gather(*(worker.join(seconds) for worker in self.workers))

    # --- who has which model -------------------------------------------------------------------------------

    async def _acquire(self, entry: ModelEntry) -> None:
        if entry.admits:
            entry.uses += 1
            return
        self._check_taking()
        if not self.settings.models.autoload and not entry.alone and not entry.wanted:
            raise entry.service.unavailable("unloaded")
        waiter = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        self._want(entry)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)
                self._notify()
            elif not waiter.cancelled() and waiter.exception() is None:
                self._release(entry)
            raise

    def _release(self, entry: ModelEntry) -> None:
        entry.uses -= 1
        entry.used_at = time.monotonic()
        self._notify()

    def _check_taking(self) -> None:
        if self.draining:
            raise self._ending()

    def _ending(self) -> ApiError:
        return ApiError(503, "the server is shutting down", code="draining", retry_after=5)

    # --- loading and unloading -----------------------------------------------------------------------------

    def _want(self, entry: ModelEntry) -> None:
        if entry.loader is None:
            entry.loader = asyncio.get_running_loop().create_task(self._load(entry))

    async def _load(self, entry: ModelEntry) -> None:
        try:
            async with self._turn:
                await self._until(lambda: not entry.leaving)
                if not entry.loaded and entry.wanted:
                    await self._make_place(entry)
                if not entry.loaded and entry.wanted:
                    self._begin(entry)
                    await self._until(lambda: entry.service.worker.state not in ("starting", "stopped"))
                if entry.loaded:
                    entry.admit()
                    if entry.cancelled:
                        self._task(self._unload(entry))
        finally:
            entry.loader = None
            if entry.wanted:  # who came after the attempt had failed
                self._want(entry)

    def _begin(self, entry: ModelEntry) -> None:
        entry.load_began = time.monotonic()
        entry.cancelled = False
        if self.only is None or entry.asleep:
            size = f" {entry.nbytes / 2**30:.2f} GiB" if entry.nbytes else ""
            self._say(f"{entry.name}: loading{size}{self._estimate(entry)}")
        entry.service.worker.start()

    def _estimate(self, entry: ModelEntry) -> str:
        """By the rate of the last model that was loaded."""
        return (
            "" if not self._rate or not entry.nbytes else f", about {entry.nbytes / self._rate:.0f} s in all"
        )

    async def _make_place(self, entry: ModelEntry) -> None:
        most = self.settings.models.most
        if self.only is not None or not most:
            return
        while sum(each.occupied for each in self.entries) >= most and entry.wanted:
            if not await self._evict(entry):
                return

    def _make_room(self, entry: ModelEntry, needed: int, free: int, device: str) -> bool:
        """`MakeRoom`, called in the thread of the worker that loads `entry`."""
        if entry.service.worker.state != "starting":  # an engine that replaces a failed one has its place
            return False
        made = asyncio.run_coroutine_threadsafe(self._room(entry, needed, free, device), self._loop)
        return made.result()

    async def _room(self, entry: ModelEntry, needed: int, free: int, device: str) -> bool:
        if device == "cpu":  # the system counts mapped weights as memory that is free
            free -= sum(each.nbytes for each in self.entries if each is not entry and each.device == "cpu")
        return free < needed and await self._evict(entry, device)

    async def _evict(self, entry: ModelEntry, device: str | None = None) -> bool:
        """Unload the model to do without for `entry`; False where there is none, or `entry` is not wanted any more."""
        others = [
            each
            for each in self.entries
            if each is not entry and each.loaded and (device is None or each.device == device)
        ]
        if not others:
            return False
        victim = min(others, key=lambda each: (not each.leaving, each.uses > 0, each.used_at))
        self._say(f"{victim.name}: unloaded to make room for {entry.name}")
        return await self._unload(victim, lambda: entry.wanted and not entry.cancelled)

    async def _unload(self, entry: ModelEntry, still: Callable[[], bool] = lambda: True) -> bool:
        """Whether it is unloaded, after its last request; not where `still` ceases to hold before."""
        if not entry.loaded:
            return True
        if not entry.leaving:
            entry.leaving = True
            await self._until(lambda: not entry.uses or not entry.loaded or not still())
            if entry.uses and entry.loaded:
                entry.leaving = False
                self._notify()
                return False
            if not entry.loaded:
                entry.leaving = False
                return True
            if entry.alone:
                entry.service.asleep = entry.service.model
            entry.service.worker.stop()
        await self._until(lambda: not entry.leaving)
        return not entry.loaded

    # --- what workers report -------------------------------------------------------------------------------

    def _set(self, specs: Sequence[ModelSpec]) -> None:
        check_names(specs)
        old = {entry.name: entry for entry in self.entries}
        kept = [old.get(spec.name) for spec in specs]
        self.entries = [
            entry if entry is not None and entry.spec == spec else self._entry(spec)
            for spec, entry in zip(specs, kept, strict=True)
        ]
        self._names = {name: each for each in self.entries for name in each.spec.settings.model_names}

    def _entry(self, spec: ModelSpec) -> ModelEntry:
        def make_worker(metrics: Metrics) -> Worker:
            return Worker(
                lambda: self._launch(spec, partial(self._make_room, entry), check),
                parallel=spec.settings.parallel,
                max_queue=spec.settings.limits.queue,
                observe=metrics.observe,
                stopped=lambda problem: self._stopped(entry, problem),
                changed=lambda: self._changed(entry),
            )

        def check() -> None:
            if entry.cancelled:
                raise LoadCancelledError

        entry = ModelEntry(spec, make_worker, self.responses, self._find is None)
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
        self._notify()

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
        self._notify()

    def _task(self, work: "asyncio._CoroutineLike[object]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _notify(self) -> None:
        """Something has changed that `_until` may wait for."""
        self._change.set()
        self._change = asyncio.Event()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._change.wait()
