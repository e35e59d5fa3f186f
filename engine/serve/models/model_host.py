"""One of a server's models: its state, the requests that use it or wait for it, and the way of requests to its engine.

Errors of the worker become HTTP statuses, with Retry-After and both numbers of a limit. All of it is called in the
event loop.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quengine.errors import CannotRunError
from quengine.serve import access_log
from quengine.serve.engine_metrics import EngineMetrics
from quengine.serve.metrics import Metrics
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.processes.server_handle import Handle, joined
from quengine.serve.processes.server_text import TextPool
from quengine.serve.processes.server_thread import NotServingError, QueueFullError, Worker
from quengine.serve.processes.shared_engine import (
    Engine,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Piece,
    SlotAction,
    SlotDone,
    Work,
)
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.response_store import ResponseStore
from quengine.serve.schemas.canonical import ChatRequest, CompletionRequest
from quengine.serve.schemas.errors import CONTEXT_EXCEEDED, ApiError, bad_request, shutting_down

logger = logging.getLogger("quengine.serve")

Vector = NDArray[np.float64]
Status = Literal["unloaded", "loading", "loaded", "sleeping"]


class LoadCancelledError(Exception):
    """Nobody wants the model any more."""


class State(StrEnum):
    """The states of a model."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    """Its engine has failed and is being replaced, or it could not be loaded; the next request tries again."""
    DRAINING = "draining"
    """It takes no new requests, and is unloaded when those that use it have ended."""
    ASLEEP = "asleep"
    """Unloaded; its tokenizer, template and description stay."""


_NEXT: Mapping[State, frozenset[State]] = {
    State.ABSENT: frozenset((State.LOADING, State.FAILED)),
    State.LOADING: frozenset((State.READY, State.FAILED, State.ABSENT, State.ASLEEP)),
    State.READY: frozenset((State.DRAINING, State.FAILED, State.ABSENT)),
    State.FAILED: frozenset(State),
    State.DRAINING: frozenset((State.READY, State.FAILED, State.ABSENT, State.ASLEEP)),
    State.ASLEEP: frozenset((State.LOADING,)),
}
"""For each state, those that may follow it."""


class ModelHost:
    """See the module docstring.

    Args:
        spec: the model; the first of its names is the model's.
        responses: the server's stored responses.
        alone: it is the server's only model: when unloaded it sleeps, and requests that come before its first load is
            done do not wait for it.
        make_engine: loads the model, in the worker's thread; raises LoadCancelledError if it is not wanted any more.
        changed: called after each change of `state`, and when an engine is there again.
        ended: called when a load or the engine has failed for good, with the error; None: it was unloaded.

    Attributes:
        state: the state of the model; only methods of this class change it.
        uses: the number of requests that are using it.
        waiters: a future for each request that waits for the model; done when the request may use it.
        used_at: `time.monotonic()` of the end of its last request.
        keep_s: how many seconds it is kept after that; below 0 for ever.
        load_requested: it is to be loaded although no request waits.
        failure: why it could not be loaded, or had to be given up.
        cancelled: the load under way is not wanted any more.
        load_began: `time.monotonic()` when the load under way began; else 0.
        nbytes: bytes of its weights; 0 while unknown.
        worker: a new one for each load.
        kept: what stays of a sleeping model, until it is loaded again.
        lora: scales of its LoRA adapters for requests that give none; None: the scales that it was loaded with.
    """

    def __init__(
        self,
        spec: ModelSpec,
        responses: ResponseStore,
        alone: bool,
        make_engine: "Callable[[ModelHost], Engine]",
        changed: "Callable[[ModelHost], None]",
        ended: "Callable[[ModelHost, BaseException | None], None]",
    ) -> None:
        self.spec = spec
        self.settings = spec.settings
        self.limits = spec.settings.limits
        self.alone = alone
        self.responses = responses
        self.state = State.ABSENT
        self.uses = 0
        self.waiters: list[asyncio.Future[None]] = []
        self.loader: asyncio.Task[None] | None = None
        self.used_at = time.monotonic()
        self.keep_s = spec.settings.sleep_s
        self.load_requested = False
        self.failure: str | None = None
        self.cancelled = False
        self.ending = False
        """The server ends."""
        self.load_began = 0.0
        self.nbytes = spec.nbytes
        self.kept: ServedModel | None = None
        self.lora: Mapping[int, float] | None = None
        self._latest: ServedModel | None = None
        self._make_engine, self._changed, self._ended = make_engine, changed, ended
        self.metrics = metrics = Metrics()
        self.worker = self._new_worker()
        self.text_pool = TextPool()
        metrics.gauge("running", "Requests being computed.", lambda: self.worker.running)
        metrics.gauge("waiting", "Requests in the queue.", lambda: self.worker.waiting)
        metrics.gauge("slots", "Requests that can be computed at once.", lambda: self.worker.slots)
        metrics.gauge("cache_used_tokens", "Positions in the cache.", lambda: self.worker.stats.cache_used)
        metrics.gauge(
            "cache_size_tokens", "Positions that the cache has.", lambda: self.worker.stats.cache_size
        )
        metrics.add(EngineMetrics(lambda: self.worker.stats))
        metrics.gauge("busy_seconds", "Time spent in steps.", lambda: self.worker.busy_seconds)

    # --- its state -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Load it now."""
        self.load_began = time.monotonic()
        self.cancelled = False
        self._enter(State.LOADING)
        self.worker.start()

    def leave(self) -> None:
        """Take no new requests."""
        self._enter(State.DRAINING)

    def stay(self) -> None:
        """Take requests again, although it was to be unloaded."""
        self._enter(State.READY if self.worker.serving else State.FAILED)

    def unload(self) -> None:
        """End its engine; an only model sleeps from then on."""
        self.kept = self._latest if self.alone else None
        self.worker.stop()

    def fail_to_load(self, error: Exception) -> None:
        """Its load failed, or could not begin: those who wait get the error."""
        self.failure = str(error)
        if self.state is State.ABSENT:
            self._enter(State.FAILED)
        self.refuse(self.load_error(error))

    def _engine_ready(self) -> None:
        engine = self.worker.engine
        if engine is None:
            return  # it has failed since, which is reported next
        self.failure, self.used_at = None, time.monotonic()
        self.nbytes = int(engine.model.facts.get("size", self.nbytes))
        self._latest = engine.model
        if self.state is not State.DRAINING:  # else it leaves, and what is to stay of it does
            self.kept = None
            self._enter(State.READY)
        self._changed(self)
        self.load_began = 0.0

    def _engine_failed(self) -> None:
        if self.state is not State.DRAINING:
            self._enter(State.FAILED)
        self._changed(self)

    def _worker_ended(self, problem: BaseException | None) -> None:
        if isinstance(problem, LoadCancelledError):
            problem = None
        if problem is not None:
            self.failure = str(problem)
        old, self.worker = self.worker, self._new_worker()  # for the next load; counters go on
        self.worker.steps, self.worker.step_sequences = old.steps, old.step_sequences
        self.worker.busy_seconds = old.busy_seconds
        self.text_pool.close()
        self.text_pool = TextPool()
        over = State.ABSENT if problem is None else State.FAILED
        self._enter(over if self.kept is None else State.ASLEEP)
        if problem is not None:
            self.refuse(self.load_error(problem))
        self._ended(self, problem)

    def _new_worker(self) -> Worker:
        settings = self.settings
        return Worker(
            lambda: self._make_engine(self),
            parallel=settings.parallel * settings.replicas,
            max_queue=settings.limits.queue,
            observe=self.metrics.observe,
            ready=self._engine_ready,
            failed=self._engine_failed,
            ended=self._worker_ended,
        )

    def _enter(self, state: State) -> None:
        assert state in _NEXT[self.state], (self.name, self.state, state)
        self.state = state

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def memory(self) -> int:
        """Bytes of its weights and cache, as far as they are known; 0 while it is not loaded."""
        engine = self.worker.engine
        return 0 if engine is None else int(engine.model.facts.get("memory", self.nbytes))

    @property
    def device(self) -> str:
        """Where it is loaded; empty while it is not."""
        engine = self.worker.engine
        return "" if engine is None else str(engine.model.facts.get("device", ""))

    @property
    def loaded(self) -> bool:
        """Whether it has an engine, or is getting another for one that failed."""
        return self.state in (State.READY, State.DRAINING) or self.replaced

    @property
    def replaced(self) -> bool:
        """Whether its engine has failed and another is being made."""
        return self.state is State.FAILED and self.worker.alive

    @property
    def occupied(self) -> bool:
        """Whether it takes memory, or is about to."""
        return self.loaded or self.state is State.LOADING

    @property
    def wanted(self) -> bool:
        return self.load_requested or bool(self.waiters)

    @property
    def admits(self) -> bool:
        """Whether a request does not wait for it. Before its first load is done, an only model answers with a 503."""
        unready = (State.LOADING, State.FAILED)
        first = self.alone and self.kept is None and self.state in unready
        return self.state is State.READY or self.replaced or first

    @property
    def status(self) -> Status:
        """Its state, as llama-server's router names it."""
        if self.loaded:
            return "loaded"
        if self.wanted or self.state is State.LOADING:
            return "loading"
        return "sleeping" if self.state is State.ASLEEP else "unloaded"

    @property
    def expires_in(self) -> float | None:
        """Seconds until it is unloaded for idleness; None: it is not loaded, or never unloaded."""
        if not self.loaded or self.keep_s < 0:
            return None
        return max(0.0, self.keep_s - (0 if self.uses else time.monotonic() - self.used_at))

    @property
    def expired(self) -> bool:
        busy = self.uses or self.wanted or self.state is State.DRAINING or not self.worker.idle
        return self.expires_in == 0 and not busy

    # --- who has it ----------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Let all waiting requests use it."""
        self.load_requested = False
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
                self.uses += 1

    def refuse(self, error: Callable[[], ApiError]) -> None:
        """Fail all waiting requests."""
        self.load_requested = False
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error())

    def load_error(self, problem: BaseException | str) -> Callable[[], ApiError]:
        """A function that makes the error of waiting requests after a failed load. CannotRunError becomes a 503 to be
        tried again, since more memory may be free later."""
        short = isinstance(problem, CannotRunError)
        message = f"the model {self.name} could not be loaded: {problem}"
        status, again = (503, 30) if short else (500, None)
        return lambda: ApiError(status, message, code="model_load_failed", retry_after=again)

    def unavailable(self) -> ApiError:
        """Why it takes no request now."""
        if self.ending:
            return shutting_down()
        if self.state is State.LOADING:
            code, why = "starting", "the model is being loaded"
        elif self.worker.alive and not self.worker.stopping:
            code, why = "restarting", "the engine failed and is starting again"
        elif self.worker.stopping or (self.alone and self.state is State.FAILED):
            code, why = "stopped", "the engine has stopped"
        else:
            wrong = f"the model {self.name} is not loaded: POST /models/load does it"
            return bad_request(wrong, "model", "unloaded")
        return ApiError(503, why, code=code, retry_after=5)

    # --- its requests --------------------------------------------------------------------------------------

    @property
    def model(self) -> ServedModel:
        """Raises ApiError while there is none."""
        engine = self.worker.engine
        model = self.kept if engine is None else engine.model
        if model is None:
            raise self.unavailable()
        return model

    @property
    def shown(self) -> ServedModel:
        """The model as lists of several describe it: as it was last, where its engine is replaced or has ended.

        Raises ApiError where there is none.
        """
        last = self._latest if self.loaded and not self.alone else None
        return last or self.model

    def verbose(self, body: ChatRequest | CompletionRequest) -> bool:
        """Whether answers have `__verbose`: with `engine -v`, as with llama-server's, all do."""
        return body.verbose or logger.isEnabledFor(logging.DEBUG)

    def check_model_name(self, name: str) -> None:
        """Raises ApiError where names are checked (--strict-model) and this model has another; none need be given."""
        if self.settings.strict_model and name and name not in self.settings.model_names:
            names = ", ".join(self.settings.model_names)
            raise ApiError(
                404, f"no model {name[:80]!r} here; there: {names}", param="model", code="model_not_found"
            )

    @property
    def most_prompt_tokens(self) -> int:
        """The most tokens of one prompt: the server's limit, but no more than leave the context room for one token."""
        limit, room = self.limits.prompt, self.model.ctx_size - 1
        return room if limit is None else min(limit, room)

    def prompt_error(self, count: int, param: str, size: int | None = None) -> ApiError:
        """A prompt is too long. `size`: its bytes, where it was not tokenized and `count` is a lower bound."""
        context, limit = self.model.ctx_size, self.limits.prompt
        has, length = f"the prompt has {count} tokens", self.model.token_length
        if size is not None and length is not None:
            has = f"the prompt has {size} bytes of text, at {length.longest} or fewer a token at least {count} tokens"
        if limit is not None and count > limit:
            message = f"{has}, this server takes at most {limit} (--max-prompt-tokens)"
            return bad_request(message, param, "over_limit")
        return ApiError(
            400,
            # litellm looks for llama-server's words in the message, LangChain for the code.
            f"{has} and the context holds {context}, of which one is for the answer: it is too large and exceeds the "
            f"available context size ({CONTEXT_EXCEEDED})",
            param=param,
            code=CONTEXT_EXCEEDED,
            details={"n_prompt_tokens": count, "n_ctx": context},
        )

    def check_inputs(self, inputs: int, param: str) -> None:
        """Raises ApiError for a request of more prompts than the server's limit."""
        most = self.limits.inputs
        if inputs > most:
            raise bad_request(
                f"{param}: {inputs} inputs in one request, this server takes at most {most} (--max-inputs)",
                param,
                "over_limit",
            )

    def submit(self, requests: Sequence[Work]) -> Handle:
        """Queue all completions of an HTTP request. Raises ApiError where the queue or the engine takes none."""
        try:
            for each in requests:
                if isinstance(each, GenerationRequest) and each.images:
                    each.most_tokens = self.most_prompt_tokens
            handle = self.worker.submit(requests)
            if prompts := [each for each in requests if isinstance(each, GenerationRequest)]:
                access_log.current().submitted(prompts, self.name)
            return handle
        except NotServingError:
            raise self.unavailable() from None
        except QueueFullError:
            raise ApiError(
                429,
                f"the queue is full: {self.worker.waiting} wait, at most {self.limits.queue} may (--max-queue)",
                code="queue_full",
                retry_after=self._retry_after(),
            ) from None

    async def slot_action(self, action: SlotAction) -> SlotDone:
        """The result of an action, once its slot is free. Raises ApiError where it fails."""
        handle = self.submit([action])
        try:
            while True:
                for _, event in await handle.events():
                    if isinstance(event, Failed):
                        raise _failure(event)
                    if isinstance(event, SlotDone):
                        return event
        except asyncio.CancelledError:
            self.worker.cancel(handle)
            raise

    def _retry_after(self) -> int:
        """Seconds to wait before a retry, estimated from the queue's length and the slots."""
        return max(1, min(60, self.worker.waiting // max(1, self.worker.slots)))

    async def events(self, handle: Handle) -> AsyncGenerator[tuple[int, Piece | Finished], None]:
        """The events of an HTTP request until all its completions have ended; (which completion, event).

        What has gathered since the last write is one piece. Closing it early cancels. Raises ApiError when a completion
        fails; the others of the request are then cancelled too.
        """
        left, record = len(handle.requests), access_log.current()
        try:
            while left:
                for choice, event in await handle.events():
                    if isinstance(event, Failed):
                        record.error = event.message
                        raise self.prompt_error(event.tokens, "prompt") if event.tokens else _failure(event)
                    assert isinstance(event, Piece | Finished)  # a completion has no other events
                    record.event(event)
                    left -= isinstance(event, Finished)
                    yield choice, event
        finally:
            if left:
                self.worker.cancel(handle)
                self.metrics.cancelled(left)

    async def vectors(self, handle: Handle) -> list[Vector]:
        """The embedding of each request, in the order of the requests."""
        found: dict[int, Vector] = {}
        async for choice, event in self.events(handle):
            if isinstance(event, Finished):
                found[choice] = np.array(event.embedding or ())  # a quarter of the tuple's memory
        return [found[choice] for choice in range(len(handle.requests))]

    async def outputs(self, handle: Handle) -> list[tuple[Piece, Finished]]:
        """The pieces of each request as one, and its end, in the order of the requests."""
        record, arrived = access_log.current(), list[tuple[int, Event]]()

        def keep(choice: int, piece: Piece) -> bool:
            record.event(piece)
            arrived.append((choice, piece))
            return True

        handle.writer = keep  # the coroutine runs only at the end
        async for each in self.events(handle):
            arrived.append(each)
        events = joined(arrived)
        pieces = {choice: event for choice, event in events if isinstance(event, Piece)}
        ends = {choice: event for choice, event in events if isinstance(event, Finished)}
        return [
            (pieces.get(choice, Piece(request.id, (), "")), ends[choice])
            for choice, request in enumerate(handle.requests)
        ]


def _failure(event: Failed) -> ApiError:
    if event.fault == "request":
        return bad_request(event.message)
    logger.error("a request failed: %s", event.message)
    return ApiError(500, event.message)
