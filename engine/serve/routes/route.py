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
from quengine.serve.schemas.error_forms import error_schema_of
from quengine.serve.schemas.fields import Body
from quengine.serve.schemas.openapi_parts import Schema
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
        answer: its struct, or a list of such; a schema, the name of one, a media type for what is no JSON, or NOTHING.
        request: the struct of its body, or the name of a schema.
        errors: the statuses of its errors, beside those of access.
        event: the struct of a stream's events (EVENTS), several of them, or the name of a schema.
        line: the struct of a stream's lines (LINES), or the name of a schema.
        query: names and schemas of parameters of the query, all of them required.
        apps: apps of this machine may use it where no key guards anything: generating, and what they look at before.
        keyless: it needs no key.
        resumable: its streams are kept where a request names its conversation.
    """

    rule: str
    endpoint: Callable[[H, Request], Awaitable[Response]]
    answer: Schema | str | type[Any]
    request: type[Body] | str | None = None
    errors: tuple[int, ...] = ()
    event: Any = None
    line: str | type[Written] | None = None
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
    def error(self) -> str:
        """The schema of its errors."""
        return error_schema_of(self.paths[0])


@dataclass(frozen=True)
class OfServer(Route[Models]):
    """Of no model: its function is called with all of them."""


@dataclass(frozen=True)
class OfModel(Route[ModelHost]):
    """Of the model that a request names: its function is called with the host."""

    errors: tuple[int, ...] = COMPUTES
    apps: bool = True
