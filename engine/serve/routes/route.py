"""The declaration of a route: its paths, its function, its API, who may use it, its body and its answer.

Routing and access (`app.py`), the reading of bodies and writing of answers (`dispatch.py`), the errors of an API, and
the OpenAPI document follow from it.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import UnionType
from typing import Any, Concatenate, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from starlette.responses import Response

from quengine.serve.models.model_host import ModelHost
from quengine.serve.models.registry import Models
from quengine.serve.routes.streaming import AnswerForm
from quengine.serve.schemas.errors import error_type
from quengine.serve.schemas.fields import Body, Schema
from quengine.serve.schemas.written import Written

H = TypeVar("H", ModelHost, Models)

NOTHING = ""
"""The answer of a route that has none (204)."""
QUERIES = (400, 404, 503)
READS_ALONE = (400, 408, 413, 415)
READS = (*READS_ALONE, 404, 503)
COMPUTES = (*READS, 429, 500)
"""The error statuses of routes that name a model in the query (QUERIES), read a body (READS_ALONE), read a body that
names a model (READS), or compute (COMPUTES)."""


@dataclass(frozen=True)
class Route(Generic[H]):
    """See the module docstring.

    Attributes:
        rule: the method and the paths (Starlette's syntax), separated by spaces.
        endpoint: the function. Its first argument is the server's models, or the host of one; parameters named
            `request` (Starlette's) and `body` (a struct, read before the call) follow. It returns a value that becomes
            JSON, an `AnswerForm`, or a Response. The first line of its docstring is the route's summary.
        answer: the types of the JSON where the function returns a Response; a media type; or NOTHING.
        request: the struct of the body, or the name of a schema, where the function itself reads the body.
        errors: the statuses of errors, beside those of access.
        event: the types of a stream's events (EVENTS).
        line: the types of a stream's lines (LINES).
        query: the names and schemas of the query's parameters, all of them required.
        apps: local apps may use it where no key is set: routes that generate, and those that apps read before.
        keyless: it needs no key.
        resumable: its streams are kept where the request names its conversation.
    """

    rule: str
    endpoint: Callable[Concatenate[H, ...], Awaitable[Any]]
    answer: Any = None
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

    @cached_property
    def hints(self) -> dict[str, Any]:
        return get_type_hints(self.endpoint, include_extras=True)

    @property
    def body(self) -> type[Body] | str | None:
        """The struct of its body, or the name of a schema."""
        return self.request or self.hints.get("body")

    @property
    def answers(self) -> list[Any]:
        """The types of its answer in JSON."""
        return [*alternatives(self.hints["return"] if self.answer is None else self.answer)]


def alternatives(kind: Any) -> Iterator[Any]:
    """The types of a union, and the types of the answers of an `AnswerForm`; nothing for what is no JSON."""
    if get_origin(kind) in (Union, UnionType):
        for each in get_args(kind):
            yield from alternatives(each)
    elif isinstance(kind, type) and issubclass(kind, AnswerForm):
        yield from alternatives(get_type_hints(kind.whole, include_extras=True)["return"])
    elif kind not in (None, Response) and not isinstance(kind, str):
        yield kind


@dataclass(frozen=True)
class OfServer(Route[Models]):
    """A route that needs no model: its function is called with all models."""


@dataclass(frozen=True)
class OfModel(Route[ModelHost]):
    """A route of the model that a request names: its function gets the host, and is cancelled if the client leaves."""

    errors: tuple[int, ...] = COMPUTES
    apps: bool = True
