"""One of a server's models: its service, who uses it and who waits for it. All of it is called in the event loop."""

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from quengine.errors import CannotRunError
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.response_store import ResponseStore
from quengine.serve.schemas.errors import ApiError
from quengine.serve.service import MakeWorker, Service

State = Literal["unloaded", "loading", "loaded", "sleeping"]


class ModelEntry:
    """See the module docstring.

    Args:
        alone: it is the server's only model: when unloaded it sleeps, and requests of the time before it was loaded at
            first do not wait for it.

    Attributes:
        uses: requests that have it.
        waiters: a future for each request that waits for it; done when it has it.
        used_at: `time.monotonic()` of the end of its last request.
        keep_s: how long it is kept after that; below 0 for ever.
        asked: it is to be loaded although no request waits.
        leaving: it is unloaded once no request has it.
        failure: why it could not be loaded, or had to be given up.
        cancelled: what is being loaded is not wanted any more.
        load_began: `time.monotonic()` when what is being loaded was begun; else 0.
        nbytes: of its weights; 0 while they are not known.
    """

    def __init__(
        self, spec: ModelSpec, make_worker: MakeWorker, responses: ResponseStore, alone: bool
    ) -> None:
        self.spec = spec
        self.alone = alone
        self.service = Service(spec.settings, make_worker, responses)
        self.uses = 0
        self.waiters: list[asyncio.Future[None]] = []
        self.loader: asyncio.Task[None] | None = None
        self.used_at = time.monotonic()
        self.keep_s = spec.settings.sleep_s
        self.asked = False
        self.leaving = False
        self.failure: str | None = None
        self.cancelled = False
        self.load_began = 0.0
        self.nbytes = spec.nbytes

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def memory(self) -> int:
        """Bytes that it takes while it is loaded: of weights and cache, as far as they are known."""
        engine = self.service.worker.engine
        return 0 if engine is None else int(engine.model.facts.get("memory", self.nbytes))

    @property
    def device(self) -> str:
        """Where it is loaded; empty while it is not."""
        engine = self.service.worker.engine
        return "" if engine is None else str(engine.model.facts.get("device", ""))

    @property
    def loaded(self) -> bool:
        return self.service.worker.state in ("ready", "restarting", "draining")

    @property
    def occupied(self) -> bool:
        """It takes memory, or is about to."""
        return self.service.worker.state != "unloaded"

    @property
    def wanted(self) -> bool:
        return self.asked or bool(self.waiters)

    @property
    def admits(self) -> bool:
        """A request has it without waiting; before it is loaded at first, an only model has a 503 for it."""
        return (self.loaded and not self.leaving) or (self.alone and self.occupied and not self.asleep)

    @property
    def asleep(self) -> bool:
        return self.service.asleep is not None

    @property
    def state(self) -> State:
        if self.loaded or (self.leaving and not self.wanted):
            return "loaded"
        if self.wanted or self.occupied:
            return "loading"
        return "sleeping" if self.asleep else "unloaded"

    @property
    def expires_in(self) -> float | None:
        """Seconds until it is unloaded for idleness; None: it is not."""
        if not self.loaded or self.keep_s < 0:
            return None
        return max(0.0, self.keep_s - (0 if self.uses else time.monotonic() - self.used_at))

    @property
    def expired(self) -> bool:
        busy = self.uses or self.wanted or self.leaving or not self.service.worker.idle
        return self.expires_in == 0 and not busy

    def admit(self) -> None:
        """Give it to all who wait."""
        self.asked = False
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
                self.uses += 1

    def refuse(self, error: Callable[[], ApiError]) -> None:
        """Fail all who wait."""
        self.asked = False
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error())

    def load_error(self, problem: BaseException | str) -> Callable[[], ApiError]:
        """What those who wait are told of a load that failed. More memory may be free later."""
        short = isinstance(problem, CannotRunError)
        message = f"the model {self.name} could not be loaded: {problem}"
        status, again = (503, 30) if short else (500, None)
        return lambda: ApiError(status, message, code="model_load_failed", retry_after=again)
