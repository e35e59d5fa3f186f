"""What is said of a route once: its paths, its function, its API, who may use it, what it takes and what it answers.

Routing and access (`app.py`), the streams and errors of an API, and the OpenAPI document follow from it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.models.model_host import ModelHost
from quengine.serve.models.registry import Models
from quengine.serve.schemas.errors import error_type
from quengine.serve.schemas.fields import Body, Schema
from quengine.serve.schemas.written import Written

H = TypeVar("H", ModelHost, Models)

NOTHING = ""
"""The answer of a route that has none (204)."""
READS_ALONE = (400, 408, 413, 415)
READS = (*READS_ALONE, 404, 503)
COMPUTES = (*READS, 429, 500)
"""Statuses of the errors of routes that read a body; of a model; and compute."""


@dataclass(frozen=True)
class Route(Generic[H]):
    """See the module docstring.

    Attributes:
        rule: its method, and its paths as Starlette takes them, between spaces.
        endpoint: its function; the first line of its docstring is the route's summary.
        answer: its type, as msgspec takes it, or a tuple: one of several; a media type for what is no JSON, or NOTHING.
        request: the struct of its body, or the name of a schema.
        errors: the statuses of its errors, beside those of access.
        event: the type of a stream's events (EVENTS), or of several.
        line: the struct of a stream's lines (LINES).
        query: names and schemas of parameters of the query, all of them required.
        apps: apps of this machine may use it where no key guards anything: generating, and what they look at before.
        keyless: it needs no key.
        resumable: its streams are kept where a request names its conversation.
    """

    rule: str
    endpoint: Callable[[H, Request], Awaitable[Response]]
    answer: Any
    request: type[Body] | str | None = None
    errors: tuple[int, ...] = ()
    event: Any = None
    line: Any = None
    query: tuple[tuple[str, Schema], ...] = ()
    apps: bool = False
    keyless: bool = False
    resumable: bool = False

    @property
    def method(self) -> str:
        return self.rule.split()[0]

    @property
    def paths(self) -> list[str]:
        return self.rule.split()[1:]

    @property
    def summary(self) -> str:
        return (self.endpoint.__doc__ or "").partition("\n")[0]

    @property
    def error(self) -> type[Written]:
        """The form of its errors."""
        return error_type(self.paths[0])


@dataclass(frozen=True)
class OfServer(Route[Models]):
    """Of no model: its function is called with all of them."""


@dataclass(frozen=True)
class OfModel(Route[ModelHost]):
    """Of the model that a request names: its function is called with the host."""

    errors: tuple[int, ...] = COMPUTES
    apps: bool = True
