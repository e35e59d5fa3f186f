"""What a model's routes work with: its worker, its settings; and the way from requests to their outputs.

Errors of the worker become statuses of HTTP, with Retry-After and both numbers of a limit.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quengine.serve import access_log
from quengine.serve.checkpoint_metrics import CheckpointMetrics
from quengine.serve.image_metrics import ImageMetrics
from quengine.serve.metrics import Metrics
from quengine.serve.processes.server_handle import Handle, joined
from quengine.serve.processes.server_text import TextPool
from quengine.serve.processes.server_thread import NotServingError, QueueFullError, Worker
from quengine.serve.processes.shared_engine import (
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
from quengine.serve.replicas.replica_metrics import ReplicaMetrics
from quengine.serve.response_store import ResponseStore
from quengine.serve.schemas.errors import CONTEXT_EXCEEDED, ApiError, bad_request
from quengine.serve.schemas.openai import ChatRequest, CompletionRequest
from quengine.serve.settings import ServerSettings

logger = logging.getLogger("quengine.serve")

_WHY_NOT = {
    "starting": "the model is being loaded",
    "draining": "the server is shutting down",
    "restarting": "the engine failed and is starting again",
    "stopped": "the engine has stopped",
}


Vector = NDArray[np.float64]
MakeWorker = Callable[[Metrics], Worker]


class Service:
    """`worker` is another one each time the model is loaded; `asleep` is what stays of it meanwhile."""

    def __init__(self, settings: ServerSettings, make_worker: MakeWorker, responses: ResponseStore) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.metrics = metrics = Metrics()
        self._make_worker = make_worker
        self.worker = make_worker(metrics)
        self.text_pool = TextPool()
        self.responses = responses
        self.asleep: ServedModel | None = None
        self.created = int(time.time())
        metrics.gauge("running", "Requests being computed.", lambda: self.worker.running)
        metrics.gauge("waiting", "Requests in the queue.", lambda: self.worker.waiting)
        metrics.gauge("slots", "Requests that can be computed at once.", lambda: self.worker.slots)
        metrics.gauge("cache_used_tokens", "Positions in the cache.", lambda: self.worker.stats.cache_used)
        metrics.gauge(
            "cache_size_tokens", "Positions that the cache has.", lambda: self.worker.stats.cache_size
        )
        metrics.add(ReplicaMetrics(lambda: (*self.worker.stats.replicas, *self.worker.stats.prefill)))
        metrics.add(CheckpointMetrics(lambda: self.worker.stats.checkpoints))
        metrics.add(ImageMetrics(lambda: self.worker.stats.images))
        metrics.gauge("busy_seconds", "Time spent in steps.", lambda: self.worker.busy_seconds)

    @property
    def model(self) -> ServedModel:
        """Raises ApiError while there is none."""
        engine = self.worker.engine
        if engine is not None and self.worker.state != "starting":
            return engine.model
        if self.asleep is None:
            raise self.unavailable(self.worker.state)
        return self.asleep

    def renew(self) -> None:
        """Another worker, for the next time that the model is loaded; counters go on."""
        old, self.worker = self.worker, self._make_worker(self.metrics)
        self.worker.steps, self.worker.step_sequences = old.steps, old.step_sequences
        self.worker.busy_seconds = old.busy_seconds
        self.text_pool.close()
        self.text_pool = TextPool()

    @property
    def model_name(self) -> str:
        return self.settings.model_names[0]

    def verbose(self, body: ChatRequest | CompletionRequest) -> bool:
        """Whether answers have `__verbose`: with `engine -v`, as with llama-server's, all do."""
        return body.verbose or logger.isEnabledFor(logging.DEBUG)

    def unavailable(self, state: str) -> ApiError:
        if state == "unloaded":
            name = self.model_name
            raise bad_request(f"the model {name} is not loaded: POST /models/load does it", "model", state)
        return ApiError(503, _WHY_NOT.get(state, state), code=state, retry_after=5)

    def check_model_name(self, name: str) -> None:
        """Raises ApiError where names are checked (--strict-model) and this model has another; none need be given."""
        if self.settings.strict_model and name and name not in self.settings.model_names:
            names = ", ".join(self.settings.model_names)
            raise ApiError(
                404, f"no model {name[:80]!r} here; there: {names}", param="model", code="model_not_found"
            )

    @property
    def most_prompt_tokens(self) -> int:
        """Of one prompt: the server's limit, and what leaves the context room for a token."""
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
                access_log.current().submitted(prompts, self.model_name)
            return handle
        except NotServingError as error:
            raise self.unavailable(error.state) from None
        except QueueFullError:
            raise ApiError(
                429,
                f"the queue is full: {self.worker.waiting} wait, at most {self.limits.queue} may (--max-queue)",
                code="queue_full",
                retry_after=self._retry_after(),
            ) from None

    async def slot_action(self, action: SlotAction) -> SlotDone:
        """What comes of an action, once its slot is free. Raises ApiError where it fails."""
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
        """Seconds, estimated from the queue's length and the slots."""
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
                    assert isinstance(event, Piece | Finished)  # nothing else is of a completion
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

        handle.writer = keep  # the coroutine has its turn at the end
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
