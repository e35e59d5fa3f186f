"""Pulls of models from the Hugging Face Hub that clients ask for and follow.

A pull runs in a thread. Requests for the same model follow the same pull; it ends when the last of them has gone, and
what has arrived is kept for the next. `_Pull.watch` and the function that the thread runs are called in the thread, all
else in the event loop.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quengine.errors import CannotRunError, EngineError
from quengine.models.hub.hub_pull import DigestError, HubError, HubFile, HubRefusedError, pull_model
from quengine.serve.schemas.errors import ApiError, bad_request

logger = logging.getLogger("quengine.serve")

MOST_PULLS = 4
"""At once."""
REPORT_SECONDS = 0.1
"""Between two reports on one file."""


@dataclass(frozen=True)
class FileProgress:
    """How many of a file's `total` bytes have arrived. `digest`: hexadecimal sha256, or git's sha1 for a small file."""

    digest: str
    total: int
    completed: int


Step = FileProgress | str
"""What followers are told: the progress of a file, or what is done now."""


class _StoppedError(Exception):
    """Nobody follows the pull any more."""


class _Pull:
    """One pull. A follower's queue gets its steps, and None at the end."""

    def __init__(self) -> None:
        self.followers: set[asyncio.Queue[Step | None]] = set()
        self.newest: Step | None = None
        self.error: ApiError | None = None
        self._loop = asyncio.get_running_loop()
        self._reported = 0.0

    async def fetch(self, name: str) -> Path:
        """The first file of the model. If a new follower comes while an abandoned pull ends, the pull goes on."""
        while True:
            try:
                return await self._fetch_once(name)
            except _StoppedError:
                if self.error is not None or not self.followers:  # it was stopped, or all have left
                    raise

    async def _fetch_once(self, name: str) -> Path:
        """The first file, fetched in a thread that the end of the program does not wait for."""
        fetched: asyncio.Future[Path] = self._loop.create_future()

        def run() -> None:
            try:
                path = pull_model(name, watch=self.watch)
                self._call(lambda: fetched.set_result(path))
            except Exception as error:
                problem = error
                self._call(lambda: fetched.set_exception(problem))

        threading.Thread(target=run, name="pull", daemon=True).start()
        return await asyncio.shield(fetched)

    def watch(self, file: HubFile, nbytes: int) -> None:
        if not self.followers:
            raise _StoppedError
        now = time.monotonic()
        if nbytes == file.size or now - self._reported >= REPORT_SECONDS:
            self._reported = now
            self._call(lambda: self.tell(FileProgress(file.digest, file.size, nbytes)))

    def tell(self, step: Step | None) -> None:
        self.newest = step
        for follower in self.followers:
            follower.put_nowait(step)

    def end(self, error: ApiError | None = None) -> None:
        self.error = self.error or error
        self.tell(None)
        self.followers.clear()

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop has closed
            self._loop.call_soon_threadsafe(function)


class Pulls:
    """The pulls under way, by the names under which their models will be served.

    Args:
        arrived: called with such a name and the first file of its model; adds the model to the server.
    """

    def __init__(self, arrived: Callable[[str, Path], Awaitable[None]]) -> None:
        self._arrived = arrived
        self._running: dict[str, tuple[_Pull, asyncio.Task[None]]] = {}

    async def follow(self, name: str, hub_name: str) -> AsyncGenerator[Step, None]:
        """The steps of the pull of `hub_name`, which begins unless it is under way. Raises ApiError where it fails."""
        if name not in self._running:
            if len(self._running) >= MOST_PULLS:
                raise ApiError(429, f"{MOST_PULLS} models are being pulled already", retry_after=30)
            pull = _Pull()
            self._running[name] = pull, asyncio.create_task(self._run(name, hub_name, pull))
        pull, _ = self._running[name]
        steps = asyncio.Queue[Step | None]()
        pull.followers.add(steps)
        if pull.newest is not None:
            steps.put_nowait(pull.newest)
        try:
            while (step := await steps.get()) is not None:
                yield step
            if pull.error is not None:
                raise pull.error
        finally:
            pull.followers.discard(steps)

    def stop(self, error: ApiError) -> None:
        """End all pulls with this error; what has arrived is kept."""
        for pull, _ in list(self._running.values()):
            pull.end(error)

    async def _run(self, name: str, hub_name: str, pull: _Pull) -> None:
        error: ApiError | None = None
        try:
            path = await pull.fetch(hub_name)
            pull.tell("writing manifest")
            await self._arrived(name, path)
        except _StoppedError:
            error = ApiError(503, "the pull was stopped; pull again to go on", retry_after=1)
        except ApiError as problem:
            error = problem
        except EngineError as problem:
            error = _api_error(problem)
        except Exception as problem:
            logger.error("the pull of %s failed", name, exc_info=problem)
            error = ApiError(500, f"internal error: {type(problem).__name__}")
        finally:
            del self._running[name]
            pull.end(error)


def _api_error(error: EngineError) -> ApiError:
    """The HTTP error for a failure of the hub, the disk, or the name."""
    if isinstance(error, HubRefusedError):
        return ApiError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, HubError | DigestError):
        return ApiError(502, str(error))
    if isinstance(error, CannotRunError):
        return ApiError(507, str(error))
    return bad_request(str(error), "model", "invalid_value")
