"""The models of a server: a request names one, and waits until it is loaded. All of it runs in the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from quengine.models.hub.hub import resolve_model
from quengine.serve.http import off_loop
from quengine.serve.metrics import ServerMetrics
from quengine.serve.models.model_host import ModelHost
from quengine.serve.models.model_links import folder_name, linked_model, remade_model, unlinked_model
from quengine.serve.models.model_spec import ModelSpec, check_names
from quengine.serve.models.preset_file import read_options
from quengine.serve.models.pulls import Pulls
from quengine.serve.models.residency import Launch, Residency
from quengine.serve.processes.shared_model import ServedModel, TextSide
from quengine.serve.response_store import ResponseStore
from quengine.serve.resumable import StreamStore
from quengine.serve.schemas.errors import ApiError, bad_request, shutting_down
from quengine.serve.settings import ServerSettings

_MOST_NAMES = 20
"""The most names that an error lists."""


class Beside(Protocol):
    """A service that starts and ends with a server's models."""

    def start(self) -> None: ...

    def end(self) -> Awaitable[None]:
        """Ends the service. May be called more than once, and while answers are being finished."""
        ...


class Models:
    """See the module docstring.

    Args:
        launch: makes the engine of a model.
        find: finds all models, again and again; None: the only model is that of `settings`, which is loaded at once.
        say: called with lines for the terminal.
        failed: called with the error after which the server's only model is not loaded again.
        beside: services that start and end with the models.

    Attributes:
        joined_metrics: the metrics of all servers, where this is one of several behind an address; else None.
    """

    def __init__(
        self,
        settings: ServerSettings,
        launch: Launch,
        find: Callable[[], Sequence[ModelSpec]] | None,
        say: Callable[[str], None],
        failed: Callable[[BaseException], None],
        beside: Sequence[Beside] = (),
    ) -> None:
        self.settings = settings
        self._beside = beside
        self.metrics = ServerMetrics()
        self.responses = ResponseStore(settings.limits.stored)
        self.streams = StreamStore()
        self.pulls = Pulls(self._link)
        self.created = int(time.time())
        self.draining = False
        self.joined_metrics: Callable[[], Awaitable[bytes]] | None = None
        self._find = find
        self._say = say
        self._looking = asyncio.Lock()
        self._residency = Residency(launch, settings.models.most if find is not None else 0, say, failed)
        self._set([ModelSpec(settings)] if find is None else find())

    @property
    def hosts(self) -> list[ModelHost]:
        return self._residency.hosts

    @property
    def only(self) -> ModelHost | None:
        """The one model of a server that has no others."""
        return self.hosts[0] if self._find is None else None

    def named(self, name: str) -> ModelHost:
        """The model of a name, with or without Ollama's tag. An only model has any.

        Raises:
            ApiError: 404 with the names there are; 400 where none is given and there are several.
        """
        if self.only is not None:
            return self.only
        if not name and len(self.hosts) == 1:
            return self.hosts[0]
        host = self.find(name)
        if host is not None:
            return host
        there = [each.name for each in self.hosts]
        more = f" and {len(there) - _MOST_NAMES} more" if len(there) > _MOST_NAMES else ""
        listed = f"{', '.join(there[:_MOST_NAMES])}{more}"
        if not name:
            raise bad_request(f"the request names no model; there: {listed}", "model", "invalid_value")
        raise ApiError(
            404, f"no model {name[:80]!r} here; there: {listed}", param="model", code="model_not_found"
        )

    def find(self, name: str) -> ModelHost | None:
        """The model that has this name, with or without Ollama's tag."""
        spelled = (name, name.removesuffix(":latest"), folder_name(name))
        return next((self._names[each] for each in spelled if each in self._names), None)

    def queried(self, name: str) -> ModelHost | None:
        """The model that a query names, or the only one; None: the server is meant. Raises ApiError (404)."""
        return self.named(name) if name else self.only

    @asynccontextmanager
    async def using(
        self, host: ModelHost, keep_s: float | None = None, sets_keep: bool = True
    ) -> AsyncIterator[ModelHost]:
        """A model, loaded, which stays loaded within the block.

        `keep_s`: how long it stays so afterwards, in seconds; None: as the settings say. Without `sets_keep` that time
        does not change.

        Raises:
            ApiError: it cannot be loaded.
        """
        await self._acquire(host)
        if self.only is None and sets_keep:
            host.keep_s = host.spec.settings.sleep_s if keep_s is None else keep_s
        try:
            yield host
        finally:
            self._release(host)

    async def described(self, host: ModelHost) -> ServedModel:
        """A model's tokenizer, template and description, read from its file where it is not loaded. Raises ApiError."""
        if host.loaded or host.alone:
            return host.shown
        spec = host.spec

        def read() -> ServedModel:
            text = TextSide.of_file(resolve_model(spec.model), spec.config.chat_template)
            ctx_size = spec.config.ctx_size or text.checkpoint.config.context_length
            return ServedModel(text, ctx_size, (), "", spec.config.cache_type)

        return await off_loop(read)

    def load(self, host: ModelHost) -> None:
        """Begin to load a model. Raises ApiError where it is loaded or being loaded."""
        if host.admits or host.wanted:
            raise bad_request(f"the model {host.name} is already running", "model")
        self._check_taking()
        host.load_requested = True
        self._residency.want(host)

    @property
    def unloads(self) -> bool:
        """Whether models can be unloaded; an only one can where it is also put to sleep."""
        return self.only is None or self.settings.sleep_s >= 0

    async def unload(self, host: ModelHost) -> None:
        """Unload a model once its running answers have ended; stop loading one. Those who wait for it get an error.

        Raises:
            ApiError: it is not running; or it is the only one, and not one that sleeps.
        """
        if not self.unloads:
            raise bad_request(
                "this server has one model: end it with engine stop, or give --sleep-idle-seconds"
            )
        if not (host.loaded or host.wanted or host.occupied):
            raise bad_request(f"the model {host.name} is not running", "model")
        if not host.loaded:
            host.cancelled = host.occupied
            host.refuse(lambda: ApiError(503, f"loading {host.name} was cancelled", code="unloaded"))
            self._residency.notify()
            return
        self._residency.task(self._residency.unload(host))

    async def rescan(self) -> None:
        """Look for models again. One that has changed or is gone is unloaded after its running answers. Raises
        ApiError."""
        async with self._looking:
            await self._set_found(await self._found(nullcontext()))

    async def _found(self, change: AbstractContextManager[None]) -> Sequence[ModelSpec]:
        """The models there are after `change` of the folder, which is undone if they cannot be served."""
        find = self._find
        if find is None:
            return [host.spec for host in self.hosts]

        def found() -> Sequence[ModelSpec]:
            with change:
                specs = find()
                check_names(specs)
            return specs

        return await off_loop(found)

    async def _set_found(self, specs: Sequence[ModelSpec]) -> None:
        while gone := [each for each in self.hosts if each.spec not in specs and each.status != "unloaded"]:
            await self._residency.until(lambda gone=gone: gone[0].status != "loading")  # type: ignore[misc]
            await self._residency.unload(gone[0])
        self._set(specs)

    async def copy(self, name: str, other: str) -> None:
        """Give a model another name (`model_links`), which has been checked. Raises ApiError."""
        path = self.named(name).spec.path
        if path is None:
            raise bad_request(f"{name[:80]} has no file", "source")
        await self._link(other, path, await off_loop(lambda: read_options(path)))

    async def create(self, name: str, base: str, options: Mapping[str, Any]) -> None:
        """Give a model another name, which has been checked, with `options` over its own. A model of that name that was
        created in this way is replaced. Raises ApiError."""
        path = self.named(base).spec.path
        if path is None:
            raise bad_request(f"{base[:80]} has no file", "from")
        own = await off_loop(lambda: read_options(path))
        await self._link(name, path, {**own, **options}, replaces=True)

    async def _link(
        self, name: str, path: Path, options: Mapping[str, Any] | None = None, replaces: bool = False
    ) -> None:
        folder = self.settings.models.folder
        assert folder is not None
        async with self._looking:
            change = linked_model(folder, name, path, options)
            if name in self._names:
                existing = self.named(name).spec.path
                if existing is None or not replaces:
                    raise bad_request(f"there is a model {name} already", code="invalid_value")
                change = remade_model(folder, name, existing, path, options or {})
            await self._set_found(await self._found(change))

    async def remove(self, name: str) -> None:
        """Delete the file of a model in the folder; those who wait for it get an error. Raises ApiError."""
        folder = self.settings.models.folder
        async with self._looking:
            host = self.named(name)
            path = host.spec.path
            if path is None or folder is None:
                raise bad_request(f"{name[:80]} has no file in --models-dir", "model")
            specs = await self._found(unlinked_model(folder, path))
            host.cancelled = host.occupied and not host.loaded
            host.refuse(lambda: ApiError(404, f"{host.name} was deleted", code="model_not_found"))
            await self._set_found(specs)

    def waiting_text(self, host: ModelHost) -> str:
        """What a request that waits for a model can be told."""
        if not host.occupied or host.loaded:
            return f"{host.name} waits for its turn to be loaded"
        took = time.monotonic() - host.load_began
        return f"{host.name} is being loaded, {took:.0f} s so far{self._residency.estimate(host)}"

    # --- the server's side ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the models that are to be there from the start."""
        for each in self._beside:
            each.start()
        for host in self.hosts:
            if host.alone:
                self._residency.begin(host)
            elif host.spec.at_start:
                self.load(host)

    def tick(self) -> None:
        """Unload models that have been idle long enough; while draining, end the services of `beside`."""
        if self.draining:
            for each in self._beside:
                each.end()
        for host in self.hosts:
            if host.expired:
                self._say(f"{host.name}: unloaded after {host.keep_s:g} s without a request")
                self._residency.task(self._residency.unload(host))

    def drain(self) -> None:
        """Take no more requests. Requests that already have their model go on."""
        self.draining = True
        self.pulls.stop(shutting_down())
        for host in self.hosts:
            host.refuse(shutting_down)

    @property
    def requests(self) -> int:
        """Sequences that are computed or queued, and requests that have a model."""
        return sum(max(each.uses, each.worker.running + each.worker.waiting) for each in self.hosts)

    def stop(self) -> None:
        """End all workers, with what they compute and load. May be called from any thread."""
        self.draining = True
        for host in self.hosts:
            host.ending = True
            host.worker.stop()  # before its load is cancelled, which is no failure then
            host.cancelled = True

    async def join(self, seconds: float) -> None:
        """Wait for the ends of the workers, at most so long, and of what is beside."""
        for host in self.hosts:
            host.text_pool.close()
        await asyncio.gather(
            *(each.end() for each in self._beside), *(host.worker.join(seconds) for host in self.hosts)
        )

    # --- who has which model -------------------------------------------------------------------------------

    async def _acquire(self, host: ModelHost) -> None:
        self._check_taking()
        if host.admits:
            host.uses += 1
            return
        if not self.settings.models.autoload and not host.alone and not host.wanted:
            raise host.unavailable()
        waiter = asyncio.get_running_loop().create_future()
        host.waiters.append(waiter)
        self._residency.want(host)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in host.waiters:
                host.waiters.remove(waiter)
                self._residency.notify()
            elif not waiter.cancelled() and waiter.exception() is None:
                self._release(host)
            raise

    def _release(self, host: ModelHost) -> None:
        host.uses -= 1
        host.used_at = time.monotonic()
        self._residency.notify()

    def _check_taking(self) -> None:
        if self.draining:
            raise shutting_down()

    def _set(self, specs: Sequence[ModelSpec]) -> None:
        check_names(specs)
        old, alone = {host.name: host for host in self.hosts}, self._find is None
        self._residency.hosts = [
            old[spec.name]
            if spec.name in old and old[spec.name].spec == spec
            else self._residency.host_of(spec, self.responses, alone)
            for spec in specs
        ]
        self._names = {name: each for each in self.hosts for name in each.spec.settings.model_names}
