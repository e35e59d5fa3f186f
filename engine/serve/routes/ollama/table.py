"""Which function answers which path of Ollama's API."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.models.model_host import ModelHost
from quengine.serve.models.registry import Models
from quengine.serve.routes.ollama import embeddings, generation, model_changes, models

OLLAMA_ROUTES: tuple[tuple[str, str, Callable[[ModelHost, Request], Awaitable[Response]]], ...] = (
    ("POST", "/api/chat", generation.chat),
    ("POST", "/api/generate", generation.generate),
    ("POST", "/api/embed", embeddings.embed),
    ("POST", "/api/embeddings", embeddings.one_embedding),
)

OLLAMA_SERVER_ROUTES: tuple[tuple[str, str, Callable[[Models, Request], Awaitable[Response]]], ...] = (
    ("GET", "/api/tags", models.tags),
    ("GET", "/api/ps", models.running),
    ("GET", "/api/version", models.version),
    ("POST", "/api/show", models.show),
    ("POST", "/api/pull", model_changes.pull),
    ("POST", "/api/create", model_changes.create),
    ("DELETE", "/api/delete", model_changes.delete),
    ("POST", "/api/copy", model_changes.copy),
)
