"""The access log: a line for each request, when it has been answered or its client has gone."""

import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import Scope

from quengine.platform.log_lines import one_line
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece

logger = logging.getLogger("quengine.serve.access")

POLLED_PATHS = frozenset({"/health", "/v1/health", "/metrics", "/slots"})
"""Polled by machines: logged with `-v` only."""
CLIENT_GONE = 499
_MAX_PATH = 200  # characters
_MAX_ERROR = 300

_current: ContextVar["RequestRecord | None"] = ContextVar("request_record", default=None)


@dataclass
class RequestRecord:
    """The log line of one HTTP request. Token counts cover all its completions. `ignored`: fields of its body that no
    route has or that have no effect here. `shortened`: the number of its prompts that were cut to fit the context.
    `began`, `first_token` and `last_token` are `perf_counter` times."""

    scope: Scope
    began: float = field(default_factory=time.perf_counter)
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    ignored: list[str] = field(default_factory=list)
    shortened: int = 0
    has_images: bool = False
    model: str = ""
    first_token: float | None = None
    last_token: float | None = None

    def submitted(self, requests: Sequence[GenerationRequest], model: str) -> None:
        """Notes the model, the prompt tokens and whether it has images. A prompt of several completions counts once."""
        self.model = model
        self.prompt_tokens = sum(len(request.prompt) for request in requests if request.index == 0)
        self.has_images = any(request.images for request in requests)

    def event(self, event: Piece | Finished) -> None:
        if self.first_token is None:
            self.first_token = time.perf_counter()
        if isinstance(event, Piece):
            self.completion_tokens += len(event.tokens)
        else:
            self.last_token = time.perf_counter()
            self.completion_tokens += event.timings.end_tokens
            if self.has_images:  # of one prompt, whose rows the engine has counted
                self.prompt_tokens = event.timings.prompt_tokens
            self.cached_tokens = max(self.cached_tokens, event.timings.cached_tokens)

    def line(self, status: int) -> str:
        """Address, method, path as it was sent (without its query), status, seconds, tokens, error."""
        client = self.scope.get("client")
        address = f"{client[0]}:{client[1]}" if client else "-"
        path = (self.scope.get("raw_path") or self.scope["path"].encode()).decode("latin-1")
        took = time.perf_counter() - self.began
        parts = [f'{address} "{self.scope["method"]} {one_line(path, _MAX_PATH)}" {status} {took:.3f} s']
        if self.prompt_tokens is not None:
            parts.append(f"prompt {self.prompt_tokens} tokens ({self.cached_tokens} cached)")
            parts.append(f"completion {self.completion_tokens} tokens")
        if self.error:
            parts.append(f"error: {one_line(self.error, _MAX_ERROR)}")
        return ", ".join(parts)

    def write(self, status: int) -> None:
        level = logging.DEBUG if self.scope["path"] in POLLED_PATHS else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "%s %s", time.strftime("%Y-%m-%d %H:%M:%S"), self.line(status))


def begin(scope: Scope) -> RequestRecord:
    """The record of the request that this task answers from now on."""
    record = RequestRecord(scope)
    _current.set(record)
    return record


def current() -> RequestRecord:
    """The record of the request that is being answered; an unused one outside of any."""
    return _current.get() or RequestRecord({})


def set_level(wanted: bool) -> None:
    """Switches lines of requests on or off. Polled paths have lines only where the whole program logs for debugging."""
    verbose = logging.getLogger("quengine").isEnabledFor(logging.DEBUG)
    logger.setLevel(logging.WARNING if not wanted else logging.DEBUG if verbose else logging.INFO)
